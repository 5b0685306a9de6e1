"""Classes that run a model in the steps of an engine. The package path is the same as in Megatron-Core."""
