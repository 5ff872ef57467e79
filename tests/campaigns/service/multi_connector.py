"""Two stock vLLM servers with MultiConnector over TandemConnector and ExampleConnector, and a
proxy.

    python -m tests.campaigns.service.multi_connector [--requests 100]

Each prompt goes through the proxy, and its answer is compared with the fact in the prompt.
Afterwards ``/metrics`` of both servers must account for every request. ExampleConnector stores a
prompt's blocks with its first chunk, so prompts are shorter than a chunk. It lacks HMA support, so
vLLM turns the hybrid allocator off.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from testing.facts import make_prompt
from testing.ports import free_port
from testing.servers import Server
from testing.vllm_server import start_module, stop, wait_until_up

FACTS = (2, 20)
"""Range of facts in a prompt: 20 facts take about 120 tokens, and a chunk is 256."""


@dataclass(frozen=True)
class Pair:
    """Base URLs of the servers and the proxy, and the folder below which ExampleConnector stores
    KV.
    """

    prefill: str
    decode: str
    proxy: str
    stored: Path


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
            "answers that differ from the prompt's fact": (self.wrong, 0),
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


def multi_connector(role: str, stored: Path) -> dict[str, Any]:
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
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [tandem, example]},
    }


@contextmanager
def servers(folder: Path) -> Iterator[Pair]:
    """Start a prefill server, a decode server and the proxy; stop them at the end."""
    stored = folder / "stored"
    roles = ("kv_producer", "kv_consumer")
    prefill, decode = (Server(role, free_port(), 1, folder, multi_connector(role, stored)) for role in roles)
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
        yield Pair(prefill.url, decode.url, proxy, stored)
    finally:
        stop(proxies)
        for server in (prefill, decode):
            server.destroy()


def ask(pair: Pair, requests: int, seed: int = 1) -> Outcome:
    """Send prompts one after the other, then one plain request to each server, whose steps
    report the last counts.
    """
    rng = random.Random(seed)
    wrong = 0
    for _ in range(requests):
        recall = make_prompt(rng, rng.randint(*FACTS))
        wrong += _complete(pair.proxy, recall.text, 6).strip() != recall.answer
    for url in (pair.prefill, pair.decode):
        # An idle engine reports with its next step.
        _complete(url, make_prompt(rng, 2).text, 4)
    stored = sum(1 for file in pair.stored.glob("*/*") if any(file.iterdir()))
    return Outcome(requests, wrong, _samples(pair.prefill), _samples(pair.decode), stored)


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


def main() -> int:
    """Return 0 if there are no differences from the expected values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, servers(Path(folder)) as pair:
        outcome = ask(pair, arguments.requests)
    for role, samples in (("prefill", outcome.prefill), ("decode", outcome.decode)):
        print(role)
        for key, value in sorted(samples.items()):
            print(f"  {key:60} {value:g}")
    problems = outcome.problems()
    print(f"{outcome.requests} requests, {outcome.wrong} wrong, {outcome.stored_prompts} prompts in ExampleConnector")
    print("\n".join(problems) if problems else "metrics account for every request")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
