"""The simulation of autoscaling: engine models computed by hand, and Serve's own decisions."""

from dataclasses import replace
from pathlib import Path

import pytest

from actors.autoscaling.policy import POLICY
from benchmarks.scaling.autoscaler import Autoscaler, Clock, Policy, simulated_time
from benchmarks.scaling.engines import DecodeReplica, Machine, PrefillReplica, Request
from benchmarks.scaling.live import Counts, live
from benchmarks.scaling.loads import Arrival, Load, from_file, synthetic
from benchmarks.scaling.simulation import STEP_S, Fleet, Simulation

MACHINE = Machine(
    prompt_tokens_per_s=1000, step_s=0.02, step_per_sequence_s=0.005, kv_tokens=1000, start_s=30, handover_s=0
)
AT_ONCE = {"min_replicas": 1, "max_replicas": 8, "upscale_delay_s": 0.0, "downscale_delay_s": 0.0}


def request(prompt_tokens: int, answer_tokens: int, at_s: float = 0.0) -> Request:
    return Request(Arrival(at_s, prompt_tokens, answer_tokens))


def decoding(*requests: Request) -> DecodeReplica:
    decode = DecodeReplica(0, 0.0, MACHINE)
    for one in requests:
        one.prompt_done_s = 0.0
        decode.take(one)
    return decode


def test_prompts_are_computed_in_turn():
    """A replica computes 500, then 250 tokens at 1,000 tokens/s, and reports this rate."""
    prefill = PrefillReplica(0, 0.0, MACHINE)
    first, second = request(500, 1), request(250, 1)
    prefill.take(first, 1.0)
    prefill.take(second, 1.0)
    assert (first.prompt_done_s, second.prompt_done_s) == (1.5, 1.75)
    assert prefill.stats(1.2)["queued_tokens"] == 750
    prefill.step(1.6)
    assert prefill.stats(1.6)["queued_tokens"] == 250
    assert prefill.stats(1.6)["tokens_per_busy_s"] == pytest.approx(1000)
    assert prefill.ongoing == 2, "the first is held until decode has its first token"


def test_a_step_takes_longer_the_more_sequences_it_has():
    """Two sequences take 0.02 + 2 x 0.005 s per token."""
    decode = decoding(one := request(100, 31), request(100, 31))
    ended = [step for step in range(1, 200) if decode.step(step / 100, 0.01)]
    assert one.tpot_s == pytest.approx(0.03, rel=0.03)
    assert decode.stats(ended[-1] / 100)["tpot_s"] == pytest.approx(0.03)


def test_a_request_without_room_for_its_kv_waits():
    """A cache of 1,000 tokens does not hold two requests of 600."""
    decode = decoding(first := request(500, 100), request(500, 100))
    assert decode.stats(0.0) == decode.stats(0.0) | {"kv_use": 0.6, "running": 1.0, "waiting": 1.0}
    now_s = 0.0
    while first.ended_s == float("inf"):
        now_s += 0.1
        decode.step(now_s, 0.1)
    assert decode.stats(now_s) == decode.stats(now_s) | {"running": 1.0, "waiting": 0.0}


def test_engines_are_paid_for_from_their_start_to_their_last_request():
    """One is ready, one starts for 30 s, and one stops with a request of a second."""
    fleet = Fleet("Prefill", PrefillReplica, MACHINE, slots=2, count=1)
    fleet.scale(2, 0.0)
    assert [len(fleet.ready(at_s)) for at_s in (0.0, 29.9, 30.0)] == [1, 1, 2]
    fleet.replicas[0].take(request(1000, 1), 30.0)
    fleet.scale(1, 30.0)
    fleet.pay(1.0)
    assert fleet.gpu_s == 1.0, "the idler one was stopped, and costs nothing more"
    fleet.scale(2, 30.0)
    assert len(fleet.ready(31.0)) == 1
    assert fleet.changes == 3


