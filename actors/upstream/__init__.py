"""All code that depends on private parts of vLLM, Ray or uvicorn, one file per workaround.

`tests/actors/upstream/test_guards.py` fails if the source of one of these private symbols changes.
"""
