"""Read the prompts of a request as chained hashes of fixed-size pieces, to find cached prefixes.

The router does not tokenize: the planner estimates the bytes per token. A chat is the bytes of its
messages in order, so the next turn of a conversation extends it.
"""

import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

PIECE_BYTES = 256
"""Resolution of prefixes in bytes; about 64 tokens."""

ID_BYTES = 4

MEDIA_BYTES = 1024
"""Bytes that stand for an image, a recording or a file: the repeated hash of its data or URL."""

_MEDIA_KEYS = frozenset({"url", "data", "image_url", "file_data"})

_END_OF_FIELD = b"\x1e"
_END_OF_MESSAGE = b"\x1f"


@dataclass(frozen=True)
class Passage:
    """One prompt, as text or as token ids."""

    data: bytes = field(repr=False)
    ids: bool
    seed: int  # hash of the other fields that separate caches (`_seed`)
    pieces: tuple[int, ...] = field(repr=False)  # [i]: hash of the seed and the first i + 1 pieces

    @property
    def tail(self) -> bytes:
        """Bytes after the last whole piece."""
        return self.data[len(self.pieces) * PIECE_BYTES :]


@dataclass(frozen=True)
class Prompt:
    """All prompts of one request."""

    passages: tuple[Passage, ...] = ()  # empty if the body has no readable prompt
    answers: int = 1
    most_answer_tokens: int | None = None  # the client's limit of each answer


def read_prompt(body: Mapping[str, Any]) -> Prompt:
    seed = _seed(body)
    limits = (body.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"))
    most = next((limit for limit in limits if limit is not None), None)
    passages = tuple(_passages(body, seed))
    return Prompt(
        passages,
        max(len(passages), 1) * answers_each(body),
        most if type(most) is int and most >= 0 else None,
    )


def answers_each(body: Mapping[str, Any]) -> int:
    """Return the number of answers to each prompt, `n`, as vLLM converts it; 1 if vLLM refuses it.

    Pydantic also accepts numbers in strings, and floats without a fraction.

    >>> [answers_each({"n": n}) for n in (3, "3", 3.0, None, 0, 2.5, "many", 1e999)]
    [3, 3, 3, 1, 1, 1, 1, 1]
    """
    given: Any = body.get("n")
    try:
        number = float(given) if isinstance(given, float | str) else given
        return max(int(number), 1) if number == int(number) else 1
    except (TypeError, ValueError, OverflowError):
        return 1


def passage(data: bytes, ids: bool, seed: int) -> Passage:
    """Return a prompt with its pieces hashed."""
    pieces, before = [], seed
    for end in range(PIECE_BYTES, len(data) + 1, PIECE_BYTES):
        before = xxhash.xxh3_64_intdigest(data[end - PIECE_BYTES : end], before)
        pieces.append(before)
    return Passage(data, ids, seed, tuple(pieces))


def _passages(body: Mapping[str, Any], seed: int) -> Iterable[Passage]:
    messages = body.get("messages", _messages_of_response(body))
    if isinstance(messages, list):
        if messages and isinstance(messages[0], list):
            for one in messages:  # a batch of chats
                yield from _passages({"messages": one}, seed) if isinstance(one, list) else ()
        elif messages:
            system = body.get("system") or body.get("instructions")  # of Anthropic's API, and of responses
            first = [{"role": "system", "content": system}] if system else []
            yield passage(b"".join(_message(one) for one in [*first, *messages]), ids=False, seed=seed)
        return
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    for one in prompt if isinstance(prompt, list) and several else [prompt]:
        if isinstance(one, str):
            yield passage(_bytes(one), ids=False, seed=seed)
        elif isinstance(one, list) and all(type(token) is int and 0 <= token < 2**32 for token in one):
            yield passage(array("I", one).tobytes(), ids=True, seed=seed)


def _messages_of_response(body: Mapping[str, Any]) -> list[Any] | None:
    """Return the `input` of `/v1/responses` as messages; None if it is no text or messages."""
    given = body.get("input")
    if isinstance(given, str) and given:
        return [{"role": "user", "content": given}]
    return given if isinstance(given, list) and given and isinstance(given[0], dict) else None


def _message(message: Any) -> bytes:
    if not isinstance(message, Mapping):
        return _json(message) + _END_OF_MESSAGE
    content = message.get("content")
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    parts = [
        _bytes(str(message.get("role"))),
        _bytes(content) if isinstance(content, str) else _json(_hashed_media(content)),
        *([_json(rest)] if rest else []),
    ]
    return _END_OF_FIELD.join(parts) + _END_OF_MESSAGE


def _hashed_media(content: Any, key: str = "") -> Any:
    # The HTTP layer limits the depth of bodies.
    if isinstance(content, dict):
        return {name: _hashed_media(value, name) for name, value in content.items()}
    if isinstance(content, list):
        return [_hashed_media(value) for value in content]
    if isinstance(content, str) and key in _MEDIA_KEYS:
        hashed = xxhash.xxh3_128_hexdigest(_bytes(content))
        return hashed * (MEDIA_BYTES // len(hashed))
    return content


def _seed(body: Mapping[str, Any]) -> int:
    """Return a hash of the fields that separate caches; 0 if all are absent."""
    named = {key: body[key] for key in ("model", "cache_salt", "tools", "chat_template", "documents") if body.get(key)}
    return xxhash.xxh3_64_intdigest(_json(named)) if named else 0


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()
