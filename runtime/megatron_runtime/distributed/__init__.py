"""Engines of many ranks: shards, rendezvous, collectives, and detection of lost or stalled ranks."""
