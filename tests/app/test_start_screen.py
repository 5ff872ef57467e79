"""The launcher's output while engines start, and at the end of a failed start."""

from actors.engine.startup.start_log import STAGES, EngineReport
from app.start_screen import EngineStages, failure_of, last_error, replicas_at_start
from configs.settings.parsing import parse_settings

MAX_LINES_UNTIL_READY = 25
LINES_OF_THE_LAUNCHER = 7
"""environment, model, Ray; ready, curl, status page, logs."""


def texts(lines: list[str]) -> list[str]:
    return [line.removeprefix("tandem: ").rsplit(maxsplit=2)[0].strip() for line in lines]


def test_each_stage_is_printed_once_with_its_time() -> None:
    stages = EngineStages({"prefill": 1, "decode": 1})
    assert stages.advance([], 1.0) == []
    (line,) = stages.advance([EngineReport("prefill", "importing vLLM")], 12.34)
    assert line.startswith("tandem: prefill: importing vLLM ")
    assert line.endswith(" 12.3 s")
    assert stages.advance([EngineReport("prefill", "importing vLLM")], 13.0) == []
    reports = [EngineReport("prefill", "loading weights"), EngineReport("decode", "importing vLLM")]
    assert texts(stages.advance(reports, 14.0)) == [
        "prefill: engine core",
        "prefill: loading weights",
        "decode: importing vLLM",
    ]


def test_a_stage_counts_when_all_replicas_have_reached_it() -> None:
    stages = EngineStages({"prefill": 2})
    assert stages.advance([EngineReport("prefill", "ready")], 1.0) == []
    both = [EngineReport("prefill", "ready"), EngineReport("prefill", "importing vLLM")]
    assert texts(stages.advance(both, 2.0)) == ["prefill: importing vLLM (2 replicas)"]


def test_many_replicas_that_load_for_an_hour_stay_within_the_screen() -> None:
    stages = EngineStages({"prefill": 64, "decode": 32})
    lines = [line for second in range(3600) for line in stages.advance([], float(second))]
    for stage in STAGES:
        reports = [EngineReport("prefill", stage)] * 64 + [EngineReport("decode", stage)] * 32
        lines += stages.advance(reports, 3600.0)
    assert LINES_OF_THE_LAUNCHER + len(lines) <= MAX_LINES_UNTIL_READY


def test_a_reminder_says_what_is_awaited() -> None:
    stages = EngineStages({"prefill": 1, "decode": 1})
    stages.advance([EngineReport("prefill", "ready")], 10.0)
    assert stages.advance([], 39.0) == []
    assert texts(stages.advance([], 40.0)) == ["still starting: decode: scheduling"]
    assert stages.advance([], 99.0) == []
    assert texts(stages.advance([], 100.0, "Decode needs a GPU")) == ["still starting: Decode needs a GPU"]


def test_replicas_at_the_start_of_scaled_roles() -> None:
    roles = {
        "prefill": {"replicas": {"min_replicas": 2, "max_replicas": 9}},
        "decode": {"replicas": {"min_replicas": 1, "initial_replicas": 3, "max_replicas": 9}},
    }
    assert replicas_at_start(parse_settings(roles)) == {"prefill": 2, "decode": 3}


SERVE_MESSAGE = """The deployment failed to start 1 times in a row. Error:
ray::ServeReplica:tandem:Router.initialize_and_get_metadata() (pid=1)
  File "replica.py", line 1, in initialize
    raise
OSError: [Errno 98] Address already in use
try another port"""


def test_without_an_engines_report_serves_message_is_the_error() -> None:
    failure = failure_of([], {"deployment Router": SERVE_MESSAGE, "service": "x"}, "/logs")
    assert str(failure).splitlines() == [
        "tandem: deployment Router did not start:",
        "OSError: [Errno 98] Address already in use",
        "try another port",
        "tandem: full log: /logs",
    ]


def test_a_message_without_a_traceback() -> None:
    assert last_error("Deploying failed: no room") == "Deploying failed: no room"
    assert "the cause is unknown" in str(failure_of([], {"service": ""}, "/logs"))
