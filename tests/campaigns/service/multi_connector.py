"""Two stock vLLM servers with several KV connectors, and a proxy: vLLM's MultiConnector beside
TandemMultiConnector.

    python -m tests.campaigns.service.multi_connector [--requests 100]

The children are TandemConnector and vLLM's ExampleConnector, in two cases also a connector that
never answers. Each prompt goes through the proxy, and its answer is compared with that of a server
without a connector. Then ``/metrics`` of both servers must account for every request. Afterwards
the prompts are sent again: now both children of decode have their KV, and the weights decide which
one loads it.

ExampleConnector stores a prompt's blocks with its first chunk, so prompts are shorter than a chunk.
It lacks HMA support, so vLLM turns the hybrid allocator off under its own MultiConnector.
TandemMultiConnector needs ``--disable-hybrid-kv-cache-manager``; without it, the server must not
start, and the error must name the child.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from testing.facts import RecallPrompt, make_prompt
from testing.ports import free_port
from testing.servers import Server
from testing.vllm_server import start_module, stop, wait_until_up

FACTS = (6, 20)
"""Range of facts in a prompt: 6 facts fill a block, 20 take 120 tokens, and a chunk is 256."""

LOGS = {"VLLM_LOGGING_LEVEL": "INFO"}
"""ExampleConnector logs its loads at this level."""

SILENCE_S = 20.0
"""Time after which a request that a silent child holds up counts as waiting for ever."""


@dataclass(frozen=True)
class Case:
    """Connectors of both servers.

    ``connector``  MultiConnector or TandemMultiConnector
    ``weights``    ``load_weights`` of the children, if the connector has them
    ``silent``     whether one more child never answers
    ``hma``        whether the hybrid allocator is not turned off; only for TandemMultiConnector
    ``loads``      the child from which decode loads a prompt that both have; None: requests never
                   end
    """

    connector: str
    weights: tuple[float, ...] = ()
    silent: bool = False
    hma: bool = False
    loads: str | None = "TandemConnector"

    def __str__(self) -> str:
        weights = f", weights {' and '.join(f'{weight:g}' for weight in self.weights)}" if self.weights else ""
        silent, hma = ", a child never answers" if self.silent else "", ", hybrid allocator on" if self.hma else ""
        return self.connector + weights + silent + hma

    @property
    def options(self) -> tuple[str, ...]:
        """Arguments of the servers."""
        off = self.connector == "TandemMultiConnector" and not self.hma
        return ("--disable-hybrid-kv-cache-manager",) if off else ()


VLLMS = Case("MultiConnector")
CASES = (
    VLLMS,
    Case("TandemMultiConnector", (1, 1)),
    Case("TandemMultiConnector", (1, 4), loads="ExampleConnector"),
    Case("TandemMultiConnector", (1, 1, 1), silent=True),
    Case("MultiConnector", silent=True, loads=None),
    Case("TandemMultiConnector", (1, 1), hma=True, loads=None),
)


@dataclass(frozen=True)
class Pair:
    """Base URLs of the servers and the proxy, the folder below which ExampleConnector stores KV,
    and decode's log.
    """

    prefill: str
    decode: str
    proxy: str
    stored: Path
    decode_log: Path


@dataclass(frozen=True)
class Outcome:
    """Observations of ``ask``: wrong answers, and samples of both servers' ``/metrics`` by name
    and labels.
    """

    requests: int
    wrong: int
    prefill: dict[str, float]
    decode: dict[str, float]
    stored_prompts: int

    def problems(self) -> list[str]:
        """Return differences from the expected state after this number of requests; empty
        without any.
        """
        count = float(self.requests)
        expected = {
            "answers that differ from those of a server without a connector": (self.wrong, 0),
            "prefill: requests sent": (_requests(self.prefill, "sent"), count),
            "decode: requests received": (_requests(self.decode, "received"), count),
            "decode: requests recomputed": (_requests(self.decode, "recomputed"), 0),
            "prefill: transfers in progress": (_total(self.prefill, "vllm:tandem_kv_transfers"), 0),
            "decode: transfers in progress": (_total(self.decode, "vllm:tandem_kv_transfers"), 0),
            "prefill: writes that failed": (self.prefill.get("vllm:tandem_kv_writes_total/failed", 0), 0),
        }
        found = [f"{what}: {seen:g}, expected {want:g}" for what, (seen, want) in expected.items() if seen != want]
        for name in ("vllm:tandem_kv_sent_bytes_total", "vllm:tandem_kv_pair_bytes_total"):
            if not _total(self.prefill, name):
                found.append(f"prefill: {name} is zero or missing")
        if not self.stored_prompts:
            found.append("ExampleConnector has stored nothing")
        return found


def _requests(samples: dict[str, float], outcome: str) -> float:
    return samples.get(f"vllm:tandem_kv_requests_total/{outcome}", 0)


def _total(samples: dict[str, float], name: str) -> float:
    return sum(value for key, value in samples.items() if key.partition("/")[0] == name)


def multi_connector(case: Case, role: str, stored: Path) -> dict[str, Any]:
    """Return ``--kv-transfer-config`` of a server."""
    tandem = {
        "kv_connector": "TandemConnector",
        "kv_connector_module_path": "connectors.vllm_hma.connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
    }
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(stored / role)},
    }
    silent = {
        "kv_connector": "SilentConnector",
        "kv_connector_module_path": "testing.silent_connector",
        "kv_role": "kv_both",
    }
    extra: dict[str, Any] = {"connectors": [tandem, example, *([silent] if case.silent else [])]}
    config: dict[str, Any] = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if case.connector == "TandemMultiConnector":
        config["kv_connector_module_path"] = "connectors.vllm_hma.multi_connector"
        extra["load_weights"] = list(case.weights)
    return config | {"kv_connector": case.connector, "kv_connector_extra_config": extra}


@contextmanager
def servers(folder: Path, case: Case = VLLMS) -> Iterator[Pair]:
    """Start a prefill server, a decode server and the proxy; stop them at the end."""
    stored = folder / "stored"
    roles = ("kv_producer", "kv_consumer")
    prefill, decode = (
        Server(role, free_port(), 1, folder, multi_connector(case, role, stored), LOGS, options=case.options)
        for role in roles
    )
    proxy = f"http://127.0.0.1:{free_port()}"
    proxies = []
    try:
        for server in (prefill, decode):
            server.start()
        for server in (prefill, decode):
            server.wait_until_up()
        command = ["testing.sequential_proxy", "--prefill", prefill.url, "--decode", decode.url]
        proxies.append(start_module(folder, "proxy", [*command, "--port", proxy.rpartition(":")[2]]))
        wait_until_up(f"{proxy}/docs", proxies[0], folder)
        yield Pair(prefill.url, decode.url, proxy, stored, decode.log)
    finally:
        stop(proxies)
        for server in (prefill, decode):
            server.destroy()


def plain_answers(requests: int, folder: Path, seed: int = 1) -> dict[str, str]:
    """Return the answers of a server without a connector, by prompt."""
    server = Server("plain", free_port(), 1, folder, None)
    try:
        server.start()
        server.wait_until_up()
        return {recall.text: _answer(server.url, recall) for recall in _prompts(random.Random(seed), requests)}
    finally:
        server.destroy()


def ask(pair: Pair, requests: int, answers: Mapping[str, str], seed: int = 1) -> Outcome:
    """Send prompts one after the other, then one plain request to each server, whose steps
    report the last counts.

    ``answers``  expected answers (``plain_answers``)
    """
    rng = random.Random(seed)
    wrong = 0
    for recall in _prompts(rng, requests):
        wrong += _answer(pair.proxy, recall) != answers[recall.text]
    for url in (pair.prefill, pair.decode):
        # An idle engine reports with its next step.
        _complete(url, make_prompt(rng, 2).text, 4)
    stored = sum(1 for file in pair.stored.glob("*/*") if any(file.iterdir()))
    return Outcome(requests, wrong, _samples(pair.prefill), _samples(pair.decode), stored)


@dataclass(frozen=True)
class Again:
    """Observations of ``ask_again``: wrong answers, and requests by the child that has loaded their
    KV on decode.
    """

    requests: int
    wrong: int
    loads: dict[str, int]


def ask_again(pair: Pair, requests: int, answers: Mapping[str, str], seed: int = 1) -> Again:
    """Repeat the prompts of ``ask``."""
    wrong, before = 0, _loads(pair)
    for recall in _prompts(random.Random(seed), requests):
        wrong += _answer(pair.proxy, recall) != answers[recall.text]
    after = _loads(pair)
    return Again(requests, wrong, {child: after[child] - count for child, count in before.items()})


def _prompts(rng: random.Random, requests: int) -> Iterator[RecallPrompt]:
    for _ in range(requests):
        yield make_prompt(rng, rng.randint(*FACTS))


def _loads(pair: Pair) -> dict[str, int]:
    _complete(pair.decode, make_prompt(random.Random(0), 2).text, 4)  # an idle engine reports with its next step
    # ExampleConnector has no metrics.
    example = pair.decode_log.read_text(errors="replace").count("Inject KV cache of")
    return {"TandemConnector": int(_requests(_samples(pair.decode), "received")), "ExampleConnector": example}


def waits_for_ever(pair: Pair) -> bool:
    """Return whether a request has no answer after SILENCE_S."""
    try:
        httpx.post(
            f"{pair.decode}/v1/completions",
            json={"model": "demo", "prompt": "Hello", "max_tokens": 1},
            timeout=SILENCE_S,
        )
    except httpx.ReadTimeout:
        return True
    return False


def _answer(url: str, recall: RecallPrompt) -> str:
    return _complete(url, recall.text, 6)


def _complete(url: str, prompt: str, max_tokens: int) -> str:
    body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    answer.raise_for_status()
    text: str = answer.json()["choices"][0]["text"]
    return text


def _samples(url: str) -> dict[str, float]:
    """Return the connector's samples by ``name/label``, with the label that vLLM does not set."""
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines():
        match = re.match(r"(vllm:tandem_kv_\w+)\{(.*)\} ([0-9.e+-]+)$", line)
        if match and not match[1].endswith("_created"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
            own = [value for key, value in labels.items() if key not in ("engine", "model_name")]
            found["/".join([match[1], *own])] = float(match[3])
    return found


def _refused(case: Case, folder: Path) -> list[str]:
    """Start a server that must end with an error that names the child."""
    server = Server("kv_consumer", free_port(), 1, folder, multi_connector(case, "kv_consumer", folder))
    expected = "TandemMultiConnector: ExampleConnector does not support the hybrid KV cache manager"
    try:
        server.start()
        server.wait_until_up()
    except RuntimeError:
        found = expected in server.log.read_text(errors="replace")
        print(f"{case}: {'refused, and the error names the child' if found else 'another error'}", flush=True)
        return [] if found else [f"the server ended with another error: {server.log.read_text()[-500:]}"]
    finally:
        server.destroy()
    return ["the server has started"]


def run(case: Case, requests: int, answers: Mapping[str, str], folder: Path) -> list[str]:
    """Run one case, print its figures, and return differences from the expected ones."""
    if case.hma:
        return _refused(case, folder)
    with servers(folder, case) as pair:
        if case.loads is None:
            waits = waits_for_ever(pair)
            print(f"{case}: {'no answer' if waits else 'an answer'} within {SILENCE_S:g} s", flush=True)
            return [] if waits else ["a request did not wait for the child that never answers"]
        outcome = ask(pair, requests, answers)
        again = ask_again(pair, requests, answers)
    if case == VLLMS:
        for role, samples in (("prefill", outcome.prefill), ("decode", outcome.decode)):
            print(role)
            for key, value in sorted(samples.items()):
                print(f"  {key:60} {value:g}")
    loads = ", ".join(f"{child} {count}" for child, count in again.loads.items())
    print(
        f"{case}: {requests} prompts, {outcome.wrong} wrong, {outcome.stored_prompts} in ExampleConnector; again: "
        f"{again.wrong} wrong, loaded by {loads}",
        flush=True,
    )
    problems = outcome.problems()
    if again.wrong:
        problems.append(f"{again.wrong} wrong answers to repeated prompts")
    if again.loads != {child: requests if child == case.loads else 0 for child in again.loads}:
        problems.append(f"{case.loads} must have loaded all repeated prompts, not {again.loads}")
    return problems


def main() -> int:
    """Return 0 if there are no differences from the expected values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    arguments = parser.parse_args()
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        answers = plain_answers(arguments.requests, Path(folder))
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            problems += [f"{case}: {problem}" for problem in run(case, arguments.requests, answers, Path(folder))]
    print("\n".join(problems) if problems else "metrics account for every request, and weights decide")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
