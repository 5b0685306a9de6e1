"""The coordinator process: sockets, timers, keys and metrics around the state machine in `core`. The process
does not import torch.
"""
