"""Data types of requests: sampling parameters, engine configuration, requests, records and block hashes.

The modules do not import torch.
"""
