"""Support for engines of several ranks: shards, rendezvous, collectives, and detection of lost or stalled ranks."""
