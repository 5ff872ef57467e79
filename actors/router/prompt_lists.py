"""Completions with a list of prompts, not streamed: one request per prompt, and one answer.

The format of the answer is that of `request_output_to_completion_response` in
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/entrypoints/openai/completion/serving.py
"""

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import msgspec

from actors.large_json import as_written, write
from actors.request import Headers, ResponseStart
from actors.router.answer import Answer, ClientWriter
from actors.router.client_request import ClientRequest, why_local
from actors.router.model_router import ModelRouter

REQUEST_ID = b"x-request-id"
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
OF_ONE_PROMPT = "metrics"
"""Field that vLLM sets only in answers to one prompt."""


def split(request: ClientRequest, most_bytes: float = math.inf) -> list[ClientRequest]:
    """Return one request per prompt, or [] if the request is not split.

    The id of each request is the id of the list's request plus the prompt's index: with one id, an
    engine would abort all prompts together. Each request has a copy of the other fields. A list
    whose copies have more than `most_bytes` is not split, and neither is a stream.
    """
    prompts: Any = request.body.get("prompt")
    if request.endpoint != "/v1/completions" or not _is_list_of_prompts(prompts):
        return []
    if request.body.get("stream") not in (None, False):
        return []
    if why_local(request.endpoint, {**request.body, "prompt": "any"}) is not None:
        return []
    fields = as_written(request.raw)
    written = fields["prompt"]
    encoded = isinstance(written, msgspec.Raw)
    each: list[Any] = msgspec.json.decode(written, type=list[msgspec.Raw]) if encoded else prompts
    prompt_bytes = memoryview(written).nbytes if encoded else len(write({"": prompts}))
    if (len(request.raw) - prompt_bytes) * len(prompts) > most_bytes:
        return []
    headers = tuple((name, value) for name, value in request.headers if name != REQUEST_ID)
    return [
        replace(
            request,
            headers=(*headers, (REQUEST_ID, f"{parent_id(request)}-{index}".encode())),
            raw=write({**fields, "prompt": msgspec.Raw(b"[" + bytes(each[index]) + b"]") if encoded else [prompt]}),
            body={**request.body, "prompt": [prompt]},
            part=index > 0,
        )
        for index, prompt in enumerate(prompts)
    ]


def parent_id(request: ClientRequest) -> str:
    """Return the id that vLLM would use for the answer: the header's, else the body's, else ""."""
    named = request.body.get("request_id")
    return request.request_id or (named if isinstance(named, str) else "")


def merged_body(bodies: Sequence[bytes], answer_id: str) -> bytes:
    """Return one response body with the choices of all `bodies`."""
    parts = [json.loads(body) for body in bodies]
    choices = [choice for part in parts for choice in part["choices"]]
    for index, choice in enumerate(choices):
        choice["index"] = index
    merged: dict[str, Any] = {**parts[0], "id": answer_id, "choices": choices}
    if OF_ONE_PROMPT in merged:
        merged[OF_ONE_PROMPT] = None
    totals = {name: sum(part["usage"][name] for part in parts) for name in COUNTS}
    merged["usage"] = {**parts[-1]["usage"], **totals}  # vLLM takes the details from the last prompt
    return json.dumps(merged, ensure_ascii=False, separators=(",", ":")).encode()


class RefusedPromptError(Exception):
    """The decode engine answered a prompt with an error status."""

    def __init__(self, index: int) -> None:
        super().__init__(f"prompt {index} was refused")
        self.index = index


class ListAnswer:
    """Answer to a list of prompts, with the interface of `Answer`. Await `open`, then `begin`.

    An error of one prompt is the error of the whole request, as in vLLM, and cancels the others.
    """

    start: ResponseStart

    def __init__(self, model: ModelRouter, requests: Sequence[ClientRequest], parent_id: str) -> None:
        """Serve as many of `requests` at a time as the decode engines have slots."""
        self._model = model
        self._requests = requests
        self._parent_id = parent_id
        self._at_once = asyncio.Semaphore(max(model.decode.slots, 1))
        self._answers: dict[int, tuple[Answer, bytes]] = {}
        self._body = b""
        self._lead: Answer
        """Refused answer, else that of the first prompt: the list reports its times and pair."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the lead answer, such as its times or its pair of replicas."""
        return getattr(self._lead, name)

    @property
    def route(self) -> str:
        """Route of the request: `local` if decode alone served all prompts."""
        return "remote" if self.local_reason is None else "local"

    @property
    def local_reason(self) -> str | None:
        """Routing reason of the first prompt; None if `route` is `remote`."""
        reasons = [answer.local_reason for _, (answer, _) in sorted(self._answers.items())]
        return None if None in reasons else reasons[0]

    @property
    def prompt_tokens(self) -> int | None:
        """Number of tokens of all prompts; None if a prompt's number is unknown."""
        known = [answer.prompt_tokens for answer, _ in self._answers.values()]
        return None if None in known else sum(count or 0 for count in known)

    async def open(self) -> None:
        """Serve all prompts. Raises the error of a prompt that gets no answer."""
        tasks = [asyncio.create_task(self._run(index)) for index in range(len(self._requests))]
        try:
            await asyncio.gather(*tasks)
        except RefusedPromptError as refused:
            self._lead, self._body = self._answers[refused.index]
        else:
            answers = [self._answers[index] for index in range(len(tasks))]
            self._lead = answers[0][0]
            self._body = merged_body([body for _, body in answers], f"cmpl-{self._parent_id}")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        self.start = ResponseStart(self._lead.start.status, self._headers())

    async def begin(self) -> bytes:
        """Return the complete body."""
        return self._body

    def close(self) -> None:
        """Do nothing: all answers are closed."""

    async def relay(self, writer: ClientWriter) -> bytes:
        """Return the rest of a stream: there is none."""
        return b""

    def _headers(self) -> Headers:
        """Return the headers of the lead answer with the list's request id and length."""
        own = {REQUEST_ID: self._parent_id.encode(), b"content-length": str(len(self._body)).encode()}
        return tuple((name, own.get(name, value)) for name, value in self._lead.start.headers)

    async def _run(self, index: int) -> None:
        async with self._at_once:
            answer = await Answer.open(self._model, self._requests[index])
            try:
                self._answers[index] = answer, await answer.begin()
            finally:
                answer.close()
            if answer.start.status >= HTTPStatus.BAD_REQUEST:
                raise RefusedPromptError(index)


AnyAnswer = Answer | ListAnswer


async def open_answer(model: ModelRouter, request: ClientRequest) -> AnyAnswer:
    """Serve `request`; return its answer, which has started. Always `close` it.

    Each prompt of a list is served as a request of its own if `split` allows it. Raises the errors
    of `Dispatcher.open`.
    """
    prompts = split(request, model.limits.max_body_bytes)
    if not prompts:
        return await Answer.open(model, request)
    several = ListAnswer(model, prompts, parent_id(request))
    await several.open()
    return several


def _is_list_of_prompts(prompts: Any) -> bool:
    if not isinstance(prompts, list) or len(prompts) < 2:
        return False
    return all(isinstance(one, str) for one in prompts) or all(_is_token_ids(one) for one in prompts)


def _is_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and all(type(token) is int for token in prompt)
