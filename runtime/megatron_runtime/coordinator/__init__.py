"""The coordinator process: sockets, timers, keys and metrics around the state machine in `core`. No torch."""
