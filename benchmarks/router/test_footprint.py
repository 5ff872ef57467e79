"""The footprint is that of a whole request: router, both engines' actors, and the RPC channel."""

from __future__ import annotations

from benchmarks.router.footprint import in_engine, measure


async def test_a_request_passes_router_and_engines() -> None:
    """The footprint counts both sides; the router creates objects and tasks."""
    found = await measure()
    assert "app/http/generate.py" in found.files
    assert any(in_engine(file) for file in found.files)
    assert found.created
    assert found.tasks
