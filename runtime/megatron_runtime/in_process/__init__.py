"""An engine in the process of a user's program: its calls, its ranks, its coordinator and its HTTP server."""
