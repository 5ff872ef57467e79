"""Adapters of one engine, through vLLM's own registry of models, and their changes among peers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels

from actors.engine import adapters as module
from actors.engine.adapters import AdapterState, EngineAdapters


class Core:
    """An engine core that keeps adapters until they are removed, as vLLM's workers do."""

    def __init__(self) -> None:
        self.model_config = self.renderer = self.input_processor = None
        self.resident: set[int] = set()
        self.broken = False
        self.output_processor = SimpleNamespace(request_states={})

    async def add_lora(self, request: Any) -> bool:
        if self.broken:
            raise RuntimeError("Call to add_lora method failed: bad rank")
        self.resident.add(request.lora_int_id)
        return True

    async def remove_lora(self, adapter: int) -> bool:
        self.resident.remove(adapter)
        return True

    async def list_loras(self) -> set[int]:
        return set(self.resident)


class Engine:
    """One engine with adapters; `slots` is `max_loras` on a CPU."""

    def __init__(self, slots: int | None = None) -> None:
        core: Any = Core()
        self.core = core
        self.models = OpenAIServingModels(core, [BaseModelPath(name="base", model_path="/base")])
        self.adapters = EngineAdapters(self.models, core, slots)

    @property
    def paths(self) -> dict[str, str]:
        return {name: one.lora_path for name, one in self.models.lora_requests.items()}

    async def take_from(self, *peers: Engine) -> None:
        await self.adapters.merge([peer.adapters.states() for peer in peers])


def message(reply: dict[str, Any] | None) -> str:
    assert reply is not None
    return str(reply["error"]["message"])


async def test_the_answers_are_vllms() -> None:
    engine = Engine()
    assert await engine.adapters.load("x", "/x", False, 5) is None
    assert "has already been loaded" in message(await engine.adapters.load("x", "/y", False, 6))
    assert "conflicts with a served base model" in message(await engine.adapters.load("base", "/y", False, 6))
    assert await engine.adapters.unload("x", 7) is None
    assert "cannot be found" in message(await engine.adapters.unload("x", 8))
    engine.core.broken = True
    assert "bad rank" in message(await engine.adapters.load("z", "/z", False, 9))
    assert engine.paths == {}


async def test_an_unload_by_a_router_whose_clock_is_behind_is_the_newest_change() -> None:
    """The unload counts as the newest change: peers that missed it do not return the adapter."""
    engine, peer = Engine(), Engine()
    for one in (engine, peer):
        await one.adapters.load("x", "/x", False, 9)
    assert await engine.adapters.unload("x", 3) is None
    await engine.take_from(peer)
    assert engine.paths == {}
    await peer.take_from(engine)
    assert peer.paths == {}


async def test_an_adapter_that_cannot_be_taken_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    engine, peer = Engine(), Engine()
    unreadable = "/x" * 3000  # OSError: file name too long
    for name, path in (("bad", unreadable), ("good", "/good")):
        await peer.adapters.load(name, "/x", False, 1)
        peer.adapters._states[name] = AdapterState(1, path)  # noqa: SLF001
    for _ in range(2):
        await engine.take_from(peer)
    assert engine.paths == {"good": "/good"}
    assert caplog.text.count("change of adapter bad") == 1
    reply = await engine.adapters.load("bad", unreadable, False, 2)
    assert reply is not None
    assert (reply["error"]["code"], "cannot be read" in reply["error"]["message"]) == (400, True)


async def test_an_adapter_whose_newer_files_cannot_be_read_does_not_return_to_the_older_ones() -> None:
    """The engine unloaded the older files before, and a peer may have missed that unload."""
    engine, older, newer = Engine(), Engine(), Engine()
    for one in (engine, older):
        await one.adapters.load("x", "/x", False, 5)
    newer.adapters._states["x"] = AdapterState(9, "/x" * 3000)  # noqa: SLF001 - OSError: file name too long
    for _ in range(2):
        await engine.take_from(newer, older)
        assert engine.paths == {}
    newer.adapters._states["x"] = AdapterState(9, "/x9")  # noqa: SLF001 - readable now
    await engine.take_from(older, newer)
    assert engine.paths == {"x": "/x9"}


async def test_a_failed_load_does_not_spread_from_an_engine_that_missed_the_revert() -> None:
    missed, failed = Engine(), Engine()
    await missed.adapters.load("x", "/x", False, 5)
    await failed.adapters.revert("x", 5)
    await failed.take_from(missed)
    assert failed.paths == {}
    await missed.take_from(failed)
    assert missed.paths == {}
    assert await failed.adapters.load("x", "/x", False, 9) is None


async def test_a_change_is_reverted_only_if_it_is_the_last_one() -> None:
    engine = Engine()
    await engine.adapters.load("x", "/x", False, 5)
    await engine.adapters.revert("x", 4)
    await engine.adapters.revert("unknown", 5)
    assert engine.paths == {"x": "/x"}
    await engine.adapters.revert("x", 5)
    assert engine.paths == {}
    assert engine.adapters.states()["x"] == (6, None, False)


