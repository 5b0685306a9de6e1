"""Kubernetes I/O: reads, guarded writes, the Lease, Events, keys, and the cache that decisions read."""
