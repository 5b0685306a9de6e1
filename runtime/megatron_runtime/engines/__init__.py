"""The engine: scheduler, executors, and the process around them."""
