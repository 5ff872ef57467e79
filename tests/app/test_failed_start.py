"""A failing start on a real Ray cluster: an engine whose vLLM module fails as vLLM does."""

import os
import subprocess
import sys
from pathlib import Path

from testing.ports import free_port
from testing.service_process import ROOT, write_config

FAILING_VLLM = """
import sys

sys.stdout.write("(EngineCore pid=1) ERROR 11-22 17:03:12 [core.py:1] ValueError: the cause\\n")
sys.stdout.flush()
raise RuntimeError("Engine core initialization failed. See root cause above.")
"""


BARE = {"HOME": "/none", "LC_ALL": "C", "PYTHONUTF8": "0"}
"""Environment without a home directory, with an ASCII locale."""


def test_a_failed_start_ends_with_the_engines_own_error(tmp_path: Path) -> None:
    """The last lines on the screen are the cause and its log; the exit status is not 0.

    Ray starts also without a home directory and with an ASCII locale.
    """
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(FAILING_VLLM)
    environment = {"environment": {"PYTHONPATH": str(tmp_path)}}
    config = write_config("local.yaml", tmp_path, prefill=environment, decode=environment)
    run = subprocess.run(
        [sys.executable, "-m", "app.run", "--config", str(config), "--port", str(free_port())],
        cwd=ROOT,
        env=os.environ | {"VERBOSE": ""} | BARE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert run.returncode == 1, run.stdout
    what, cause, hint = run.stdout.splitlines()[-3:]
    assert what in ("tandem: prefill engine did not start:", "tandem: decode engine did not start:")
    assert cause == "ValueError: the cause"
    assert "ValueError: the cause" in Path(hint.removeprefix("tandem: full log: ")).read_text(encoding="utf-8")
    assert len(run.stdout.splitlines()) <= 26
