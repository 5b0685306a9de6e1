"""ZMTP 3.1 (RFC 23, 37) with NULL and CURVE (RFC 26) on the asyncio event loop: a ROUTER and a DEALER.

No module outside this package implements the protocol. docs/development/zmtp.md maps each rule to code and test;
decision 023 explains why the coordinator does not use libzmq. Peers may use any library that speaks ZMTP 3.
"""
