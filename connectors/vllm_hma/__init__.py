"""The connector that vLLM loads: carries out the state machines' actions inside vLLM's hooks."""
