"""Everything in the connector that depends on private parts of vLLM, one file per part."""
