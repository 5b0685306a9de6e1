"""Data types of requests: sampling parameters, engine configuration, requests, records, block hashes. No torch."""
