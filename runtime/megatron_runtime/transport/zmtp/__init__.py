"""ROUTER and DEALER sockets of ZMTP 3.1 (RFC 23, 37) on asyncio, with the mechanisms NULL and CURVE (RFC 26).

No module outside this package implements ZMTP. docs/development/zmtp.md lists the code and the test of each rule of the
RFCs. Decision 023 explains why the coordinator does not use libzmq. Peers may use any library that implements ZMTP 3.
"""
