"""The client of a coordinator: `megatron_runtime.inference_client` has the public names."""
