"""Everything that depends on private parts of vLLM, Ray or uvicorn, one file per workaround.

`tests/actors/upstream/test_guards.py` fails when the source of a symbol changes on which one of these
files depends.
"""
