"""The coordinator's decisions: journal, routing, dispatch, verbs, membership and recovery.

The package uses neither asyncio nor sockets.
"""
