"""All I/O with the API server: reads, guarded writes, the Lease, Events, keys, and the cache of observed objects."""
