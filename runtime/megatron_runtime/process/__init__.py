"""Support code for processes: health probes, logs, metrics, traces, and child processes for work that may crash."""
