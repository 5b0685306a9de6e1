"""kopf integration: watches wake one task per resource, which observes, decides, persists and acts."""
