"""Sans-I/O transfer protocol: messages, and the state machines of producer and consumer.

No module here uses clocks, sockets or threads.
"""
