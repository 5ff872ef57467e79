"""Names of stored objects; they are equal on every host, for every TP size and block size."""
