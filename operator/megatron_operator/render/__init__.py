"""Pure functions that build manifests, with one module per child kind. Each maps a resource and settings to a
manifest.
"""
