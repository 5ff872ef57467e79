"""Clients that users have, against the whole service: openai's SDK, curl, `vllm bench serve`.

Every step asks for facts that the answer must restate, or counts complete requests. What other
clients send and receive is compared field by field in the campaign `differential`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, Literal

import openai
from pydantic import BaseModel

from configs.settings.service import DEMO_MODEL_DIR, DEMO_SERVED_NAME
from testing.facts import RecallPrompt, exact, make_prompt
from tests.campaigns.runner import ROOT, Report
from tests.campaigns.service.world import service

FRONTEND = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
BENCH_PROMPTS = 200
DAYS = {"days": {"type": "integer", "minimum": 1, "maximum": 9}}
TOOL_SCHEMA = {"type": "object", "properties": DAYS, "required": ["days"], "additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "forecast", "parameters": TOOL_SCHEMA, "strict": True}}

Step = Callable[[], object]


class Forecast(BaseModel):
    """Structured answers are parsed into this."""

    days: Literal[1, 2, 3]
    sunny: bool


def facts(name: str) -> RecallPrompt:
    return make_prompt(Random(f"clients {name}"), 20)


def asked(name: str) -> dict[str, Any]:
    return {"model": DEMO_SERVED_NAME, "messages": facts(name).messages, "temperature": 0, "max_completion_tokens": 30}


@cache
def short_json() -> dict[str, int]:
    """Return biases against tokens that the demo model would repeat for ever: white space in JSON,
    and calls of a tool, each in tags. A required call still has its tags.
    """
    from transformers import AutoTokenizer

    endless = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR).encode(" \n\t\r<", add_special_tokens=False)
    return {str(token): -100 for token in endless}


def in_json(name: str) -> dict[str, Any]:
    return asked(name) | {"max_completion_tokens": 100, "logit_bias": short_json()}


def right(name: str, text: str | None) -> str:
    assert exact(facts(name), text or ""), f"{text!r} is not {facts(name).answer}"
    return str(text)


def sdk_steps(url: str) -> Iterator[tuple[str, Step]]:
    """OpenAI's own client."""
    settings: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "unused", "max_retries": 0, "timeout": 120}
    client = openai.OpenAI(**settings)
    chats, responses = client.chat.completions, client.responses

    def stream() -> str:
        with chats.stream(**asked("stream"), stream_options={"include_usage": True}) as events:
            for _ in events:
                pass
            final = events.get_final_completion()
        assert final.usage is not None
        return right("stream", final.choices[0].message.content)

    def several(streamed: bool) -> int:
        async def one(many: openai.AsyncOpenAI, name: str) -> str:
            if not streamed:
                return str((await many.chat.completions.create(**asked(name))).choices[0].message.content)
            chunks = await many.chat.completions.create(**asked(name), stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

        async def ask() -> list[str]:
            async with openai.AsyncOpenAI(**settings) as many:
                return await asyncio.gather(*(one(many, f"async {number}") for number in range(12)))

        return len([right(f"async {number}", text) for number, text in enumerate(asyncio.run(ask()))])

    def tools(streamed: bool) -> str:
        options = {**in_json("tools"), "tools": [TOOL], "tool_choice": "required"}
        if not streamed:
            message = chats.create(**options).choices[0].message
        else:
            with chats.stream(**options) as events:
                for _ in events:
                    pass
                message = events.get_final_completion().choices[0].message
        call: Any = (message.tool_calls or [])[0]
        assert call.function.name == "forecast"
        assert 1 <= json.loads(call.function.arguments)["days"] <= 9, call
        return str(call.function.arguments)

    def response(name: str, **more: Any) -> dict[str, Any]:
        given: Any = facts(name).messages
        return {"model": DEMO_SERVED_NAME, "input": given, "temperature": 0, "max_output_tokens": 30} | more

    def response_streamed() -> str:
        with responses.stream(**response("response stream")) as events:
            kinds = [event.type for event in events]
            final = events.get_final_response()
        assert kinds[-1] == "response.completed", kinds
        return right("response stream", final.output_text)

    def response_parsed() -> Any:
        options = response("response parse", max_output_tokens=100, extra_body={"logit_bias": short_json()})
        return responses.parse(**options, text_format=Forecast).output_parsed

    def refusals() -> str:
        named = {"type": "function", "function": {"name": "x"}}
        wrong: list[dict[str, Any]] = [
            {"model": "nobody"},
            {"temperature": -1},
            {"tools": [TOOL], "tool_choice": named},
        ]
        found = []
        for change in wrong:
            try:
                chats.create(**asked("refusal") | change)
            except openai.APIStatusError as error:
                found.append(type(error).__name__)
        assert found == ["NotFoundError", "BadRequestError", "BadRequestError"], found
        return ", ".join(found)

    completion: dict[str, Any] = {
        "model": DEMO_SERVED_NAME,
        "prompt": facts("completion").text,
        "temperature": 0,
        "max_tokens": 8,
    }
    yield "openai: models", lambda: [one.id for one in client.models.list()].index(DEMO_SERVED_NAME)
    yield "openai: completions", lambda: right("completion", client.completions.create(**completion).choices[0].text)
    yield "openai: chat", lambda: right("chat", chats.create(**asked("chat")).choices[0].message.content)
    yield "openai: stream", stream
    yield "openai: async", lambda: several(streamed=False)
    yield "openai: async streams", lambda: several(streamed=True)
    yield "openai: tools", lambda: tools(streamed=False)
    yield "openai: tools, streamed", lambda: tools(streamed=True)
    yield (
        "openai: parse",
        lambda: parsed(chats.parse(**in_json("parse"), response_format=Forecast).choices[0].message.parsed),
    )
    yield "openai: responses", lambda: right("response", responses.create(**response("response")).output_text)
    yield "openai: responses, streamed", response_streamed
    yield "openai: responses, parse", lambda: parsed(response_parsed())
    yield "openai: typed errors", refusals


def parsed(found: object) -> str:
    assert isinstance(found, Forecast), found
    return repr(found)


def run(command: list[str], folder: Path, **environment: str) -> str:
    """Return the output of a program, run offline in ``folder``; AssertionError if it fails."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "NO_COLOR": "1"}
    ran = subprocess.run(
        command, cwd=folder, env=os.environ | offline | environment, capture_output=True, text=True, timeout=900
    )
    assert ran.returncode == 0, f"{command[0]} ended with {ran.returncode}:\n{(ran.stdout + ran.stderr)[-3000:]}"
    return ran.stdout


def curl(url: str, folder: Path) -> str:
    body = {"model": DEMO_SERVED_NAME, "prompt": facts("curl").text, "temperature": 0, "max_tokens": 8}
    command = ["curl", "-sS", "-N", "-H", "Content-Type: application/json", f"{url}/v1/completions", "-d"]
    streamed = run([*command, json.dumps(body | {"stream": True})], folder)
    assert streamed.endswith("data: [DONE]\n\n")
    return right("curl", json.loads(run([*command, json.dumps(body)], folder))["choices"][0]["text"])


def bench(url: str, folder: Path, backend: str, endpoint: str) -> str:
    """Run `vllm bench serve` by its module, at an infinite rate: the CPU build has no command."""
    imports = "from vllm.benchmarks import serve; from vllm.utils.argparse_utils import FlexibleArgumentParser as P"
    program = f"{imports}; p = P(); serve.add_cli_args(p); serve.main(p.parse_args())"
    words = [
        *("--backend", backend, "--base-url", url, "--endpoint", endpoint, "--model", DEMO_SERVED_NAME),
        *("--tokenizer", str(DEMO_MODEL_DIR), "--dataset-name", "random", "--num-prompts", str(BENCH_PROMPTS)),
        *("--random-input-len", "100", "--random-output-len", "8", "--request-rate", "inf", "--ignore-eos"),
        *("--save-result", "--result-dir", str(folder), "--result-filename", "bench.json"),
    ]
    run([sys.executable, "-c", program, *words], folder, PYTHONPATH=str(ROOT))
    found = json.loads((folder / "bench.json").read_text())
    assert (found["completed"], found["total_output_tokens"]) == (BENCH_PROMPTS, 8 * BENCH_PROMPTS), found
    return f"{found['completed']} requests"


def clients(report: Report, *, only: str = "") -> None:
    """All clients, or those whose name contains ``only``."""
    with service(report, frontend=FRONTEND) as running:
        url, folder = running.url, report.folder
        steps: list[tuple[str, Step]] = [*sdk_steps(url), ("curl", lambda: curl(url, folder))]
        for backend, endpoint in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
            steps.append((f"vllm bench serve {backend}", partial(bench, url, folder, backend, endpoint)))
        for name, play in steps:
            if only in name:
                with report.case(name):
                    report.row(client=name, answer=str(play())[:120])
