"""Protocol with which prefill engines send KV to decode engines: messages and state machines.

It is sans-I/O: no module here uses clocks, sockets or threads.
"""
