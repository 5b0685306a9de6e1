"""kopf integration. Watches wake one task per resource, which observes, decides, persists the status and acts."""
