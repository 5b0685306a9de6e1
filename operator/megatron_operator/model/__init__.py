"""The custom resource: typed models, its vocabulary, and the CRD generated from them."""
