"""Two stock vLLM servers with several KV connectors, and a proxy: vLLM's MultiConnector beside
TandemMultiConnector.

The children are TandemConnector and vLLM's ExampleConnector, in two cases also a connector that
never answers. Answers are those of a server without a connector, /metrics accounts for every
request, and weights decide which child loads a prompt that both have. ExampleConnector stores a
prompt's blocks with its first chunk, so prompts are shorter than a chunk. It lacks HMA support:
TandemMultiConnector needs ``--disable-hybrid-kv-cache-manager``, and names the child without it.
"""

from __future__ import annotations

import random
import re
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
from tests.campaigns.runner import Report, misquoted

SILENCE_S = 20.0
"""Time after which a request that a silent child holds up counts as waiting for ever."""

TANDEM, EXAMPLE = "TandemConnector", "ExampleConnector"


@dataclass(frozen=True)
class Case:
    """Connectors of both servers.

    ``weights``  ``load_weights`` of TandemMultiConnector; none for vLLM's MultiConnector
    ``silent``   whether one more child never answers
    ``hma``      whether the hybrid allocator is not turned off: the server must not start
    ``loads``    the child from which decode loads a prompt that both have; None: no answer
    """

    weights: tuple[float, ...] = ()
    silent: bool = False
    hma: bool = False
    loads: str | None = TANDEM

    @property
    def connector(self) -> str:
        return "TandemMultiConnector" if self.weights else "MultiConnector"

    def server(self, role: str, folder: Path) -> Server:
        tandem = {"kv_connector": TANDEM, "kv_connector_module_path": "connectors.vllm_hma.connector"}
        tandem |= {"kv_role": role, "kv_load_failure_policy": "recompute"}
        stored = {"shared_storage_path": str(folder / "stored" / role)}
        example = {"kv_connector": EXAMPLE, "kv_role": "kv_both", "kv_connector_extra_config": stored}
        silent = {"kv_connector": "SilentConnector", "kv_role": "kv_both"}
        silent |= {"kv_connector_module_path": "testing.silent_connector"}
        extra: dict[str, Any] = {"connectors": [tandem, example, *([silent] if self.silent else [])]}
        config: dict[str, Any] = {"kv_connector": self.connector, "kv_role": "kv_both"}
        if self.weights:
            config["kv_connector_module_path"] = "connectors.vllm_hma.multi_connector"
            extra["load_weights"] = list(self.weights)
        config |= {"kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}
        off = ("--disable-hybrid-kv-cache-manager",) if self.weights and not self.hma else ()
        # ExampleConnector logs its loads at INFO.
        return Server(role, free_port(), 1, folder, config, {"VLLM_LOGGING_LEVEL": "INFO"}, options=off)


CASES = (
    Case(),
    Case((1, 1)),
    Case((1, 4), loads=EXAMPLE),
    Case((1, 1, 1), silent=True),
    Case(silent=True, loads=None),
    Case((1, 1), hma=True, loads=None),
)


@contextmanager
def servers(folder: Path, case: Case) -> Iterator[tuple[Server, Server, str]]:
    """Start a prefill server, a decode server and the proxy, whose URL is the last part."""
    pair = [case.server(role, folder) for role in ("kv_producer", "kv_consumer")]
    proxies, port = [], free_port()
    try:
        for server in pair:
            server.start()
        for server in pair:
            server.wait_until_up()
        words = ["testing.sequential_proxy", "--prefill", pair[0].url, "--decode", pair[1].url, "--port", str(port)]
        proxies.append(start_module(folder, "proxy", words))
        wait_until_up(f"http://127.0.0.1:{port}/docs", proxies[0], folder)
        yield pair[0], pair[1], f"http://127.0.0.1:{port}"
    finally:
        stop(proxies)
        for server in pair:
            server.destroy()


def complete(url: str, prompt: str, max_tokens: int = 6) -> str:
    body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return str(
        httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status().json()["choices"][0]["text"]
    )


def plain_answers(count: int, folder: Path, damage: float = 0.0) -> dict[str, str]:
    """Return the answers of a server without a connector, by prompt."""
    rng, server = random.Random(1), Server("plain", free_port(), 1, folder, None)
    try:
        server.start()
        server.wait_until_up()
        prompts = [make_prompt(rng, rng.randint(6, 20)).text for _ in range(count)]
        return {prompt: misquoted(complete(server.url, prompt), damage, rng) for prompt in prompts}
    finally:
        server.destroy()


def counted(server: Server) -> dict[str, float]:
    """Return the connector's samples by name and own label; an idle engine reports with a step."""
    complete(server.url, "a=1\na?", 4)
    found: dict[str, float] = {}
    for line in httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines():
        if match := re.match(r"vllm:tandem_kv_(\w+)\{(.*)\} ([0-9.e+-]+)$", line):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
            own = [value for key, value in labels.items() if key not in ("engine", "model_name")]
            found["/".join([match[1], *own])] = float(match[3])
    return found


def problems(folder: Path, case: Case, answers: dict[str, str]) -> list[str]:
    """Send each prompt twice; return what differs from answers, metrics and choices."""
    with servers(folder, case) as (prefill, decode, proxy):
        wrong = [prompt for prompt, answer in answers.items() if complete(proxy, prompt) != answer]
        sent, received = counted(prefill), counted(decode)
        before = decode.log.read_text(errors="replace").count("Inject KV cache of")
        wrong += [prompt for prompt, answer in answers.items() if complete(proxy, prompt) != answer]
        loads = {
            TANDEM: counted(decode)["requests_total/received"] - received["requests_total/received"],
            EXAMPLE: decode.log.read_text(errors="replace").count("Inject KV cache of") - before,
        }
        stored = any(any(file.iterdir()) for file in (folder / "stored").glob("*/*"))
    count = len(answers)
    expected = {
        "wrong answers": (len(wrong), 0),
        "requests sent": (sent.get("requests_total/sent"), count),
        "requests received": (received.get("requests_total/received"), count),
        "requests recomputed": (received.get("requests_total/recomputed", 0), 0),
        "transfers in progress": (
            sum(v for some in (sent, received) for k, v in some.items() if k.startswith("transfers/")),
            0,
        ),
        "writes that failed": (sent.get("writes_total/failed", 0), 0),
        "bytes are counted": (
            any(v for k, v in sent.items() if k.startswith(("sent_bytes_total", "pair_bytes_total"))),
            True,
        ),
        "ExampleConnector has stored prompts": (stored, True),
        "loads of repeated prompts": (loads, {child: count if child == case.loads else 0 for child in loads}),
    }
    return [f"{what}: {found}, not {wanted}" for what, (found, wanted) in expected.items() if found != wanted]


def _refused(report: Report, folder: Path, case: Case) -> None:
    server = case.server("kv_consumer", folder)
    try:
        server.start()
        server.wait_until_up()
        report.problem(f"{case}: the server has started")
    except RuntimeError:
        log = server.log.read_text(errors="replace")
        report.check("ExampleConnector does not support the hybrid KV cache" in log, f"{case}: {log[-500:]}")
    finally:
        server.destroy()


def _waits_for_ever(report: Report, folder: Path, case: Case) -> None:
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 1}
    with servers(folder, case) as (_, decode, _):
        try:
            httpx.post(f"{decode.url}/v1/completions", json=body, timeout=SILENCE_S)
            report.problem(f"{case}: a request did not wait for the child that never answers")
        except httpx.ReadTimeout:
            pass


def multi_connector(report: Report, *, count: int = 100, damage: float = 0.0) -> None:
    """``count`` prompts through each case."""
    answers = plain_answers(count, report.folder, damage)
    for number, case in enumerate(CASES):
        folder = report.folder / str(number)
        folder.mkdir()
        with report.case(str(case)):
            if case.loads is None:
                (_refused if case.hma else _waits_for_ever)(report, folder, case)
                report.row(case=str(case))
                continue
            found = problems(folder, case, answers)
            report.row(case=str(case), prompts=count, problems=len(found))
            for one in found:
                report.problem(f"{case}: {one}")
