"""Run load generators and evaluations against the whole service, and against one vLLM server.

    python -m tests.campaigns.clients.load_tools [--tools DIRECTORY] [--only EXPRESSION]
        [--prompts 1000]

(``make load-tools``.) `vllm bench serve` sends its prompts at an infinite rate, with the service's
default limits. DIRECTORY holds the commands `lm_eval`, `guidellm` and `aiperf`, which are not
dependencies of Tandem (``make load-tools`` installs them in build/). All run unchanged. A failure
that the vLLM server does not have fails the campaign, and so does another score of the evaluation.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from configs.settings.service import DEMO_MODEL_DIR, DEMO_SERVED_NAME
from testing.facts import make_prompt
from testing.ports import free_port
from testing.service_process import ROOT, ServiceProcess, write_config
from testing.vllm_server import start_module, stop, wait_until_up

ENGINE: dict[str, Any] = {"max_model_len": 2048, "block_size": 32}
BENCH_INPUT_TOKENS, BENCH_OUTPUT_TOKENS = 100, 8
QUESTIONS = 40
"""Number of documents of the evaluation."""
REQUESTS = 60
"""Number of requests of guidellm, and of aiperf."""

TOOL_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Result:
    """Counts of one tool on one side.

    ``failed``: requests without a complete response; ``score``: share of right answers of an
    evaluation, None for a load generator.
    """

    sent: int
    failed: int
    seconds: float
    score: float | None = None


@dataclass(frozen=True)
class Tool:
    """A tool's run: `play(url, folder)` returns its result."""

    name: str
    play: Callable[[str, Path], Result]


