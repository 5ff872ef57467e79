"""Code of routers and engine actors that depends on private parts of vLLM, Ray, uvicorn or Python.

Each workaround has a file. `tests/actors/upstream/test_guards.py` lists upstream code on which the
files depend, and fails if its source changes.
"""
