"""An engine in the process of a user's program, with its calls, its ranks, its coordinator and its HTTP server."""
