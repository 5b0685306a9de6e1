"""The plugin `kubectl megatron`: its commands, its live views and its dashboard."""
