"""Integration with kopf. Watches wake one task per resource, which observes, decides, persists the status and acts."""
