"""The wheel without the checkout: connector and commands. `test_service` runs its service."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from configs.settings.parsing import parse_settings
from testing.programs import ROOT

SERVICE = ("ray", "uvicorn", "httptools", "opentelemetry", "actors", "app", "configs")
"""What engines with the connector do without. vLLM itself imports fastapi and starlette."""
HIDE = "import sys; sys.modules.update(dict.fromkeys({hidden!r}))\n"
IMPORT_ALL = """
import connectors, importlib, pkgutil
for one in pkgutil.walk_packages(connectors.__path__, "connectors."):
    if one.name != "connectors.transport.digest_kernel":  # needs Triton, which CPUs have not
        importlib.import_module(one.name)
print(sys.modules["connectors.vllm_hma.connector"].__file__)
"""


def run(installed: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["env", "-u", "PYTHONPATH", str(installed / "bin" / program), *arguments]
    return subprocess.run(command, cwd=installed, capture_output=True, text=True, check=False)


def test_the_connector_alone(installed: Path) -> None:
    """It needs nothing of the service; `tandem run` then names what is missing."""
    imported = run(installed, "python", "-c", HIDE.format(hidden=SERVICE) + IMPORT_ALL)
    assert imported.stdout.startswith(str(installed)), imported.stderr
    code = HIDE.format(hidden=("ray",)) + "from app.cli import main; sys.exit(main(['run']))"
    without_ray = run(installed, "python", "-c", code)
    assert without_ray.returncode == 1
    assert "the module ray is not installed" in without_ray.stderr


@pytest.mark.parametrize("name", ["local.yaml", "two-models.yaml"])
def test_the_printed_settings_are_those_of_the_file(installed: Path, name: str) -> None:
    printed = run(installed, "tandem", "config", "--config", f"configs/{name}").stdout
    shown, shipped = (
        yaml.safe_load(text)["applications"][0]["args"] for text in (printed, (ROOT / "configs" / name).read_text())
    )
    assert shown["router"]["attempts"] > 0
    assert parse_settings(shown) == parse_settings(shipped)
