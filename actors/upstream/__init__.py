"""Everything that depends on private parts of vLLM, Ray or uvicorn, one file per workaround."""
