"""An engine's reports of its start, with a dictionary as Ray's key-value store."""

import json
import time
from pathlib import Path

import pytest

from actors.engine.startup import start_progress
from actors.engine.startup.start_progress import StartProgress, StartWatch
from actors.errors import EngineStartError
from actors.upstream import ray_private


class Store:
    """Replacement of `ray.experimental.internal_kv`."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    def _internal_kv_put(self, key: bytes, value: bytes, overwrite: bool, namespace: bytes) -> None:
        assert namespace == ray_private.NAMESPACE
        self.values[key] = value

    def _internal_kv_exists(self, key: bytes, namespace: bytes) -> bool:
        return key in self.values

    def _internal_kv_get(self, key: bytes, namespace: bytes) -> bytes | None:
        return self.values.get(key)

    def _internal_kv_list(self, prefix: bytes, namespace: bytes) -> list[bytes]:
        return [key for key in self.values if key.startswith(prefix)]

    def _internal_kv_del(self, key: bytes, namespace: bytes, del_by_prefix: bool = False) -> None:
        for one in [one for one in self.values if one == key or (del_by_prefix and one.startswith(key))]:
            del self.values[one]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(ray_private, "internal_kv", store)
    return store


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "worker-1.out"
    path.write_text("(EngineCore pid=1) ERROR 11-22 17:03:12 [core.py:1] ValueError: of an earlier replica\n")
    monkeypatch.setattr(start_progress, "own_logs", lambda: [path])
    monkeypatch.setattr(start_progress, "POLL_S", 0.01)
    return path


def test_stages_of_a_start(store: Store, log: Path) -> None:
    watch = StartWatch()
    watch.open()
    with StartProgress("prefill", "r1"):
        assert watch.reports()["prefill/r1"]["stage"] == "importing vLLM"
        with log.open("a", encoding="utf-8") as file:
            file.write("INFO Starting to load model x...\n")
        until = time.monotonic() + 10
        while watch.reports()["prefill/r1"]["stage"] != "loading weights":
            assert time.monotonic() < until
            time.sleep(0.01)
    name = str(log.with_name("prefill-r1.out"))
    assert watch.reports() == {"prefill/r1": {"role": "prefill", "stage": "ready", "error": None, "log": name}}
    assert Path(name).read_text(encoding="utf-8") == log.read_text(encoding="utf-8")
    watch.close()
    assert store.values == {}


def test_a_failed_start_reports_and_raises_its_cause(store: Store, log: Path) -> None:
    StartWatch().open()

    def fail() -> None:
        with StartProgress("decode", "r1"):
            with log.open("a", encoding="utf-8") as file:
                file.write("(EngineCore pid=2) ERROR 11-22 17:03:12 [core.py:1] ValueError: the cause\n")
            raise RuntimeError("Engine core initialization failed. See root cause above.")

    with pytest.raises(EngineStartError, match=r"^the decode engine did not start: ValueError: the cause\nfull log: "):
        fail()
    assert json.loads(store.values[b"start/decode/r1"])["error"] == "ValueError: the cause"


def test_an_error_of_the_actor_itself(store: Store, log: Path) -> None:
    with pytest.raises(EngineStartError, match="did not start: OSError: no such model"), StartProgress("decode", "r1"):
        raise OSError("no such model")


def test_nothing_is_reported_where_no_launcher_watches(store: Store, log: Path) -> None:
    with StartProgress("prefill", "r1"):
        pass
    assert store.values == {}
