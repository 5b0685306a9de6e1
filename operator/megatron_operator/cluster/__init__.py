"""Kubernetes I/O: reads, guarded writes, the lease, events, keys, and the cache that decisions are made from."""
