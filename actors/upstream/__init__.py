"""Code of routers and actors that depends on private parts of vLLM, Ray, uvicorn or Python.

Each workaround has a file. `tests/actors/upstream/test_guards.py` lists their private symbols and
fails if the source of one changes.
"""
