"""The custom resource: typed models, enumerations and the generated CRD."""
