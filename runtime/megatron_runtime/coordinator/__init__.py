"""The coordinator process: sockets, timers, keys and metrics around the state machine in `core`. It imports no
torch.
"""
