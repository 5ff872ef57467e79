"""Requests with images through the whole service, beside one vLLM server: equal answers.

    python -m tests.campaigns.service.images

(a part of ``make images``). The images are ``data:`` URLs or base64, for OpenAI's chats and
responses and for Anthropic's messages, streamed or not, in bodies of up to 20 MB. The router sends
every request to both engines. The one server gets one request at a time.
"""

from __future__ import annotations

import asyncio
import base64
import io
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml
from PIL import Image

from testing.models import paddle_vl
from testing.ports import free_port
from testing.service_process import ServiceProcess, write_config
from testing.sse import events
from testing.vllm_server import start_module, stop, wait_until_up
from tests.campaigns.shapes.images import SIZES, picture

NAME = "images"
CHATS = 24
CONCURRENCY = 4
MAX_TOKENS = 12
ENGINE = {"max_model_len": 2048, "block_size": 32, "max_num_batched_tokens": 256, "max_num_seqs": 16}
"""Settings of all engines."""

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@dataclass(frozen=True)
class Case:
    """A request and what it is, for the report."""

    name: str
    path: str
    body: dict[str, Any]


def encoded(image: Image.Image) -> str:
    """Return an image as a PNG in base64."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def chat(text: str, *images: Image.Image, stream: bool = False) -> Case:
    """Return a chat with images before its text."""
    urls = [f"data:image/png;base64,{encoded(image)}" for image in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    body = {"messages": [message], "max_tokens": MAX_TOKENS, "stream": stream}
    return Case(f"chat, {len(images)} images{', streamed' if stream else ''}", CHAT, body)


def cases() -> list[Case]:
    """Return chats with up to three images, the other two APIs, and large bodies."""
    rng = random.Random(8)
    todo = []
    for number in range(CHATS):
        images = [picture(rng.randrange(8), rng.choice(SIZES)) for _ in range(number % 4)]
        todo.append(chat("mira=427 kelo=093 " * rng.randint(1, 20) + "kelo?", *images, stream=number % 3 == 1))
    todo += [chat("equal size", picture(seed, SIZES[0])) for seed in range(50, 54)]
    noise = np.random.default_rng(9).integers(0, 256, (2, 1500, 1500, 3), dtype=np.uint8)
    todo.append(chat("large", *map(Image.fromarray, noise)))
    data = encoded(picture(60, SIZES[1]))
    source = {"type": "base64", "media_type": "image/png", "data": data}
    message = {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": "what?"}]}
    todo.append(Case("message", MESSAGES, {"messages": [message], "max_tokens": MAX_TOKENS}))
    image = {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{data}"}
    given = [{"role": "user", "content": [image, {"type": "input_text", "text": "what?"}]}]
    todo.append(Case("response", RESPONSES, {"input": given, "max_output_tokens": MAX_TOKENS}))
    return todo


async def send(client: httpx.AsyncClient, case: Case) -> tuple[int, str, str]:
    """Return status, answer and route of a request."""
    reply = await client.post(case.path, json=case.body | {"model": NAME, "temperature": 0})
    route = reply.headers.get("x-tandem-route", "")
    if reply.status_code != 200:
        return reply.status_code, reply.text[:300], route
    if case.body.get("stream"):
        return 200, "".join(event["choices"][0]["delta"].get("content") or "" for event in events(reply.content)), route
    body = reply.json()
    if case.path == CHAT:
        return 200, body["choices"][0]["message"]["content"] + f" after {body['usage']['prompt_tokens']} tokens", route
    return 200, str(body["content"] if case.path == MESSAGES else body["output"][0]["content"]), route


async def answers(url: str, todo: list[Case], concurrency: int) -> list[tuple[int, str, str]]:
    """Send all requests, ``concurrency`` at a time."""
    slots = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def one(case: Case) -> tuple[int, str, str]:
            async with slots:
                return await send(client, case)

        return list(await asyncio.gather(*map(one, todo)))


def of_one_server(folder: Path, model: str, todo: list[Case]) -> list[tuple[int, str, str]]:
    """Return one vLLM server's answers."""
    port = free_port()
    options = [word for name, value in ENGINE.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    arguments = ["vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", NAME]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", *options]
    server = start_module(folder, "single", arguments)
    try:
        wait_until_up(f"http://127.0.0.1:{port}/health", server, folder)
        return asyncio.run(answers(f"http://127.0.0.1:{port}", todo, 1))
    finally:
        stop([server])


def of_the_service(folder: Path, model: str, todo: list[Case]) -> list[tuple[int, str, str]]:
    """Return the service's answers."""
    config = write_config("local.yaml", folder, engine=ENGINE)
    content = yaml.safe_load(config.read_text())
    content["applications"][0]["args"] |= {"model": model, "served_model_name": NAME}
    config.write_text(yaml.safe_dump(content))
    service = ServiceProcess(config, folder)
    try:
        service.start()
        return asyncio.run(answers(service.url, todo, CONCURRENCY))
    finally:
        service.stop()


def main() -> None:
    todo = cases()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = paddle_vl(folder / "model")
        wanted = of_one_server(folder, model, todo)
        got = of_the_service(folder, model, todo)
    wrong = [
        f"{case.name}: {mine[:2]} instead of {theirs[:2]}"
        for case, theirs, mine in zip(todo, wanted, got, strict=True)
        if theirs[:2] != mine[:2]
    ]
    served = sum(status == 200 for status, _, _ in wanted)
    remote = sum(route == "remote" for _, _, route in got)
    largest = max(len(str(case.body)) for case in todo)
    good = not wrong and served == remote == len(todo)
    print(
        f"service: {len(todo) - len(wrong)} of {len(todo)} answers equal to one vLLM server's, {served} of "
        f"status 200, {remote} by prefill and decode, largest body {largest / 1e6:.1f} MB: {'good' if good else 'BAD'}"
    )
    for line in wrong:
        print("   ", line)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
