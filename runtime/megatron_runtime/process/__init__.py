"""Health probes, and child processes for work that may crash."""
