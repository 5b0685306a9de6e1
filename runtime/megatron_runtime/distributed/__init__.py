"""Support for engines with several ranks: shards, rendezvous, collectives, and detection of lost or stalled ranks."""
