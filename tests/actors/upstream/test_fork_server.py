"""Engine processes from a fork server: real processes, without an engine."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs

from actors.engine.arguments import engine_argument_names, engine_arguments, fields_in_source, frontend_argument_names
from actors.upstream.vllm_processes.fork_server import USERS, may_fork, use_fork_server
from configs.settings.base import RoleName
from configs.settings.parsing import parse_settings
from tests.vllm_contract.workers import until

ROOT = Path(__file__).resolve().parents[3]

PARENT = """
import multiprocessing, os, sys
from actors.upstream.vllm_processes.fork_server import InheritingContext

def grandchild(pipe):
    pipe.send((os.environ["COLOUR"], os.getppid(), "preloaded" in sys.modules))

def child(pipe):
    before = os.environ["COLOUR"]
    os.environ["COLOUR"] = "blue"
    reader, writer = InheritingContext().Pipe(duplex=False)
    process = InheritingContext().Process(target=grandchild, args=(writer,))
    process.start()
    pipe.send((before, "GONE" in os.environ, os.getppid(), "preloaded" in sys.modules, reader.recv()))
    process.join()

if __name__ == "__main__":
    os.environ |= {"COLOUR": "red", "GONE": "1"}
    multiprocessing.set_forkserver_preload(["preloaded"])
    context = InheritingContext()
    first = context.Process(target=print)
    first.start()
    first.join()
    os.environ["COLOUR"] = "green"
    del os.environ["GONE"]
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(writer,))
    process.start()
    colour, gone, parent, preloaded, (nested, nested_parent, nested_preloaded) = reader.recv()
    process.join()
    print(colour, gone, preloaded, nested, nested_preloaded, parent == nested_parent != os.getpid())
"""


def test_processes_have_their_parents_environment_and_one_server(tmp_path: Path) -> None:
    """Processes have the environment of spawned ones; a forked one uses the same server."""
    (tmp_path / "preloaded.py").write_text(
        "from actors.upstream.vllm_processes.fork_server import *; stay_with_this_server()"
    )
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    run = subprocess.run(
        [sys.executable, str(script)],
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stdout.split("\n")[-2] == "green False True blue True True", run.stderr


KILLED = """
import os, time
from multiprocessing.shared_memory import SharedMemory
from actors.upstream.vllm_processes.fork_server import InheritingContext
from actors.upstream.vllm_processes.resource_tracker import detach_resource_tracker

def core():
    print(SharedMemory(create=True, size=4096).name, flush=True)
    time.sleep(60)

if __name__ == "__main__":
    detach_resource_tracker()
    InheritingContext().Process(target=core).start()
    time.sleep(60)
"""


def test_shared_memory_of_killed_processes_is_unlinked(tmp_path: Path) -> None:
    """Ray kills the children of an actor with it, vLLM's watchdogs the others."""
    script = tmp_path / "actor.py"
    script.write_text(KILLED)
    environment = {"PYTHONPATH": str(ROOT)}
    actor = psutil.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True)
    memory = Path("/dev/shm", actor.stdout.readline().strip())
    assert memory.is_file()
    for process in [*actor.children(recursive=True), actor]:
        process.kill()
    actor.wait()
    until(lambda: not memory.exists())


def test_vllm_starts_processes_where_they_are_replaced() -> None:
    """Without this change, engines spawn their processes, and every start takes 10 s longer."""
    modules = [importlib.import_module(name) for name in USERS]
    before = [module.get_mp_context for module in modules]
    assert len(set(before)) == 1
    try:
        use_fork_server()
        replaced = {module.get_mp_context for module in modules}
        use_fork_server()
        assert {module.get_mp_context for module in modules} == replaced, "a second engine must not patch vLLM again"
        assert len(replaced) == 1
    finally:
        for module, original in zip(modules, before, strict=True):
            setattr(module, "get_mp_context", original)  # noqa: B010


@pytest.mark.parametrize(
    ("settings", "forks"),
    [
        ({}, True),
        ({"prefill": {"num_gpus": 1}}, False),
        ({"cpu": {"threads_bind": "auto"}}, False),
        ({"engine": {"enforce_eager": False}}, False),
    ],
)
def test_which_engines_fork(settings: dict[str, Any], forks: bool) -> None:
    role: RoleName = "prefill"
    parsed = parse_settings(settings)
    assert may_fork(parsed, role, engine_arguments(parsed, role)) is forks


def test_argument_names_in_vllms_source_are_those_of_its_classes() -> None:
    """Read without importing vLLM, which would take 8 s in the launcher."""
    engine = {field.name for field in dataclasses.fields(AsyncEngineArgs) if not field.name.startswith("_")}
    assert engine_argument_names() == engine
    assert frontend_argument_names() == {field.name for field in dataclasses.fields(FrontendArgs)}


def test_fields_of_a_class_and_its_bases() -> None:
    assert fields_in_source("class A:\n    x: int\n    K: ClassVar[int] = 1\nclass B(A):\n    y = 1", "B") == {"x"}
