"""The commands of users: `kubectl megatron`, its live views and its dashboard."""
