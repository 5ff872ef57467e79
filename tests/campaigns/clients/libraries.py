"""Common clients against the whole service: `make clients`.

    python -m tests.campaigns.clients.libraries [--langchain PYTHON] [--anthropic PYTHON]
        [--url URL]

The `openai` SDK and `vllm bench serve` come with the environment. LangChain and Anthropic's SDK are
not dependencies of Tandem: PYTHON is an interpreter of an environment with `langchain-openai` or
`anthropic` (`make clients` makes one in build/). Every step asks for facts that the answer must
restate. A failed step is reported, and the exit status shows it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Literal

import openai
from pydantic import BaseModel

from configs.settings.service import DEMO_MODEL_DIR, DEMO_SERVED_NAME
from testing.facts import RecallPrompt, exact, make_prompt
from testing.service_process import ROOT, ServiceProcess, write_config

FRONTEND = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
BENCH_PROMPTS = 40
TOOL_SCHEMA = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["days"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "forecast", "parameters": TOOL_SCHEMA, "strict": True}}


class Forecast(BaseModel):
    """Structured answers are parsed into this."""

    days: Literal[1, 2, 3]
    sunny: bool


def facts(name: str, count: int = 20) -> RecallPrompt:
    return make_prompt(Random(f"clients {name}"), count)


def asked(name: str) -> dict[str, Any]:
    return {"model": DEMO_SERVED_NAME, "messages": facts(name).messages, "temperature": 0, "max_completion_tokens": 30}


@cache
def short_json() -> dict[str, int]:
    """Biases, by token id, against tokens that the demo model would repeat forever: white space in
    JSON, and calls of a tool, each in tags.

    A required call still has its tags, because no other token is allowed.
    """
    from transformers import AutoTokenizer

    endless = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR).encode(" \n\t\r<", add_special_tokens=False)
    return {str(token): -100 for token in endless}


def in_json(name: str) -> dict[str, Any]:
    return asked(name) | {"max_completion_tokens": 100, "logit_bias": short_json()}


def right(name: str, text: str | None) -> str:
    assert exact(facts(name), text or ""), f"{text!r} is not {facts(name).answer}"
    return f"answered {text!r}"


class Sdk:
    """OpenAI's own client."""

    def __init__(self, url: str) -> None:
        settings: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "unused", "max_retries": 0, "timeout": 120}
        self._settings = settings
        self._client = openai.OpenAI(**settings)

    def completions(self) -> str:
        prompt = facts("completion")
        reply = self._client.completions.create(model=DEMO_SERVED_NAME, prompt=prompt.text, temperature=0, max_tokens=8)
        return right("completion", reply.choices[0].text)

    def chat(self) -> str:
        return right("chat", self._client.chat.completions.create(**asked("chat")).choices[0].message.content)

    def stream(self) -> str:
        """The SDK's own accumulation of a stream, with the usage at its end."""
        with self._client.chat.completions.stream(**asked("stream"), stream_options={"include_usage": True}) as stream:
            parts = sum(event.type == "content.delta" for event in stream)
            final = stream.get_final_completion()
        assert final.usage is not None
        shown = right("stream", final.choices[0].message.content)
        return f"{shown} in {parts} parts, {final.usage.completion_tokens} tokens"

    def several_at_once(self) -> str:
        async def ask() -> list[str | None]:
            async with openai.AsyncOpenAI(**self._settings) as client:
                replies = await asyncio.gather(
                    *(client.chat.completions.create(**asked(f"async {i}")) for i in range(12))
                )
            return [reply.choices[0].message.content for reply in replies]

        answers = asyncio.run(ask())
        for i, answer in enumerate(answers):
            right(f"async {i}", answer)
        return f"{len(answers)} right answers"

    def several_streams(self) -> str:
        async def ask(client: openai.AsyncOpenAI, name: str) -> str:
            text = ""
            async for chunk in await client.chat.completions.create(**asked(name), stream=True):
                text += chunk.choices[0].delta.content or ""
            return text

        async def ask_all() -> list[str]:
            async with openai.AsyncOpenAI(**self._settings) as client:
                return await asyncio.gather(*(ask(client, f"streams {i}") for i in range(12)))

        for i, answer in enumerate(asyncio.run(ask_all())):
            right(f"streams {i}", answer)
        return "12 right answers"

    def tools(self) -> str:
        reply = self._client.chat.completions.create(**in_json("tools"), tools=[TOOL], tool_choice="required")
        call = (reply.choices[0].message.tool_calls or [])[0]
        assert call.type == "function"
        assert call.function.name == "forecast"
        return f"called {call.function.name}({_checked(call.function.arguments)}), {reply.choices[0].finish_reason}"

    def tools_streamed(self) -> str:
        with self._client.chat.completions.stream(**in_json("tools"), tools=[TOOL], tool_choice="required") as stream:
            for _ in stream:
                pass
            message = stream.get_final_completion().choices[0].message
        call = (message.tool_calls or [])[0]
        return f"called {call.function.name}({_checked(call.function.arguments)})"

    def parsed(self) -> str:
        reply = self._client.chat.completions.parse(**in_json("parse"), response_format=Forecast)
        assert isinstance(reply.choices[0].message.parsed, Forecast)
        return repr(reply.choices[0].message.parsed)

    def response(self) -> str:
        reply = self._client.responses.create(**_response("response"))
        return right("response", reply.output_text)

    def response_streamed(self) -> str:
        with self._client.responses.stream(**_response("response stream")) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert kinds[-1] == "response.completed", kinds
        return right("response stream", final.output_text)

    def response_parsed(self) -> str:
        reply = self._client.responses.parse(
            **_response("response parse") | {"max_output_tokens": 100},
            text_format=Forecast,
            extra_body={"logit_bias": short_json()},
        )
        assert isinstance(reply.output_parsed, Forecast)
        return repr(reply.output_parsed)

    def refusals(self) -> str:
        for error, wrong in (
            (openai.NotFoundError, {"model": "nobody"}),
            (openai.BadRequestError, {"temperature": -1}),
            (openai.BadRequestError, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}),
        ):
            try:
                self._client.chat.completions.create(**(asked("refusal") | wrong))
            except error:
                continue
            raise AssertionError(f"{wrong} was not refused with {error.__name__}")
        return "NotFoundError, BadRequestError"

    def models(self) -> str:
        names = [model.id for model in self._client.models.list()]
        assert DEMO_SERVED_NAME in names
        return ", ".join(names)


