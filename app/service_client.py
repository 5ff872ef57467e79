"""Requests of `tandem audit` and `tandem drain` to a running service, without Ray and vLLM.

If the service has API keys, `TANDEM_OPERATOR_KEYS` must begin with one of its operator keys.
"""

from __future__ import annotations

import json
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

from configs.settings.auth import environment_operator_keys

URL = "http://127.0.0.1:8000"


class ServiceError(Exception):
    """A command failed; the message says why."""


def ask(url: str, timeout_s: float, method: str = "GET", body: Any = None, **headers: str) -> tuple[Any, Any]:
    """Return the service's JSON answer and its headers; raise ServiceError with its message."""
    data = None if body is None else json.dumps(body).encode()
    for key in environment_operator_keys()[:1]:
        headers |= {"Authorization": f"Bearer {key.get_secret_value()}"}
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers}, method=method)
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.load(answer), answer.headers
    except HTTPError as error:
        text = error.read().decode(errors="replace")
        try:
            text = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            text = text[:200]
        raise ServiceError(f"{url}: HTTP {error.code}: {text}") from None
    except (HTTPException, OSError, ValueError) as error:
        raise ServiceError(f"{url}: {error}") from None
