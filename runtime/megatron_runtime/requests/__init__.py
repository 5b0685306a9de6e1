"""Requests, their records, events and errors; `megatron_runtime.inference_request` gives the public names. No torch,
except where a tensor is really handled.
"""