def _response(name: str) -> dict[str, Any]:
    messages: Any = facts(name).messages
    return {"model": DEMO_SERVED_NAME, "input": messages, "temperature": 0, "max_output_tokens": 30}


def _checked(arguments: str) -> str:
    assert 1 <= json.loads(arguments)["days"] <= 9, arguments
    return arguments


def curl(url: str) -> str:
    """Whole and streamed; the status and the events as received."""
    body = {"model": DEMO_SERVED_NAME, "prompt": facts("curl").text, "temperature": 0, "max_tokens": 8}
    command = ["curl", "-sS", "-N", "-H", "Content-Type: application/json", f"{url}/v1/completions", "-d"]
    reply = subprocess.run([*command, json.dumps(body)], capture_output=True, text=True, check=True, timeout=60)
    shown = right("curl", json.loads(reply.stdout)["choices"][0]["text"])
    streamed = json.dumps(body | {"stream": True})
    reply = subprocess.run([*command, streamed], capture_output=True, text=True, check=True, timeout=60)
    assert reply.stdout.endswith("data: [DONE]\n\n")
    return f"{shown}; streamed in {reply.stdout.count('data: ') - 1} events"


def bench(url: str, backend: str, endpoint: str) -> str:
    """Run `vllm bench serve` by its module: the CPU build has no working command."""
    imports = (
        "from vllm.benchmarks import serve; from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser"
    )
    run = "p = Parser(); serve.add_cli_args(p); serve.main(p.parse_args())"
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            *("--backend", backend, "--base-url", url, "--endpoint", endpoint, "--model", DEMO_SERVED_NAME),
            *("--tokenizer", str(DEMO_MODEL_DIR), "--dataset-name", "random", "--num-prompts", str(BENCH_PROMPTS)),
            *("--random-input-len", "200", "--random-output-len", "16", "--max-concurrency", "8", "--ignore-eos"),
            *("--save-result", "--result-dir", folder, "--result-filename", "result.json"),
        ]
        reply = subprocess.run(
            [sys.executable, "-c", f"{imports}; {run}", *arguments],
            capture_output=True,
            text=True,
            timeout=400,
            cwd=ROOT,
        )
        assert reply.returncode == 0, reply.stderr[-2000:]
        result = json.loads((Path(folder) / "result.json").read_text())
    assert result["completed"] == BENCH_PROMPTS, result
    assert result["total_output_tokens"] == 16 * BENCH_PROMPTS, result["total_output_tokens"]
    return f"{result['completed']} of {BENCH_PROMPTS} requests, {result['total_output_tokens']} tokens"


