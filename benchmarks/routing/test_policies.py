"""Replays are deterministic, judged by models independent of the policy, against an oracle."""

from pathlib import Path

import pytest

import benchmarks.routing
from benchmarks.report import read
from benchmarks.routing.compare import ORACLE, OURS, arms, measure, regrets, table
from benchmarks.routing.fleet import Fleet, Route, replay
from benchmarks.routing.loads import LOADS, Load, Request, Segment, mixed, multi_turn, small_machine
from benchmarks.routing.machine import GPU
from benchmarks.routing.oracle import Oracle
from benchmarks.routing.policies import Ours, RoundRobin, Threshold
from testing.imports import imported

FOLDER = Path(benchmarks.routing.__path__[0])


@pytest.mark.parametrize("name", ["machine", "fleet", "oracle", "loads"])
def test_the_truth_is_not_what_the_policy_thinks(name):
    """The models use nothing of the policy but its form of prompts."""
    ours = {module for module in imported(FOLDER / f"{name}.py") if module.startswith(("actors", "configs"))}
    assert ours <= ({"actors.policy.prompts"} if name == "loads" else set())


@pytest.mark.parametrize("make", LOADS, ids=lambda make: make.__name__)
def test_loads_are_the_same_every_time(make):
    one, same, other = make(1), make(1), make(2)
    assert one == same != other
    assert [request.blocks for request in one.requests[:20]] == [request.blocks for request in same.requests[:20]]


def test_all_requests_are_served_once_and_a_replay_repeats_itself():
    """Every policy of the report except the oracle, which a later test covers."""
    load = small_machine(3)
    for name, policy in arms(load, first_tokens=False).items():
        if name != ORACLE:
            first, second = replay(load, policy()), replay(load, policy())
            assert first == second
            assert [one.number for one in first] == list(range(len(load.requests)))
            assert min(one.ttft_s for one in first) > 0


def prompt(number: int, at_s: float, tokens: int, answer: int = 50) -> Request:
    return Request(number, at_s, (Segment(number, tokens),), Segment(1000 + number, answer), 1.0)


class Watched(Oracle):
    """Oracle that records its choices; its trials leave the simulation unchanged."""

    def __init__(self, load: Load) -> None:
        super().__init__(load, ttft_only=False)
        self.chosen: dict[int, Route] = {}

    def route(self, request: Request, fleet: Fleet) -> Route:
        before = (fleet.now, sorted(fleet.jobs), [job.computed for job in fleet.jobs.values()])
        found = self.chosen[request.number] = super().route(request, fleet)
        assert before == (fleet.now, sorted(fleet.jobs), [job.computed for job in fleet.jobs.values()])
        return found


def watch(*requests: Request, decode: int = 1) -> dict[int, Route]:
    load = Load("few", GPU, 1, decode, requests, {})
    oracle = Watched(load)
    replay(load, oracle)
    return oracle.chosen


def test_the_oracle_on_plain_cases():
    """A single prompt stays on decode, beside 15 streams it goes to prefill, two to two engines."""
    assert watch(prompt(0, 0.0, 1000)) == {0: Route(0, None)}
    crowd = [prompt(n, 0.001 * n, 10, answer=400) for n in range(15)]
    assert watch(*crowd, prompt(15, 0.5, 8000))[15] == Route(0, 0)
    two = watch(prompt(0, 0.0, 9000), prompt(1, 0.01, 9000), decode=2)
    assert {route.decode for route in two.values()} == {0, 1}


def test_ours_beats_what_is_in_use_and_finds_prefixes():
    """On one seed, in simulated time. Turns of a conversation go to the engine with its KV."""
    ours, remote, turns = (measure(replay(mixed(5), policy)) for policy in (Ours(), Threshold(0), RoundRobin()))
    assert ours["finish_ms"] < min(remote["finish_ms"], turns["finish_ms"])
    assert ours["ttft_ms"] < min(remote["ttft_ms"], turns["ttft_ms"])
    ours, turns = (measure(replay(multi_turn(5), policy)) for policy in (Ours(), RoundRobin()))
    assert ours["cached_share"] > turns["cached_share"]
    assert ours["ttft_ms"] < turns["ttft_ms"]


def test_the_committed_results():
    """They have every load, and regret against the oracle is at most a tenth on each."""
    document = read("routing")
    assert [load["name"] for load in document["loads"]] == [make(1).name for make in LOADS]
    assert table(document).count("\n") == 1 + len(LOADS)
    for load in document["loads"]:
        assert regrets(load["seeds"], OURS, "finish_ms")[2] <= 0.10, load["name"]
