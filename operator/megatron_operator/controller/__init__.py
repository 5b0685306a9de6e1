"""kopf glue: watches wake one task per resource; the task observes, decides, persists and acts."""
