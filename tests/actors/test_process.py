"""Log and limits of a process."""

import io
import logging
import re
import resource
import sys
from collections.abc import Iterator

import pytest

from actors.process import prepare_process
from connectors import logs, open_files
from connectors.logs import MOST_LINES, PACKAGES, log_to, log_with_vllm
from connectors.open_files import raise_limit
from connectors.vllm_hma.plugin import register


@pytest.fixture
def loggers() -> Iterator[None]:
    """Restore the loggers of Tandem's packages after the test."""
    found = [logging.getLogger(name) for name in PACKAGES]
    before = [(one, one.handlers, one.level, one.propagate) for one in found]
    yield
    for one, handlers, level, propagate in before:
        one.handlers, one.propagate = handlers, propagate
        one.setLevel(level)


def flood(lines: int) -> None:
    for number in range(lines):
        logging.getLogger("connectors.a").info("line %d", number)


def test_lines_of_one_statement_are_limited(loggers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later line has the number of omitted ones; another statement has a limit of its own."""
    out = io.StringIO()
    log_to(out, "Router")
    flood(MOST_LINES + 7)
    logging.getLogger("actors.b").warning("another")
    monkeypatch.setattr(logs, "EVERY_S", 0.0)
    flood(1)
    lines = [line.partition("] ")[2] for line in out.getvalue().splitlines()]
    expected = [f"line {number}" for number in range(MOST_LINES)]
    assert lines == [*expected, "another", "line 0 (7 similar lines omitted)"]
    assert out.getvalue().startswith("(Router pid=")


def test_lines_have_vllms_format(loggers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's handlers write them, also those that replace the ones of the plugin's call."""
    import vllm.logger

    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    vllm.logger._configure_vllm_root_logger()  # noqa: SLF001 - with this level
    log_with_vllm()
    out = io.StringIO()
    vllm.logger._configure_vllm_root_logger()  # noqa: SLF001 - as vLLM does when it reads its arguments
    (handler,) = logging.getLogger("vllm").handlers
    monkeypatch.setattr(handler, "stream", out)
    flood(1)
    logging.getLogger("vllm.c").info("line 0")
    lines = out.getvalue().splitlines()
    form = r"\(MainProcess pid=\d+\) INFO [\d-]+ [\d:]+ \[test_process.py:\d+\] line 0"
    assert [bool(re.fullmatch(form, line)) for line in lines] == [True, True], lines


def test_an_installed_plugin_leaves_the_process_alone(loggers: None) -> None:
    """vLLM loads it also without these connectors. `app` may be a user's package."""
    found = [logging.getLogger(name) for name in PACKAGES]
    for one in found:
        one.handlers, one.propagate = [], True
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1023, hard))
    try:
        register()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1023, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [(one.handlers, one.propagate) for one in found] == [([], True)] * len(found)
    log_with_vllm()
    assert [one.name for one in found if one.handlers or not one.propagate] == ["connectors"]


def test_an_actor_does_not_log_to_serves_stdout(
    loggers: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Serve may replace `sys.stdout` by an object that logs each line again, at INFO."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    prepare_process("Router")
    logging.getLogger("actors.a").warning("a line")
    assert re.fullmatch(r"\(Router pid=\d+\) WARNING .* a line\n", capfd.readouterr().out)


@pytest.mark.parametrize(("more", "warns"), [(0, False), (1, True)])
def test_the_soft_limit_of_open_files(more: int, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It becomes the hard one; a hard one that is too low is reported."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        pytest.skip("the hard limit of open files is infinite")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        raise_limit(hard + more)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (open_files.REMEDY in caplog.text) == warns
