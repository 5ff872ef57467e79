"""The wheel works without the checkout, in an empty environment with the libraries of this one."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import httpx
import pytest
import yaml

from configs.settings.parsing import parse_settings
from testing.service_process import ROOT, ServiceProcess

pytestmark = pytest.mark.engine

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


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    for part in ("actors", "app", "configs", "connectors"):
        shutil.copytree(ROOT / part, folder / "source" / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, folder / "source")
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    venv = folder / "venv"
    pip = [sys.executable, "-m", "pip"]
    for command in (
        [sys.executable, "-c", build],
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(folder / "tandem-0.1.0.tar.gz")],
        [sys.executable, "-m", "venv", "--without-pip", str(venv)],
        [*pip, "--python", str(venv), "install", "--no-deps", str(folder / "tandem-0.1.0-py3-none-any.whl")],
    ):
        subprocess.run(command, cwd=folder / "source", check=True, stdout=subprocess.DEVNULL)
    (packages,) = venv.glob("lib/python3*/site-packages")
    # Python does not read the .pth files below this path, so the checkout stays out.
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return venv


def run(environment: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["env", "-u", "PYTHONPATH", str(environment / "bin" / program), *arguments]
    return subprocess.run(command, cwd=environment, capture_output=True, text=True, check=False)


def test_the_wheel_serves_a_request(environment: Path) -> None:
    """With the packaged configuration, model and status page."""
    command = ("env", "-u", "PYTHONPATH", str(environment / "bin/tandem"), "run")
    service = ServiceProcess(Path("configs/local.yaml"), environment, command=command, cwd=environment)
    service.start()
    try:
        question = {"model": "tandem-demo", "prompt": "mira=427\nkelo=093\nkelo?", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{service.url}/v1/completions", json=question, timeout=60)
        assert (answer.json()["choices"][0]["text"], answer.headers["x-tandem-route"]) == ("093", "remote")
        assert "<html" in httpx.get(service.url).text
    finally:
        assert service.stop() == []


def test_the_connector_alone(environment: Path) -> None:
    """It needs nothing of the service; `tandem run` then names what is missing."""
    imported = run(environment, "python", "-c", HIDE.format(hidden=SERVICE) + IMPORT_ALL)
    assert imported.stdout.startswith(str(environment)), imported.stderr
    code = HIDE.format(hidden=("ray",)) + "from app.cli import main; sys.exit(main(['run']))"
    without_ray = run(environment, "python", "-c", code)
    assert without_ray.returncode == 1
    assert "the module ray is not installed" in without_ray.stderr


@pytest.mark.parametrize("name", ["local.yaml", "two-models.yaml"])
def test_the_printed_settings_are_those_of_the_file(environment: Path, name: str) -> None:
    printed = run(environment, "tandem", "config", "--config", f"configs/{name}").stdout
    shown, shipped = (
        yaml.safe_load(text)["applications"][0]["args"] for text in (printed, (ROOT / "configs" / name).read_text())
    )
    assert shown["router"]["attempts"] > 0
    assert parse_settings(shown) == parse_settings(shipped)
