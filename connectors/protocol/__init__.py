"""Sans-I/O protocol: messages and the producer and consumer state machines. No clocks, sockets or threads."""
