"""Clients and load generators that users already have, against the whole service.

The `openai` SDK, curl and `vllm bench serve` come with the environment. LangChain, Anthropic's SDK,
lm-eval, guidellm and aiperf are not dependencies of Tandem: ``langchain`` and ``anthropic`` are
Python interpreters that have them, ``tools`` is a folder with the commands. Every step asks for
facts that the answer must restate, or counts complete requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
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
BENCH_PROMPTS, REQUESTS, QUESTIONS = 200, 60, 40
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


def checked(arguments: str) -> str:
    assert 1 <= json.loads(arguments)["days"] <= 9, arguments
    return arguments


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
        return checked(call.function.arguments)

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


def script(url: str, folder: Path, python: str, name: str, *more: str) -> dict[str, Any]:
    """Run `NAME_client.py` in another environment, without Tandem; return what it prints."""
    words = [url, DEMO_SERVED_NAME, facts(name).text, *more]
    said: dict[str, Any] = json.loads(run([python, str(Path(__file__).with_name(f"{name}_client.py")), *words], folder))
    for answer in (said["whole"], said["streamed"], *said.get("batch", ())):
        right(name, answer)
    return said


def langchain(url: str, folder: Path, python: str) -> str:
    said = script(f"{url}/v1", folder, python, "langchain", json.dumps(short_json()))
    Forecast.model_validate(said["structured"])
    return checked(json.dumps(said["tool"]))


def anthropic(url: str, folder: Path, python: str) -> list[str]:
    said = script(url, folder, python, "anthropic")
    assert said["refusals"] == ["NotFoundError", "BadRequestError", "BadRequestError"], said
    assert said["routes"] == ["remote", "remote"], said
    return [str(kind) for kind in said["kinds"]]


# ---- load generators ----------------------------------------------------------------------------


def lm_eval(url: str, folder: Path, tool: str) -> str:
    """Evaluate recall of facts; the demo model recalls nearly all of them."""
    dice = Random("load tools")
    documents = [make_prompt(dice, 10) for _ in range(QUESTIONS)]
    lines = [json.dumps({"question": each.text, "answer": each.answer}) for each in documents]
    (folder / "facts.jsonl").write_text("\n".join(lines) + "\n")
    generation = {"until": ["\n"], "max_gen_toks": 8, "temperature": 0.0, "do_sample": False}
    digits = [{"function": "regex", "regex_pattern": "(\\d+)"}, {"function": "take_first"}]
    task = {
        "task": "facts",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "facts.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "generation_kwargs": generation,
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "filter_list": [{"name": "answer", "filter": digits}],
    }
    (folder / "facts.yaml").write_text(json.dumps(task))
    model = f"model={DEMO_SERVED_NAME},base_url={url}/v1/completions,num_concurrent=8,max_retries=1"
    model += f",tokenizer={DEMO_MODEL_DIR},tokenizer_backend=huggingface,max_length=2048,tokenized_requests=False"
    words = ("--tasks", "facts", "--include_path", str(folder), "--output_path", str(folder / "out"))
    run([tool, "run", "--model", "local-completions", "--model_args", model, *words], folder)
    found = json.loads(next((folder / "out").rglob("results_*.json")).read_text())["results"]["facts"]
    score = next(value for name, value in found.items() if name.startswith("exact_match,"))
    assert score > 0.9, found
    return f"score {score}"


def guidellm(url: str, folder: Path, tool: str) -> str:
    words = [
        *("run", "--disable-progress", "--backend", f"kind=openai_http,target={url},model={DEMO_SERVED_NAME}"),
        *("--profile", "kind=concurrent,streams=8", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={DEMO_MODEL_DIR}"),
        *("--data", "kind=synthetic_text,prompt_tokens=100,output_tokens=8"),
        *("--output", f"kind=json,path={folder / 'guidellm.json'}"),
    ]
    run([tool, *words], folder)
    total = json.loads((folder / "guidellm.json").read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert total["total"] == total["successful"], total
    return f"{total['total']} requests"


def aiperf(url: str, folder: Path, tool: str) -> str:
    # Offline, aiperf reads tokenizers from the hub cache only, not from a local path.
    cached = folder / "hub" / "hub" / "models--tandem--demo"
    shutil.copytree(DEMO_MODEL_DIR, cached / "snapshots" / "demo")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("demo")
    words = [
        *("profile", "--model", DEMO_SERVED_NAME, "--tokenizer", "tandem/demo", "--url", url),
        *("--endpoint-type", "chat", "--streaming", "--concurrency", "8", "--request-count", str(REQUESTS)),
        *("--isl", "100", "--osl", "8", "--ui-type", "none", "--artifact-dir", str(folder / "aiperf")),
    ]
    run([tool, *words], folder)
    found = json.loads(next((folder / "aiperf").rglob("profile_export_aiperf.json")).read_text())
    assert int(found["request_count"]["avg"]) == REQUESTS, found
    return f"{REQUESTS} requests"


def clients(
    report: Report,
    *,
    only: str = "",
    langchain_python: str = "build/clients/bin/python",
    anthropic_python: str = "build/clients/bin/python",
    tools: str = "build/load-tools",
) -> None:
    """All clients, or those whose name contains ``only``. Absent programs are named as skipped."""
    with service(report, frontend=FRONTEND) as running:
        url, folder = running.url, report.folder
        steps: list[tuple[str, Step]] = [*sdk_steps(url), ("curl", lambda: curl(url, folder))]
        for backend, endpoint in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
            words = (url, folder, backend, endpoint)
            steps.append((f"vllm bench serve {backend}", lambda words=words: bench(*words)))  # type: ignore[misc]
        others = (
            (langchain, langchain_python),
            (anthropic, anthropic_python),
            *((tool, f"{tools}/{tool.__name__}") for tool in (lm_eval, guidellm, aiperf)),
        )
        for step, path in others:
            program = ROOT / path
            if program.exists():
                steps.append((step.__name__, lambda step=step, program=program: step(url, folder, str(program))))  # type: ignore[misc]
            elif only in step.__name__:
                report.row(client=step.__name__, skipped=f"{path} does not exist")
        for name, play in steps:
            if only in name:
                with report.case(name):
                    report.row(client=name, answer=str(play())[:120])
