"""Who may use the service, and how much of it at once: API keys before everything else that looks at a request.

As in vLLM, `/health` and `/metrics` are open: probes and scrapers carry no keys. So is the status page, which says
nothing by itself: what it shows it asks for with a key that its reader types.
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
from app.http.errors import error_body, error_response

OPEN_PATHS = frozenset({"/", "/health", "/metrics"})

REFUSED = ("refused", "")
"""`route` and `reason` of a refused request in the metrics."""


def digest(key: str) -> bytes:
    """What is kept and compared instead of a key; digests are of one length, so comparing them tells nothing."""
    return hashlib.sha256(key.encode()).digest()


def digests(keys: Iterable[SecretStr]) -> tuple[bytes, ...]:
    """Those of `keys`, each once."""
    return tuple(sorted({digest(key.get_secret_value()) for key in keys}))


class PerKeyLimiter:
    """Limits the number of requests that each key has in this router. A key without requests takes no memory."""

    def __init__(self) -> None:
        self._taken: Counter[Hashable] = Counter()

    def snapshot(self) -> dict[Hashable, int]:
        """Return how many each key has now; a copy."""
        return dict(self._taken)

    @contextmanager
    def taken(self, key: Hashable, most: int) -> Iterator[None]:
        """Hold one of `most` places; raises OverloadedError when `key` has that many already."""
        if self._taken[key] >= most:
            raise OverloadedError(f"{self._taken[key]} requests of this API key are being served, which is its limit")
        self._taken[key] += 1
        try:
            yield
        finally:
            self._taken[key] -= 1
            if not self._taken[key]:
                del self._taken[key]


class Authenticated:
    """ASGI middleware. Without keys, everybody may come in."""

    def __init__(self, app: ASGIApp, router: Router, digests: Sequence[bytes]) -> None:
        self._app = app
        self._router = router
        self._digests = digests
        self._limiter = PerKeyLimiter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or not self._digests or path in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        key = self._known_key(Headers(scope=scope).get("authorization", ""))
        if key is None:
            await self._refuse(unauthorized())(scope, receive, send)
            return
        limits = self._router.limits
        try:
            with self._limiter.taken(key, limits.max_ongoing_requests_per_key):
                await self._app(scope, receive, send)
        except OverloadedError as error:
            await self._refuse(error_response(error, limits.retry_after_s))(scope, receive, send)

    def requests_by_key(self) -> dict[Hashable, int]:
        """Return how many requests each key's digest has here now."""
        return self._limiter.snapshot()

    def _known_key(self, authorization: str) -> bytes | None:
        """The digest of the key in the header. All keys are compared, whichever fits."""
        scheme, _, given = authorization.partition(" ")
        offered = digest(given)
        found = [known for known in self._digests if hmac.compare_digest(known, offered)]
        return found[0] if found and scheme.lower() == "bearer" else None

    def _refuse(self, response: JSONResponse) -> JSONResponse:
        self._router.metrics.requests.labels(*REFUSED, response.status_code).inc()
        return response


def unauthorized() -> JSONResponse:
    """Says nothing of which part was wrong."""
    message = "a valid API key is needed: send `Authorization: Bearer KEY`"
    return JSONResponse(
        error_body(HTTPStatus.UNAUTHORIZED, message),
        status_code=HTTPStatus.UNAUTHORIZED,
        headers={"WWW-Authenticate": "Bearer"},
    )
