"""Pytest options of the whole suite: groups for parallel runs, and the budget of ``make test``."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from app.doctor.machine import longest_temporary_directory, ray_temporary_directory

# Ray's sockets are in TMPDIR, numbered if there are several nodes. Ray does not start if the path
# is too long.
if len(ray_temporary_directory()) + len(".99") > longest_temporary_directory():
    os.environ["RAY_TMPDIR"] = "/tmp"

# Ray's default niceness of 15 would starve services beside engines without Ray. Ray's agents have
# 15 s to start, so actors yield to them. Ray starts no workers that no test uses.
os.environ |= {"RAY_worker_niceness": "5", "RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}

# No deadline for generated cases: engines of other tests may keep the machine busy.
settings.register_profile("tandem", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("tandem")

_STARTED_AT = pytest.StashKey[float]()
TWO_RANKS = ("tests/e2e/pair/", "tests/e2e/test_families.py")
"""Tests of engines with two ranks. A rank polls for the other one (vLLM's csrc/cpu/shm.cpp), so two
such engines on two cores take twice the processor time. These tests run one after the other.
"""

WAITING = ("tests/actors/router/test_router.py", "tests/app/test_deployment_options.py")
"""Tests that wait more than they compute, so they run beside those that start engines."""

LONG = ("tests/app/http/test_http_server.py", "tests/fuzz/")
"""The longest tests without engines."""

OVER_BUDGET = 1.5
"""A run may take this multiple of its budget."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--budget-s", type=float, help="fail a run that takes more than 1.5 times these seconds")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STARTED_AT] = time.monotonic()


class GroupScheduling(LoadScopeScheduling):
    """Run the tests of a file in one process, and those of all engines with two ranks.

    The last process takes files from the end of the queue, where no test starts an engine. Most of
    these tests wait, so they take the processor time that the engines of the others leave.

    Not ``--dist loadgroup``: pytest-xdist 3.8 sets ``Item._nodeid``, which pytest 9.2 does not
    read.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "two ranks" if nodeid.startswith(TWO_RANKS) else nodeid.partition("::")[0]

    def _assign_work_unit(self, node: Any) -> None:
        if len(self.nodes) > 2 and node is self.nodes[-1]:
            self.workqueue.move_to_end(next(reversed(self.workqueue)), last=False)
        super()._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    return GroupScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort tests so that both ends of the queue start with the groups that take longest."""
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    """Return the sort key of a test.

    In this order: the service, waiting tests, engines with two ranks, other engines, engines that
    are killed, tests without engines, the longest of them.
    The service has two ranks, so the other tests with two start when it is about to stop.
    """
    marker = item.get_closest_marker("engine")
    if item.nodeid.startswith(WAITING):
        return 1
    if marker is None:
        return 6 if item.nodeid.startswith(LONG) else 5
    if marker.kwargs.get("first"):
        return 0
    return 2 if item.nodeid.startswith(TWO_RANKS) else 4 if marker.kwargs.get("killed") else 3


def pytest_collection_finish() -> None:
    """Leave the imported packages out of garbage collections, which would take seconds each."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that has exceeded its budget, in the controlling process."""
    budget_s = session.config.getoption("--budget-s")
    if budget_s is None or hasattr(session.config, "workerinput"):
        return
    took_s = time.monotonic() - session.config.stash[_STARTED_AT]
    if took_s > OVER_BUDGET * budget_s and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    budget_s = config.getoption("--budget-s")
    if budget_s is None:
        return
    took_s = time.monotonic() - config.stash[_STARTED_AT]
    over = took_s > OVER_BUDGET * budget_s
    terminalreporter.write_line(
        f"{took_s:.0f} s of a budget of {budget_s:.0f} s"
        + (f": FAILED, more than {OVER_BUDGET:g} times as long; see the slowest tests above" if over else ""),
        red=over,
    )
