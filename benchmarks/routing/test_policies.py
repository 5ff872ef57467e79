"""Replays are deterministic, judged by models independent of the policy, against an oracle."""

import json
from pathlib import Path

import pytest

import benchmarks.routing
from benchmarks.routing.__main__ import RESULTS, arms, begin
from benchmarks.routing.fleet import Fleet, Route, replay
from benchmarks.routing.loads import LOADS, Load, Request, Segment, mixed, multi_turn, small_machine
from benchmarks.routing.machine import GPU
from benchmarks.routing.oracle import Oracle
from benchmarks.routing.policies import AlwaysRemote, Ours, RoundRobin
from benchmarks.routing.report import ORACLE, OURS, measure, regrets
from configs.settings.router import RoutingSettings
from testing.imports import imported

FOLDER = Path(benchmarks.routing.__path__[0])


@pytest.mark.parametrize("name", ["machine", "fleet", "oracle", "loads"])
def test_the_truth_is_not_what_the_policy_thinks(name):
    """The models use no cost model, loads or prefix index of the policy, only its form of
    prompts.
    """
    ours = {module for module in imported(FOLDER / f"{name}.py") if module.startswith(("actors", "configs"))}
    assert ours <= ({"actors.policy.prompts"} if name == "loads" else set())


@pytest.mark.parametrize("make", LOADS, ids=lambda make: make.__name__)
def test_loads_are_the_same_every_time(make):
    """A seed determines the load; another seed gives another load."""
    one, same, other = make(1), make(1), make(2)
    assert one == same != other
    assert [request.blocks for request in one.requests[:20]] == [request.blocks for request in same.requests[:20]]


def test_all_requests_are_served_once_and_a_replay_repeats_itself():
    """Every policy of the report except the oracle, which a later test covers."""
    load = small_machine(3)
    for name, policy in arms(load).items():
        if name == ORACLE:
            continue
        first, second = replay(load, policy(), begin), replay(load, policy(), begin)
        assert first == second
        assert [one.number for one in first] == list(range(len(load.requests)))
        assert min(one.ttft_s for one in first) > 0


def few(*requests: Request, prefill: int = 1, decode: int = 1) -> Load:
    return Load("few", GPU, prefill, decode, requests, {})


def prompt(number: int, at_s: float, tokens: int, answer: int = 50) -> Request:
    return Request(number, at_s, (Segment(number, tokens),), Segment(1000 + number, answer), 1.0)


class Watching(Oracle):
    """Oracle that records its choices."""

    chosen: dict[int, Route]

    def route(self, request: Request, fleet: Fleet) -> Route:
        before = (fleet.now, sorted(fleet.jobs), [job.computed for job in fleet.jobs.values()])
        found = super().route(request, fleet)
        assert before == (fleet.now, sorted(fleet.jobs), [job.computed for job in fleet.jobs.values()])
        self.chosen[request.number] = found
        return found


def watch(load: Load) -> dict[int, Route]:
    oracle = Watching(load, ttft_only=False)
    oracle.chosen = {}
    replay(load, oracle, begin)
    return oracle.chosen


def test_the_oracle_on_plain_cases():
    """A single prompt stays on decode; beside fifteen streams it goes to prefill; of two decode
    engines the idle one.
    """
    assert watch(few(prompt(0, 0.0, 1000))) == {0: Route(0, None)}
    crowd = [prompt(n, 0.001 * n, 10, answer=400) for n in range(15)]
    assert watch(few(*crowd, prompt(15, 0.5, 8000)))[15] == Route(0, 0)
    assert {route.decode for route in watch(few(prompt(0, 0.0, 9000), prompt(1, 0.01, 9000), decode=2)).values()} == {
        0,
        1,
    }


def test_ours_beats_what_is_in_use_and_the_oracle_is_not_far():
    """Tandem's policy beats the others on one seed of the mixed load, in simulated time."""
    load = mixed(5)
    ours, remote, turns = (
        measure(replay(load, policy, begin)) for policy in (Ours(RoutingSettings()), AlwaysRemote(), RoundRobin())
    )
    assert ours["finish_ms"] < min(remote["finish_ms"], turns["finish_ms"])
    assert ours["ttft_ms"] < min(remote["ttft_ms"], turns["ttft_ms"])


def test_prefixes_are_found():
    """Turns of a conversation go to the engine with its KV."""
    load = multi_turn(5)
    ours, turns = (measure(replay(load, policy, begin)) for policy in (Ours(RoutingSettings()), RoundRobin()))
    assert ours["cached_share"] > turns["cached_share"]
    assert ours["ttft_ms"] < turns["ttft_ms"]


def test_the_committed_results():
    """They have every load, and regret against the oracle is at most a tenth on each."""
    document = json.loads(RESULTS.read_text())
    assert [load["name"] for load in document["loads"]] == [make(1).name for make in LOADS]
    for load in document["loads"]:
        assert regrets(load["seeds"], OURS, ORACLE, "finish_ms")["most"] <= 0.10, load["name"]
