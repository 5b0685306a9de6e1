"""The custom resource: typed models, its terms, and the generated CRD."""
