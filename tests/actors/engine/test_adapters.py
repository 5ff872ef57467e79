"""Adapters of one engine, through vLLM's own registry of models, and their changes among peers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels

from actors.adapter_records import AdapterRecord
from actors.engine.adapters import EngineAdapters
from tests.actors.fleet import Records


class Core:
    """An engine core that keeps adapters until they are removed, as vLLM's workers do."""

    def __init__(self) -> None:
        self.renderer = self.input_processor = None
        self.model_config = SimpleNamespace(model="base")
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


def message(reply: dict[str, Any] | None) -> str:
    assert reply is not None
    return str(reply["error"]["message"])


async def test_the_answers_are_vllms() -> None:
    engine = Engine()
    assert await engine.adapters.load("x", "/x", False) is None
    assert "has already been loaded" in message(await engine.adapters.load("x", "/y", False))
    assert "conflicts with a served base model" in message(await engine.adapters.load("base", "/y", False))
    assert await engine.adapters.unload("x") is None
    assert "cannot be found" in message(await engine.adapters.unload("x"))
    engine.core.broken = True
    assert "bad rank" in message(await engine.adapters.load("z", "/z", False))
    assert engine.paths == {}


async def test_a_recorded_adapter_is_loaded_when_a_request_names_it() -> None:
    engine = Engine()
    records = Records(new=AdapterRecord("-a", "/new", True), other=AdapterRecord("-b", "/other"))
    await engine.adapters.follow(records, "-a")
    assert engine.paths == {"new": "/new"}, "a new engine has them at its start"
    records.by_name["late"] = AdapterRecord("-a", "/late")
    found = await engine.models.resolve_lora("late")
    assert (found.lora_name, found.lora_path) == ("late", "/late")
    assert await engine.adapters.load("late", "/late", False) is None, "the router's load comes after the record"
    for unknown in ("other", "none"):
        assert (await engine.models.resolve_lora(unknown)).error.code == 404
    assert engine.models.lora_requests["new"].is_3d_lora_weight


async def test_an_unloaded_adapter_is_not_resolved() -> None:
    engine = Engine()
    records = Records(new=AdapterRecord("", "/new"))
    await engine.adapters.follow(records, "")
    del records.by_name["new"]
    assert await engine.adapters.unload("new") is None
    assert (await engine.models.resolve_lora("new")).error.code == 404
    assert "cannot be found" in message(await engine.adapters.unload("new"))


async def test_a_record_that_changes_before_the_router_knows_the_engine() -> None:
    engine = Engine()
    records = Records(old=AdapterRecord("", "/old"), gone=AdapterRecord("", "/gone"), kept=AdapterRecord("", "/kept"))
    await engine.adapters.follow(records, "")
    records.by_name["old"] = AdapterRecord("", "/new")
    del records.by_name["gone"]
    await engine.adapters.compare()
    assert engine.paths == {"kept": "/kept"}
    assert (await engine.models.resolve_lora("old")).lora_path == "/new"


async def test_a_load_that_failed_bars_nothing(tmp_path: Path) -> None:
    """Its files may come later; it holds no slot, and no lock is kept for an unknown name."""
    engine = Engine(slots=2)
    records = Records(late=AdapterRecord("", str(tmp_path)))
    engine.core.broken = True
    await engine.adapters.follow(records, "")
    assert engine.paths == {}
    engine.core.broken = False
    (tmp_path / "adapter_config.json").write_text("{}")
    assert (await engine.models.resolve_lora("late")).lora_path == str(tmp_path)
    await engine.models.resolve_lora("unknown")
    assert "unknown" not in engine.models.lora_resolver_lock


async def test_a_record_that_cannot_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without the Ray head, or with an unreadable path, a request gets vLLM's 404."""
    engine = Engine()
    records = Records(bad=AdapterRecord("", "/x" * 3000), good=AdapterRecord("", "/good"))
    await engine.adapters.follow(records, "")
    assert engine.paths == {"good": "/good"}
    assert "cannot be read" in caplog.text
    records.lost = True
    assert (await engine.models.resolve_lora("late")).error.code == 404
    assert "no head" in caplog.text


async def test_changed_files_are_refused(tmp_path: Path) -> None:
    """vLLM's prefix cache identifies an adapter by name and path."""
    (tmp_path / "adapter_config.json").write_text("{}")
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(b"one")
    engine = Engine()
    assert await engine.adapters.load("x", str(tmp_path), False) is None
    await engine.adapters.unload("x")
    assert await engine.adapters.load("x", str(tmp_path), False) is None
    await engine.adapters.unload("x")
    file.write_bytes(b"other")
    assert "have changed" in message(await engine.adapters.load("x", str(tmp_path), False))
    assert await engine.adapters.load("y", str(tmp_path), False) is None


@pytest.mark.parametrize("in_use", [False, True])
async def test_on_a_cpu_one_slot_stays_empty(in_use: bool) -> None:
    """vLLM's unloaded adapters keep their slots; those that requests use cannot be freed."""
    engine = Engine(slots=2)
    assert await engine.adapters.load("x", "/x", False) is None
    assert "applies the last of its 2 adapter slots" in message(await engine.adapters.load("y", "/y", False))
    if in_use:
        lora = engine.models.lora_requests["x"]
        engine.core.output_processor.request_states["r"] = SimpleNamespace(lora_request=lora)
    await engine.adapters.unload("x")
    reply = await engine.adapters.load("y", "/y", False)
    assert (reply is None) == (not in_use)
    assert len(engine.core.resident) == 1
