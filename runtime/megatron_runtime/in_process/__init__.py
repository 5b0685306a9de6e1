"""An engine in the process of a user's program, with its generate() calls, its ranks, its coordinator and its HTTP
server.
"""
