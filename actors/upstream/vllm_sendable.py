"""What vLLM's application takes from a client and cannot hand to its engine's process.

JSON has integers of any size and halves of surrogate pairs; msgpack, in which vLLM's processes talk, has neither. vLLM
finds that out when the request is half registered, and answers 500.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

# What is neither a number nor a text, vLLM sends in ways of its own.
_ENCODER = msgspec.msgpack.Encoder(enc_hook=lambda _: None)


def check_sendable(prompt: Any, params: SamplingParams, options: Mapping[str, Any]) -> None:
    """Raise vLLM's error of a bad request where a number or a text in it cannot be sent. The prompt itself is token ids
    by now, and checked by vLLM."""
    salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    try:
        _ENCODER.encode((salt, params, options))
    except (OverflowError, UnicodeEncodeError) as error:
        raise VLLMValidationError(f"a value in the request is none that an engine can be given: {error}") from None