def langchain(url: str, python: str) -> str:
    """Run the LangChain client in its own process and environment, without Tandem."""
    prompt = facts("langchain")
    script = Path(__file__).with_name("langchain_client.py")
    reply = subprocess.run(
        [python, str(script), f"{url}/v1", DEMO_SERVED_NAME, prompt.text, json.dumps(short_json())],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert reply.returncode == 0, reply.stderr[-2000:]
    said = json.loads(reply.stdout)
    for answer in (said["whole"], said["streamed"], *said["batch"]):
        right("langchain", answer)
    _checked(json.dumps(said["tool"]))
    Forecast.model_validate(said["structured"])
    return json.dumps(said)


def anthropic(url: str, python: str) -> str:
    """Run the Anthropic client in its own process and environment, without Tandem."""
    prompt = facts("anthropic")
    script = Path(__file__).with_name("anthropic_client.py")
    command = [python, str(script), url, DEMO_SERVED_NAME, prompt.text]
    reply = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert reply.returncode == 0, reply.stderr[-2000:]
    said = json.loads(reply.stdout)
    for answer in (said["whole"], said["streamed"]):
        right("anthropic", answer)
    assert said["refusals"] == ["NotFoundError", "BadRequestError", "BadRequestError"], said
    assert said["routes"] == ["remote", "remote"], said
    return json.dumps(said)


def steps(url: str, python: str | None, anthropic_python: str | None) -> dict[str, Callable[[], str]]:
    sdk = Sdk(url)
    found: dict[str, Callable[[], str]] = {
        "openai: models": sdk.models,
        "openai: completions": sdk.completions,
        "openai: chat": sdk.chat,
        "openai: stream": sdk.stream,
        "openai: async": sdk.several_at_once,
        "openai: async streams": sdk.several_streams,
        "openai: tools": sdk.tools,
        "openai: tools, streamed": sdk.tools_streamed,
        "openai: parse": sdk.parsed,
        "openai: responses": sdk.response,
        "openai: responses, streamed": sdk.response_streamed,
        "openai: responses, parse": sdk.response_parsed,
        "openai: typed errors": sdk.refusals,
        "curl": lambda: curl(url),
        "vllm bench serve, completions": lambda: bench(url, "openai", "/v1/completions"),
        "vllm bench serve, chat": lambda: bench(url, "openai-chat", "/v1/chat/completions"),
    }
    if python:
        found["langchain"] = lambda: langchain(url, python)
    if anthropic_python:
        found["anthropic"] = lambda: anthropic(url, anthropic_python)
    return found


def play(url: str, python: str | None, anthropic_python: str | None) -> int:
    """Run every step; return the number of failures."""
    failed = 0
    for name, step in steps(url, python, anthropic_python).items():
        try:
            print(f"{name}: {step()}", flush=True)
        except Exception:
            failed += 1
            print(f"{name}: FAILED\n{traceback.format_exc()}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="address of a running service with a tool parser")
    parser.add_argument("--langchain", metavar="PYTHON", help="interpreter of an environment with langchain-openai")
    parser.add_argument("--anthropic", metavar="PYTHON", help="interpreter of an environment with anthropic")
    options = parser.parse_args()
    if options.url:
        return 1 if play(options.url, options.langchain, options.anthropic) else 0
    with tempfile.TemporaryDirectory() as folder:
        config = write_config("local.yaml", Path(folder), frontend=FRONTEND)
        service = ServiceProcess(config, Path(folder))
        service.start()
        try:
            return 1 if play(service.url, options.langchain, options.anthropic) else 0
        finally:
            service.stop()


if __name__ == "__main__":
    sys.exit(main())