def run_tool(command: list[str], folder: Path, **environment: str) -> str:
    """Run a command in `folder` and return its output. Raises RuntimeError with the end of it."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "NO_COLOR": "1"}
    reply = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | offline | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TOOL_TIMEOUT_S,
        check=False,
    )
    if reply.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {reply.returncode}:\n{reply.stdout[-3000:]}")
    return reply.stdout


def bench_serve(url: str, folder: Path, prompts: int) -> Result:
    """Run `vllm bench serve` by its module: the CPU build has no working command."""
    imports = (
        "from vllm.benchmarks import serve; from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser"
    )
    run = "p = Parser(); serve.add_cli_args(p); serve.main(p.parse_args())"
    arguments = [
        *("--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions", "--model", DEMO_SERVED_NAME),
        *("--tokenizer", str(DEMO_MODEL_DIR), "--dataset-name", "random", "--num-prompts", str(prompts)),
        *("--random-input-len", str(BENCH_INPUT_TOKENS), "--random-output-len", str(BENCH_OUTPUT_TOKENS)),
        *("--request-rate", "inf", "--ignore-eos", "--save-result", "--result-dir", str(folder)),
        *("--result-filename", "bench.json"),
    ]
    run_tool([sys.executable, "-c", f"{imports}; {run}", *arguments], folder, PYTHONPATH=str(ROOT))
    result = json.loads((folder / "bench.json").read_text())
    expected = BENCH_OUTPUT_TOKENS * result["completed"]
    if result["total_output_tokens"] != expected:
        raise RuntimeError(f"{result['total_output_tokens']} output tokens instead of {expected}")
    return Result(prompts, prompts - result["completed"], result["duration"])


def lm_eval(url: str, folder: Path, command: str) -> Result:
    """Evaluate recall of facts: generated answers must equal the right ones."""
    dice = Random("load tools")
    documents = [make_prompt(dice, 10) for _ in range(QUESTIONS)]
    lines = [json.dumps({"question": each.text, "answer": each.answer}) for each in documents]
    (folder / "facts.jsonl").write_text("\n".join(lines) + "\n")
    task = {
        "task": "facts",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "facts.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "temperature": 0.0, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "filter_list": [
            {"name": "answer", "filter": [{"function": "regex", "regex_pattern": "(\\d+)"}, {"function": "take_first"}]}
        ],
    }
    (folder / "facts.yaml").write_text(json.dumps(task))
    model = [
        f"model={DEMO_SERVED_NAME},base_url={url}/v1/completions,num_concurrent=8,max_retries=1",
        f"tokenizer={DEMO_MODEL_DIR},tokenizer_backend=huggingface,max_length=2048,tokenized_requests=False",
    ]
    began = time.monotonic()
    run_tool(
        [
            *(command, "run", "--model", "local-completions", "--model_args", ",".join(model)),
            *("--tasks", "facts", "--include_path", str(folder), "--output_path", str(folder / "out")),
        ],
        folder,
    )
    took = time.monotonic() - began
    found = json.loads(next((folder / "out").rglob("results_*.json")).read_text())
    score = next(value for name, value in found["results"]["facts"].items() if name.startswith("exact_match,"))
    return Result(QUESTIONS, 0, took, round(float(score), 4))


def guidellm(url: str, folder: Path, command: str) -> Result:
    """Send REQUESTS synthetic prompts, eight at a time."""
    began = time.monotonic()
    run_tool(
        [
            *(command, "run", "--disable-progress", "--backend"),
            f"kind=openai_http,target={url},model={DEMO_SERVED_NAME}",
            *("--profile", "kind=concurrent,streams=8", "--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=hf_auto,model={DEMO_MODEL_DIR}"),
            *("--data", "kind=synthetic_text,prompt_tokens=100,output_tokens=8"),
            *("--output", f"kind=json,path={folder / 'guidellm.json'}"),
        ],
        folder,
    )
    took = time.monotonic() - began
    found = json.loads((folder / "guidellm.json").read_text())
    total = found["benchmarks"][0]["metrics"]["request_totals"]
    return Result(total["total"], total["total"] - total["successful"], took)


def put_into_hub_cache(name: str, folder: Path) -> None:
    """Copy the demo model's files, as the model `name`, into the hub cache that `run_tool` sets.

    Offline, aiperf reads tokenizers from this cache only, not from a local path.
    """
    cached = folder / "hub" / "hub" / f"models--{name.replace('/', '--')}"
    shutil.copytree(DEMO_MODEL_DIR, cached / "snapshots" / "demo")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("demo")


def aiperf(url: str, folder: Path, command: str) -> Result:
    """Stream REQUESTS synthetic chats, eight at a time."""
    put_into_hub_cache("tandem/demo", folder)
    began = time.monotonic()
    output = run_tool(
        [
            *(command, "profile", "--model", DEMO_SERVED_NAME, "--tokenizer", "tandem/demo", "--url", url),
            *("--endpoint-type", "chat", "--streaming", "--concurrency", "8", "--request-count", str(REQUESTS)),
            *("--isl", "100", "--osl", "8", "--ui-type", "none"),
            *("--artifact-dir", str(folder / "aiperf")),
        ],
        folder,
    )
    took = time.monotonic() - began
    found = json.loads(next((folder / "aiperf").rglob("profile_export_aiperf.json")).read_text())
    errors = sum(each["count"] for each in found.get("error_summary") or ())
    completed = int(found["request_count"]["avg"])
    if completed + errors != REQUESTS:
        raise RuntimeError(f"{completed} requests and {errors} errors of {REQUESTS}:\n{output[-2000:]}")
    return Result(REQUESTS, errors, took)


def tools(directory: Path | None, prompts: int) -> list[Tool]:
    """Return `vllm bench serve`, and with `directory` the tools whose commands it holds."""
    found = [Tool("vllm bench serve", lambda url, folder: bench_serve(url, folder, prompts))]
    if directory is not None:
        commands = {name: str(directory.absolute() / name) for name in ("lm_eval", "guidellm", "aiperf")}
        found += [
            Tool("lm_eval", lambda url, folder: lm_eval(url, folder, commands["lm_eval"])),
            Tool("guidellm", lambda url, folder: guidellm(url, folder, commands["guidellm"])),
            Tool("aiperf", lambda url, folder: aiperf(url, folder, commands["aiperf"])),
        ]
    return found


def play(side: str, url: str, chosen: list[Tool]) -> dict[str, Result | None]:
    """Run the tools; None is the result of one that does not run."""
    results: dict[str, Result | None] = {}
    for tool in chosen:
        with tempfile.TemporaryDirectory() as folder:
            try:
                results[tool.name] = tool.play(url, Path(folder))
            except Exception:
                results[tool.name] = None
                traceback.print_exc()
        result = results[tool.name]
        print(f"{tool.name}, {side}: {json.dumps(asdict(result)) if result else 'does not run'}", flush=True)
    return results


def service_results(chosen: list[Tool], folder: Path) -> dict[str, Result | None]:
    service = ServiceProcess(write_config("local.yaml", folder, engine=ENGINE), folder)
    service.start()
    try:
        return play("service", service.url, chosen)
    finally:
        service.stop()


def single_results(chosen: list[Tool], folder: Path) -> dict[str, Result | None]:
    port = free_port()
    options = [word for name, value in ENGINE.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    server = start_module(
        folder,
        "single",
        [
            *("vllm.entrypoints.openai.api_server", "--model", str(DEMO_MODEL_DIR)),
            *("--served-model-name", DEMO_SERVED_NAME, "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--enforce-eager", *options),
        ],
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_up(f"{url}/health", server, folder)
        return play("vLLM server", url, chosen)
    finally:
        stop([server])


def verdict(ours: Result | None, single: Result | None) -> str:
    """Return what the service does worse than the vLLM server; empty if nothing.

    A tool that does not run with the vLLM server either shows no fault of the service: empty.
    """
    if single is None:
        return ""
    if ours is None:
        return "does not run with the service"
    if ours.failed > single.failed:
        return f"{ours.failed} failed requests instead of {single.failed}"
    if ours.score != single.score:
        return f"score {ours.score} instead of {single.score}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tools", type=Path, metavar="DIRECTORY", help="folder with the commands lm_eval, guidellm and aiperf"
    )
    parser.add_argument("--only", default="", help="run the tools whose name this regular expression matches")
    parser.add_argument("--prompts", type=int, default=1000, help="number of prompts of vllm bench serve")
    options = parser.parse_args()
    chosen = [tool for tool in tools(options.tools, options.prompts) if re.search(options.only, tool.name)]
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        ours = service_results(chosen, Path(first))
        single = single_results(chosen, Path(second))
    worse = {tool.name: said for tool in chosen if (said := verdict(ours[tool.name], single[tool.name]))}
    for name, said in worse.items():
        print(f"{name}: {said}")
    print(f"{len(chosen)} tools, {len(worse)} with failures that one vLLM server does not have")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