async def test_a_new_engine_takes_the_newest_changes_of_its_peers() -> None:
    """An unloaded adapter stays unloaded, although a peer has missed the unload."""
    one, other, new = Engine(), Engine(), Engine()
    for engine in (one, other):
        await engine.adapters.load("x", "/x", False, 5)
        await engine.adapters.load("y", "/y", True, 6)
    await one.adapters.unload("x", 7)
    await one.adapters.unload("y", 8)
    await one.adapters.load("y", "/y2", False, 9)
    await new.take_from(other, one)
    assert new.paths == {"y": "/y2"}
    await new.take_from(other)
    assert new.paths == {"y": "/y2"}
    await other.take_from(new)
    assert other.paths == {"y": "/y2"}
    assert one.adapters.states() == other.adapters.states()


async def test_a_load_that_a_peer_passed_on_first_is_done() -> None:
    one, other = Engine(), Engine()
    await one.adapters.load("x", "/x", False, 5)
    await other.take_from(one)
    assert await other.adapters.load("x", "/x", False, 5) is None


async def test_an_older_load_does_not_undo_a_newer_unload() -> None:
    engine = Engine()
    await engine.adapters.load("x", "/x", False, 5)
    await engine.adapters.unload("x", 9)
    reply = await engine.adapters.load("x", "/x", False, 8)
    assert reply is not None
    assert reply["error"]["code"] == 503
    assert engine.paths == {}


async def test_changed_files_are_refused(tmp_path: Path) -> None:
    """vLLM's prefix cache identifies an adapter by name and path."""
    (tmp_path / "adapter_config.json").write_text("{}")
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"one")
    engine = Engine()
    assert await engine.adapters.load("x", str(tmp_path), False, 1) is None
    await engine.adapters.unload("x", 2)
    assert await engine.adapters.load("x", str(tmp_path), False, 3) is None
    await engine.adapters.unload("x", 4)
    file.write_bytes(b"other")
    assert "may have changed" in message(await engine.adapters.load("x", str(tmp_path), False, 5))
    assert await engine.adapters.load("y", str(tmp_path), False, 6) is None


async def test_a_bounded_number_of_unloaded_adapters_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a peer returns a forgotten adapter, nor is it loaded again from files that may have
    changed.
    """
    monkeypatch.setattr(module, "UNLOADS_KEPT", 3)
    monkeypatch.setattr(module, "FILES_KEPT", 3)
    engine, peer, new = Engine(), Engine(), Engine()
    await peer.adapters.load("0", "/0", False, 1)
    await engine.adapters.load("kept", "/kept", False, 2)
    for number in range(9):
        assert await engine.adapters.load(f"{number}", f"/{number}", False, 10 * number + 3) is None
        await engine.adapters.unload(f"{number}", 10 * number + 4)
    sizes = [len(each) for each in (engine.adapters.states(), engine.adapters._files)]  # noqa: SLF001
    assert sizes == [4, 3]
    await engine.take_from(peer)
    await new.take_from(engine)
    assert engine.paths == new.paths == {"kept": "/kept"}
    assert "may have changed" in message(await engine.adapters.load("0", "/0", False, 500))
    assert await engine.adapters.load("8", "/8", False, 500) is None
    assert await engine.adapters.load("0", "/other", False, 500) is None
    assert engine.adapters.states()["0"] == (500, "/other", False)


async def test_an_unchanged_adapter_is_loaded_again_after_many_others() -> None:
    engine = Engine()
    for turn, number in enumerate([*range(module.UNLOADS_KEPT + 2), 0], 1):
        assert await engine.adapters.load(f"{number}", f"/{number}", False, 2 * turn) is None
        await engine.adapters.unload(f"{number}", 2 * turn + 1)


async def test_a_load_that_has_failed_is_tried_again_after_many_unloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgotten unloads do not make it older than they are."""
    monkeypatch.setattr(module, "UNLOADS_KEPT", 2)
    engine, peer = Engine(), Engine()
    await peer.adapters.load("x", "/x", False, 5)
    engine.core.broken = True
    await engine.take_from(peer)
    engine.core.broken = False
    for number in range(4):
        await engine.adapters.load(f"{number}", f"/{number}", False, 10 * number + 10)
        await engine.adapters.unload(f"{number}", 10 * number + 11)
    await engine.take_from(peer)
    assert engine.paths == {"x": "/x"}


@pytest.mark.parametrize("in_use", [False, True])
async def test_on_a_cpu_one_slot_stays_empty(in_use: bool) -> None:
    """vLLM's unloaded adapters keep their slots; those that requests use cannot be freed."""
    engine = Engine(slots=2)
    assert await engine.adapters.load("x", "/x", False, 1) is None
    assert "applies the last of its 2 adapter slots" in message(await engine.adapters.load("y", "/y", False, 2))
    if in_use:
        lora = engine.models.lora_requests["x"]
        engine.core.output_processor.request_states["r"] = SimpleNamespace(lora_request=lora)
    await engine.adapters.unload("x", 3)
    reply = await engine.adapters.load("y", "/y", False, 4)
    assert (reply is None) == (not in_use)
    assert len(engine.core.resident) == 1
