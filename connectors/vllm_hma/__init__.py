"""The connectors that vLLM loads; they carry out the state machines' actions in its processes."""
