"""Refuse request values that vLLM's application accepts but cannot send to its engine core.

JSON has integers of any size and lone surrogates; msgpack, which vLLM's processes use, has neither.
vLLM detects such a value only after it has partly registered the request, and answers 500. Source:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/serial_utils.py
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import structs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

# vLLM has its own encodings for values other than numbers and strings.
_ENCODER = msgspec.msgpack.Encoder(enc_hook=lambda _: None)


def check_sendable(prompt: Any, params: SamplingParams, options: Mapping[str, Any]) -> None:
    """Raise vLLM's validation error for a number or string that msgpack cannot encode.

    Of the prompt, checks `cache_salt` only: vLLM has already tokenized the text.
    """
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    try:
        _ENCODER.encode((salt, params, options))
    except (OverflowError, UnicodeEncodeError):
        for name, value in {"cache_salt": salt, **structs.asdict(params), **options}.items():
            _check(name, value)


def _check(name: str, value: Any) -> None:
    try:
        _ENCODER.encode(value)
    except OverflowError:
        raise VLLMValidationError(f"`{name}` must fit in a 64-bit integer.", parameter=name) from None
    except UnicodeEncodeError:
        raise VLLMValidationError(f"`{name}` must not contain lone surrogates.", parameter=name) from None
