"""ZeroMQ's transport protocol, ZMTP 3.1, on the event loop itself (RFC 37, and RFC 26 for CURVE).

ZeroMQ's own library moves bytes in a thread beside its caller's: to receive and to send wakes it each time. A
coordinator does hardly anything else, and takes half the processor time where its loop reads the sockets itself.
Whoever talks to it may use any library that speaks ZMTP 3; docs/decisions/023 says more.
"""
