"""ASGI middleware that checks API keys and the request limit of each key.

As in vLLM, `/health`, `/ping`, `/load` and `/metrics` need no key, because probes and scrapers have
none. The HTML of the status page needs no key either: it contains no data, and requests the data
with a key that the user enters.
"""

import hashlib
import hmac
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.errors import OverloadedError
from actors.router.router import Router
from app.http.errors import error_response, refusal
from app.http.parsing import CROWDS, path_of
from app.http.record import RECORD

OPERATOR = "tandem.operator"
"""Key in the scope of a request with an API key: whether it is an operator's.

Only operators may learn of the requests of other keys.
"""

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/load", "/metrics"})

REFUSED = ("refused", "")
"""Labels `route` and `reason`, in the metrics, of a request that this middleware refuses."""


OPERATOR_NEEDED = "an operator's key is required: one of `auth.operator_keys` or `TANDEM_OPERATOR_KEYS`"


def is_open(scope: Scope) -> bool:
    return path_of(scope) in OPEN_PATHS


def digest(key: str) -> bytes:
    """Return the SHA-256 digest that the router stores and compares instead of the key.

    All digests have the same length, so that the time of a comparison does not reveal the length of
    a key.
    """
    return hashlib.sha256(key.encode()).digest()


def digests(keys: Iterable[SecretStr]) -> tuple[bytes, ...]:
    return tuple(sorted({digest(key.get_secret_value()) for key in keys}))


class PerKeyLimiter:
    """Limiter of the ongoing requests of each API key in this router. Stores only keys in use."""

    def __init__(self) -> None:
        self._taken: Counter[Hashable] = Counter()

    @contextmanager
    def taken(self, key: Hashable, most: int | None) -> Iterator[None]:
        if most is not None and self._taken[key] >= most:
            raise OverloadedError(
                f"{self._taken[key]} requests of this API key are ongoing; the key's limit is reached in this router; "
                "retry later"
            )
        self._taken[key] += 1
        try:
            yield
        finally:
            self._taken[key] -= 1
            if not self._taken[key]:
                del self._taken[key]

    def crowds(self, key: Hashable) -> bool:
        """Return whether `key` has more than an equal share of the ongoing requests."""
        return self._taken[key] * len(self._taken) > self._taken.total()


class Authenticated:
    """`app` for clients with one of the keys in `digests` or `operators`."""

    def __init__(self, app: ASGIApp, router: Router, digests: Sequence[bytes], operators: Sequence[bytes] = ()) -> None:
        self._app = app
        self._router = router
        self._digests = sorted({*digests, *operators})
        self._operators = frozenset(operators)
        self._limiter = PerKeyLimiter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(scope):
            await self._app(scope, receive, send)
            return
        key = self._known_key(Headers(scope=scope).get("authorization", ""))
        if key is None:
            # One message for every cause.
            message = "a valid API key is required: send `Authorization: Bearer KEY`"
            response = refusal(HTTPStatus.UNAUTHORIZED, message, {"WWW-Authenticate": "Bearer"})
            await self._refuse(response)(scope, receive, send)
            return
        if (record := scope.get(RECORD)) is not None:
            record.key = key.hex()[:8]
        scope = {**scope, OPERATOR: key in self._operators}
        try:
            with self._limiter.taken(key, self._router.max_requests_of_key(len(self._digests))):
                await self._app({**scope, CROWDS: self._limiter.crowds(key)}, receive, send)
        except OverloadedError as error:
            response = error_response(error, self._router.limits.retry_after_s, scope["path"])
            await self._refuse(response)(scope, receive, send)

    def _known_key(self, authorization: str) -> bytes | None:
        """Return the digest of the key in an Authorization header; None if there is no valid key.

        Compares with all keys, so that the time does not depend on the position of a key.
        """
        scheme, _, given = authorization.partition(" ")
        offered = digest(given)
        found = [known for known in self._digests if hmac.compare_digest(known, offered)]
        return found[0] if found and scheme.lower() == "bearer" else None

    def _refuse(self, response: JSONResponse) -> JSONResponse:
        self._router.metrics.requests.labels(*REFUSED, response.status_code).inc()
        return response
