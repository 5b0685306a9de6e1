"""Megatron-Core's names: a program changes its prefix `megatron.core.inference` to `megatron_runtime.megatron_core`.

The sub-paths are Megatron-Core's own. The modules re-export or wrap the packages below; nothing else imports them.
"""
