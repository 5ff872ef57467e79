"""Names of stored objects. Pure: equal on every host, for every TP size and block size."""
