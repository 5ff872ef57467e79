"""Plan which objects the KV store keeps and loads, and which bytes to copy, without any I/O."""
