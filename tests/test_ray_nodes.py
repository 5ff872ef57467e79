"""Ray nodes that tests start: no process of a node outlives its cluster, and no other is killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from testing import ray_nodes
from testing.ray_nodes import RayCluster, RayNode

SLEEPS = f"#!{sys.executable}\nimport time\ntime.sleep(1000)\n"


def test_the_process_id_of_a_node_that_has_ended(tmp_path: Path) -> None:
    """Another process may have this id now."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    other = subprocess.Popen([sys.executable, "-c", SLEEPS])
    try:
        ended.pid = other.pid
        node = RayNode(tmp_path / "log", ended)
        assert node.family() == []
        node.stop()
        node.kill()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_start_that_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM may end a campaign while a node starts."""
    ray = tmp_path / "ray"
    ray.write_text(SLEEPS)
    ray.chmod(0o755)

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ray_nodes, "BIN", tmp_path)
    monkeypatch.setattr(ray_nodes, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=interrupt))
    cluster = RayCluster(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        cluster.start_worker(1)
    (node,) = cluster.nodes
    assert node.process.poll() is None
    cluster.stop()
    assert node.process.poll() is not None
