"""The command line for users, `kubectl megatron`, with its live views and its dashboard."""
