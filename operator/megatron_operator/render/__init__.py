"""Pure functions that build manifests, with one module per child kind.

Each function maps a resource and settings to a manifest.
"""
