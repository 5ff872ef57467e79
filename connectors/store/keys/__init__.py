"""Names of stored objects. Pure: equal on every host, at every TP size and block size."""
