"""Runs one engine on several ranks. Rank 0 sends step plans and other commands to all ranks."""
