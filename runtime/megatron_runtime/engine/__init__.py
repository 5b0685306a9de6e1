"""The engine process around a backend: worker, lifecycle, requests, output messages and metrics. It is the same for
every backend.
"""
