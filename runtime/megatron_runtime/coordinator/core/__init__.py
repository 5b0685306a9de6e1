"""The coordinator's decisions: journal, routing, dispatch, verbs, membership and recovery. No asyncio, no sockets."""