def test_serves_default_policy_is_serves():
    """Serve's policy: 20 ongoing requests at 4 per replica need five."""
    clock = Clock(100.0)
    with simulated_time(clock):
        scaler = Autoscaler(Policy("theirs", targets=(4.0, 10.0)), AT_ONCE, clock)
        for role in ("Prefill", "Decode"):
            for at_s in (94.0, 100.0):
                clock.now_s = at_s
                scaler.record(role, 0, {0: 20}, {0: {}})
            scaler.push(role, [0])
        clock.now_s = 101.0
        assert scaler.decide({"Prefill": 1, "Decode": 1}) == {"Prefill": 5, "Decode": 2}


OURS = Policy("ours", {"policy_function": POLICY, "policy_kwargs": {"tpot_s": 0.05}})


@pytest.mark.parametrize("policy", [OURS, Policy("theirs", targets=(2.0, 8.0))], ids=lambda policy: policy.name)
def test_a_load_that_grows_gets_engines_and_every_request_ends(policy):
    """One request arrives per second for three minutes, then four; each takes half a second."""
    times = [*range(180), *(180 + number / 4 for number in range(4 * 240))]
    load = Load("step", "", 420.0, tuple(Arrival(float(at_s), 500, 20) for at_s in times))
    simulation = Simulation(load, policy, AT_ONCE, replace(MACHINE, kv_tokens=100_000))
    ready, paid_s = {}, 0.0
    for at_s in simulation.steps():
        ready[round(at_s)] = len(simulation.prefill.ready(at_s))
        paid_s += STEP_S * (len(simulation.prefill.replicas) + len(simulation.decode.replicas))
    outcome = simulation.outcome()
    assert outcome.requests == len(times)
    assert 0 < outcome.attained < 1
    assert outcome.ttft_p99_s < 600
    assert ready[100] <= 2 <= ready[400]
    assert outcome.gpu_hours * 3600 == pytest.approx(paid_s, rel=0.1)


def test_the_same_seed_is_the_same_load():
    """Another seed gives another load; the rates are those of the descriptions."""
    one, again, other = synthetic(1), synthetic(1), synthetic(2)
    assert one == again
    assert one[0].arrivals != other[0].arrivals
    top = [arrival for arrival in one[0].arrivals if 1200 <= arrival.at_s < 2400]
    assert len(top) == pytest.approx(20 * 1200, rel=0.02)
    assert sum(arrival.prompt_tokens for arrival in top) / len(top) == pytest.approx(1500, rel=0.05)


def test_a_recorded_load(tmp_path: Path):
    """Azure's columns, with seven digits of a second."""
    file = tmp_path / "trace.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109"
    )
    last = from_file(file).arrivals[1]
    assert (last.prompt_tokens, last.answer_tokens) == (396, 109)
    assert last.at_s == pytest.approx(4.314579, abs=STEP_S / 1000)


@pytest.mark.parametrize(
    ("requested", "changes", "returns"),
    [
        ([1, 2, 3, 3, 2, 1], (), 0),
        ([3, 2, 2, 3, 2, 3], (), 2),
        ([3, 2, 2, 3, 3, 3], (2.5,), 0),  # another load
    ],
)
def test_replicas_that_return(requested: list[int], changes: tuple[float, ...], returns: int):
    """A replica returns if its role was smaller before, under the same load."""
    counts = Counts()
    for at_s, count in enumerate(requested):
        counts.add(at_s, {"Prefill": 1, "Decode": 1}, {"Prefill": 1, "Decode": count})
    assert counts.returns(changes) == returns


def test_the_time_of_a_start():
    """Two replicas are requested at 1 s, and ready at 4 s."""
    counts = Counts()
    for at_s, (ready, requested) in enumerate([(1, 1), (1, 3), (1, 3), (2, 3), (3, 3)]):
        counts.add(at_s, {"Prefill": ready, "Decode": 1}, {"Prefill": requested, "Decode": 1})
    assert counts.starts() == [3.0]


def test_a_load_for_small_engines_keeps_its_shape():
    """Half of 600 s, 5 times faster, with 3/4 of the rate and tokens divided by 13."""
    load = live(Load("", "", 600.0, tuple(Arrival(at_s / 10, 1300, 130) for at_s in range(6000))), 5.0, 300.0)
    assert load.duration_s == 60.0
    assert len(load.arrivals) == pytest.approx(450, rel=0.1)
    assert {(one.prompt_tokens, one.answer_tokens) for one in load.arrivals} == {(100, 10)}
