"""Mutate the pure core and list the mutants that no test kills.

    python -m tests.campaigns mutations COUNT=200 SEED=1 ONLY=PART

A mutant differs in one comparison, operator, condition, constant, statement or order of arguments,
of each kind equally many. A child process runs the tests of its folder until one fails.
"""

from __future__ import annotations

import ast
import copy
import multiprocessing
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401 - tests import it, and only this process takes the time
from hypothesis import HealthCheck, settings

from tests.campaigns.runner import ROOT, Report

CORE = {
    "connectors/planning": ("tests/planning", "tests/protocol"),
    "connectors/protocol": ("tests/protocol",),
    "connectors/store/planning": ("tests/store",),
}
COMPARISONS = {"Lt": "LtE", "LtE": "Lt", "Gt": "GtE", "GtE": "Gt", "Eq": "NotEq", "NotEq": "Eq"}
COMPARISONS |= {"In": "NotIn", "NotIn": "In", "Is": "IsNot", "IsNot": "Is"}
OPERATORS = {"Add": "Sub", "Sub": "Add", "Mult": "FloorDiv", "FloorDiv": "Mult", "Mod": "FloorDiv"}
OPERATORS |= {"BitAnd": "BitOr", "BitOr": "BitAnd", "And": "Or", "Or": "And"}
REMOVABLE = ast.AugAssign | ast.Delete | ast.Raise | ast.Continue | ast.Break
UNCHANGED = ("annotation", "returns", "decorator_list", "bases", "simple")
MOST_S = 3600.0
LAST = [f"tests/{name}.py" for name in ("planning/test_oracle", "protocol/test_exploration")]
LAST += [f"tests/store/test_{name}.py" for name in ("device_copies", "folder", "service")]

Mutant = tuple[str, str, int, str, str, str]  # file, function, line, change, source line, changed source


def changes(node: ast.AST) -> Iterator[tuple[str, str, ast.AST]]:
    new: Any = copy.copy(node)
    match node:
        case ast.Compare(ops=[op]):
            new.ops = [getattr(ast, COMPARISONS[type(op).__name__])()]
            yield "comparison", f"{type(op).__name__} -> {COMPARISONS[type(op).__name__]}", new
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op) if type(op).__name__ in OPERATORS:
            new.op = getattr(ast, OPERATORS[type(op).__name__])()
            yield "operator", f"{type(op).__name__} -> {OPERATORS[type(op).__name__]}", new
        case ast.UnaryOp(operand=operand):
            yield "operator", "operator removed", operand
        case ast.Constant(value=bool() | int() as value):
            yield "constant", f"{value} changed", ast.Constant(not value if isinstance(value, bool) else value + 1)
        case ast.If(test=test) | ast.IfExp(test=test):
            new.test = ast.UnaryOp(ast.Not(), test)
            yield "condition", "condition negated", new
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            new.func = ast.Name("max" if name == "min" else "min", ast.Load())
            yield "operator", f"not {name}", new
        case ast.Call(func=ast.Name(), args=[first, second, *rest]) if ast.dump(first) != ast.dump(second):
            new.args = [second, first, *rest]
            yield "arguments", "arguments swapped", new
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement", "statement removed", ast.Pass()
    if isinstance(node, REMOVABLE):
        yield "statement", "statement removed", ast.Pass()


def sites(node: ast.AST, within: str = "") -> Iterator[tuple[ast.AST, str, int | None, ast.AST, str]]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        within = f"{within}.{node.name}".lstrip(".")
    for name, value in ast.iter_fields(node):
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if name in UNCHANGED or not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Assert):
                continue
            if not (isinstance(child, ast.keyword) and child.arg == "strict"):
                yield node, name, index, child, within
                yield from () if isinstance(child, ast.Raise) else sites(child, within)


def choose(count: int, seed: int) -> list[Mutant]:
    kinds: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for path in sorted(path for folder in CORE for path in (ROOT / folder).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for parent, name, index, node, within in list(sites(tree)):
            for kind, what, new in changes(node):
                kinds[kind].append((path, tree, (parent, name, index), node, within, what, new))
    rng, chosen = random.Random(seed), []
    for number, kind in enumerate(sorted(kinds)):
        chosen += rng.sample(kinds[kind], min(len(kinds[kind]), (count + number) // len(kinds)))
    rng.shuffle(chosen)
    return [build(*each) for each in chosen]


def build(path: Path, tree: Any, place: tuple[Any, str, Any], node: Any, within: str, what: str, new: Any) -> Mutant:
    sources, (parent, name, index) = [], place
    for each in (ast.copy_location(new, node), node):
        setattr(parent, name, each) if index is None else getattr(parent, name).__setitem__(index, each)
        sources.append(ast.unparse(ast.fix_missing_locations(tree)))
    line = path.read_text(encoding="utf-8").splitlines()[node.lineno - 1].strip()
    return str(path.relative_to(ROOT)), within, node.lineno, what, line, sources[0]


def run_tests(mutant: Mutant) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    get_code, folder = SourceFileLoader.get_code, mutant[0].rpartition("/")[0]
    module, changed = mutant[0].removesuffix(".py").replace("/", "."), compile(mutant[5], mutant[0], "exec")
    SourceFileLoader.get_code = lambda loader, name: changed if name == module else get_code(loader, name)  # type: ignore[method-assign, assignment]
    files = [str(path.relative_to(ROOT)) for tests in CORE[folder] for path in sorted((ROOT / tests).glob("test_*.py"))]
    for file in sorted(files, key=lambda file: LAST.index(file) if file in LAST else -1):
        if pytest.main(["-x", "-q", "--noconftest", "-p", "no:cacheprovider", "--timeout=300", file]):
            os._exit(1)
    os._exit(0)  # an exit would join the other thread, which this process does not have


def survives(mutant: Mutant) -> tuple[bool, float]:
    started_at = time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(mutant,))
    process.start()
    process.join(MOST_S)
    process.kill()
    process.join()
    return process.exitcode == 0, time.monotonic() - started_at


def mutations(report: Report, *, count: int = 200, seed: int = 1, only: str = "") -> None:
    """At least 95% must be killed; ``only`` is a part of a mutant's file, function or change."""
    chosen = [each for each in choose(count, seed) if only in str(each[:5])]
    settings.register_profile("mutants", deadline=None, suppress_health_check=list(HealthCheck), database=None)
    settings.load_profile("mutants")
    pytest.main(["--version"])  # loads the plugins before the processes fork
    os.nice(max(0, 15 - os.nice(0)))
    first = [min((ROOT / folder).glob("[!_]*.py")) for folder in CORE]
    same = [(str(path.relative_to(ROOT)), "", 0, "", "", path.read_text(encoding="utf-8")) for path in first]
    with ThreadPoolExecutor(2) as threads:
        report.check(all(survived for survived, _ in threads.map(survives, same)), "tests fail without a change")
        survivors = 0
        for mutant, (survived, seconds) in zip(chosen, threads.map(survives, chosen), strict=True):
            survivors += survived
            print(f"{seconds:6.1f} s {'SURVIVES' if survived else 'killed'}:", *mutant[:5], flush=True)
            if survived:
                report.row(survivor=mutant[:5])
    report.row(mutants=len(chosen), killed=len(chosen) - survivors)
    report.check(survivors * 20 <= len(chosen), f"{survivors} of {len(chosen)} mutants survive")
