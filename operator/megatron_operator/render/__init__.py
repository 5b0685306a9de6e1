"""Pure functions that build the manifests of a resource's children, with one module per kind.

Each function maps a resource and settings to a manifest.
"""
