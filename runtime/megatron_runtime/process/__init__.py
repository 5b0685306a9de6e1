"""What every process of the runtime has: health probes and sacrificial child processes."""
