"""Compare the symbols of vLLM that Tandem depends on with those of another release, from its wheel.

    python -m tests.campaigns.vllm_release 0.33.0

The wheel is read, not installed. Compared are the code of the symbols that the two
``test_guards.py`` guard, and the surface (signatures, fields, bases) of all others that Tandem
imports. ``tests/vllm_contract/releases/<version>.yaml`` is the report, ``build/check-vllm`` has the
differences. Verdicts are written into the report by hand; a run keeps those of unchanged code. Exit
status: 1 while a verdict is missing, 2 without a wheel.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from app.installation import release_of
from testing.source_digests import digest, source_of
from tests.actors.upstream.test_guards import GUARDS as OF_ACTORS
from tests.vllm_contract.test_guards import GUARDS as OF_CONNECTOR

ROOT = Path(__file__).resolve().parents[2]
REPORTS = ROOT / "tests" / "vllm_contract" / "releases"
BUILD = ROOT / "build" / "check-vllm"
Read = Callable[[str], str]
"""Return the text of a file of a release, by its path in the wheel. Raises FileNotFoundError."""
Users = dict[str, set[str]]
"""Files of Tandem that depend on a symbol of vLLM, by ``path:symbol``."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def download(version: str, folder: Path) -> Path:
    """Download a release's wheel from the index that pip is configured for. Raises LookupError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--retries=1"]
    done = subprocess.run([*command, "--dest", folder, f"vllm=={version}"], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return next(folder.glob("*.whl"))
    if "connection" in done.stderr.lower():
        raise LookupError("pip cannot reach its package index; check the network and pip's index-url")
    raise LookupError(f"pip has no wheel of vLLM {version} for this machine ({done.stderr.strip().splitlines()[-1]})")


def from_wheel(wheel: zipfile.ZipFile) -> Read:
    def read(path: str) -> str:
        try:
            return wheel.read(path).decode()
        except KeyError:
            raise FileNotFoundError(path) from None

    return read


def guarded() -> Users:
    lists = {"actors/upstream": OF_ACTORS, "connectors/vllm_hma/upstream": OF_CONNECTOR}
    pairs = [(symbol, f"{folder}/{part}.py") for folder in lists for part, of in lists[folder].items() for symbol in of]
    return {symbol: {file for other, file in pairs if other == symbol} for symbol, _ in pairs if symbol[:5] == "vllm/"}


def imported() -> Users:
    found: Users = {}
    for file in (file for folder in ("actors", "app", "connectors") for file in (ROOT / folder).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        for node in nodes:
            used = []
            if isinstance(node, ast.ImportFrom):
                used = [(node.module or "", alias.name) for alias in node.names]
            elif isinstance(node, ast.Attribute) and (module := ast.unparse(node.value)) in modules:
                used = [(module, node.attr)]
            for module, name in used:
                if module.split(".")[0] == "vllm":
                    symbol = f"{module.replace('.', '/')}:{name}"
                    found.setdefault(symbol, set()).add(file.relative_to(ROOT).as_posix())
    return found


def find(read: Read, symbol: str) -> ast.AST | None:
    """Return the code of a symbol that a module defines, imports or contains. None if gone."""
    path, _, name = symbol.partition(":")
    path = path.removesuffix(".py").removesuffix("/__init__")
    for file in (f"{path}/__init__.py", f"{path}.py"):
        try:
            scope: ast.AST = parsed(read, file)
        except FileNotFoundError:
            continue
        if not name:
            return ast.Module([], [])
        for part in name.split("."):
            bound = next((node for node in statements(scope) if part in names(node)), None)
            if bound is None:
                return find(read, f"{path}/{part}")
            if isinstance(bound, ast.ImportFrom) and bound.level:
                folder = file.rsplit("/", bound.level)[0]
                return find(read, f"{folder}/{(bound.module or '').replace('.', '/')}:{part}")
            if isinstance(bound, ast.ImportFrom) and bound.module and bound.module.startswith("vllm."):
                return find(read, f"{bound.module.replace('.', '/')}:{part}")
            scope = bound
        return scope
    return None


@cache
def parsed(read: Read, file: str) -> ast.Module:
    return ast.parse(read(file))


def statements(scope: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(scope):
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from statements(node)


def names(node: ast.AST) -> set[str]:
    """Return the names that a statement binds."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def surface(node: ast.AST) -> list[str]:
    """Return a line for what callers and subclasses see of a symbol, and of each public member."""
    if not isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return ast.unparse(node).splitlines()
    head = copy.copy(node)
    head.body = []
    shown = statements(node) if isinstance(node, ast.ClassDef) else ()
    members = [each for each in shown if names(each) and not all(map(hidden, names(each)))]
    lines = (f"    {line}" for member in members for line in surface(member))
    return [*ast.unparse(head).splitlines(), *lines]


def hidden(name: str) -> bool:
    return name.startswith("_") and name != "__init__"


def changes(old: Read, new: Read) -> Iterator[tuple[str, set[str], str, list[str]]]:
    """Yield each changed symbol, its users, a digest of its new code, and the difference."""
    guards = guarded()
    for symbol, users in [*sorted(guards.items()), *sorted(imported().items())]:
        nodes = find(old, symbol), find(new, symbol)
        assert nodes[0] is not None, f"{symbol}: not in the installed release"
        whole = symbol in guards
        before, after = ([] if x is None else ast.unparse(x).splitlines() if whole else surface(x) for x in nodes)
        if before == after and nodes[1] is not None:
            continue
        code = hashlib.sha256("\n".join(after).encode()).hexdigest()[:12]
        if whole and nodes[1] is not None:
            path, _, name = symbol.partition(":")
            code = digest(new(path), name)
        difference = difflib.unified_diff(before, after, symbol, symbol, lineterm="")
        yield symbol, users, "gone" if nodes[1] is None else code, list(difference)


def report(version: str, old: Read, new: Read, reports: Path = REPORTS, build: Path = BUILD) -> list[str]:
    """Write the report and the differences. Return the changed symbols without a verdict."""
    path = reports / f"{version}.yaml"
    known = yaml.safe_load(path.read_text())["changed"] if path.exists() else {}
    changed: dict[str, dict[str, Any]] = {}
    lines: list[str] = []
    for symbol, users, code, difference in changes(old, new):
        before = known.get(symbol, {})
        verdict = before["verdict"] if before.get("new_code") == code else ""
        changed[symbol] = {"used_by": sorted(users), "new_code": code, "verdict": verdict}
        lines += difference
    unchanged = len(guarded() | imported()) - len(changed)
    versions = {"release": version, "compared_with": release_of("vLLM")}
    found = versions | {"unchanged_symbols": unchanged, "changed": changed}
    for folder, name, text in (
        (reports, path.name, yaml.safe_dump(found, sort_keys=False, width=115)),
        (build, f"{version}.diff", "\n".join(lines)),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return [f"{symbol} ({', '.join(each['used_by'])})" for symbol, each in changed.items() if not each["verdict"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    version = parser.parse_args().version
    with tempfile.TemporaryDirectory() as folder:
        try:
            wheel = download(version, Path(folder))
        except LookupError as error:
            print(f"check-vllm: {error}", file=sys.stderr)
            return 2
        with zipfile.ZipFile(wheel) as opened:
            unread = report(version, source_of, from_wheel(opened))
    print((REPORTS / f"{version}.yaml").read_text())
    print(*(f"no verdict yet: {each}" for each in unread), sep="\n")
    print(f"Differences: build/check-vllm/{version}.diff")
    return int(bool(unread))


if __name__ == "__main__":
    raise SystemExit(main())
