"""Runs one engine on several ranks: rank 0 sends step plans and orders to all ranks."""
