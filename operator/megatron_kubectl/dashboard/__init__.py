"""The dashboard of `kubectl megatron`, a local web page that uses the permissions of the kubeconfig."""
