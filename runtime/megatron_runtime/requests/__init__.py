"""Values of the request interface; `megatron_runtime.inference_request` has the public names. Loads no torch."""
