"""The router: admits requests and passes each to the `ModelRouter` of its model."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

from actors.adapter_records import AdapterRecords
from actors.errors import NoModelNamedError, OverloadedError, UnknownModelError
from actors.request import Call, ResponseStart
from actors.router.adapters import Adapters
from actors.router.client_request import ClientRequest
from actors.router.drain import drain_engine
from actors.router.model_router import ModelEngines, ModelRouter, ask_decode
from actors.router.prompt_lists import AnyAnswer, open_answer
from actors.telemetry.router_metrics import KEPT, RecentRequest, RouterMetrics
from configs.settings.base import RoleName
from configs.settings.parsing import changed_limits
from configs.settings.router import MIN_ONGOING_SEQUENCES, RouterLimits

logger = logging.getLogger(__name__)

SEQUENCES_PER_SLOT = 4
"""Default number of sequences that a router admits for each slot of the decode engines.

It admits at least MIN_ONGOING_SEQUENCES.
"""


FIRST_PREFILL_S = 60.0
"""Longest wait of a new router for prefill engines, in seconds from its first decode engine.

The engines of a new service start together. Decode alone would compute all of its prompts. The wait
ends because a router may also start while prefill is away.
"""


class Router:
    """Router of requests to the engines of one model or of several."""

    def __init__(self, limits: RouterLimits, *engines: ModelEngines, records: AdapterRecords | None = None) -> None:
        """Create a router for the models in `engines`; if there are several, each needs a name.

        ``records``  adapters that clients have loaded; None if they may not load any
        """
        self.limits = self._built_limits = limits
        self.rejected_config: str | None = None
        """Error of the last `user_config`; None if it was applied or if there was none."""
        self.metrics = RouterMetrics()
        """Metrics of the router itself, and of requests that end before their model is known.

        Without the setting `models`: metrics of all requests.
        """
        self.recent: deque[RecentRequest] = deque(maxlen=KEPT)
        """Requests whose answers have started, oldest first."""
        self.models = [
            ModelRouter(
                one, lambda: self.limits, RouterMetrics(one.names[0]) if one.names else self.metrics, self.recent
            )
            for one in engines
        ]
        self._by_name = {name: model for model in self.models for name in model.names}
        self.adapters = Adapters(self.models, records)
        self._were_ready: set[ModelRouter] = set()
        self._ready_at: float | None = None
        self._was_complete = False
        self.ongoing = 0
        """Number of ongoing requests that the router has admitted."""
        self.ongoing_sequences = 0
        """Number of their sequences; a request counts as 1 until its body arrives."""
        self.metrics.ongoing.set_function(lambda: self.ongoing)

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Apply new deadlines, limits and routing settings; Serve's hook.

        Requests that are already dispatched keep their deadlines. Keys absent from `user_config`
        have the values of `args`. For an invalid `user_config`, logs an error and leaves the
        settings unchanged, because Serve stops a replica whose hook raises.
        """
        try:
            limits = changed_limits(self._built_limits, user_config)
            for model in self.models:
                model.planner.reconfigure(limits.routing)
        except Exception as error:
            self.rejected_config = str(error)
            self.metrics.user_config_rejected.set(1)
            logger.error("router user_config rejected; the previous settings stay in effect: %s", error)
            return
        self.limits, self.rejected_config = limits, None
        self.metrics.user_config_rejected.set(0)

    @property
    def max_sequences(self) -> int:
        """Number of ongoing sequences at which the router admits no further request."""
        if self.limits.max_ongoing_sequences is not None:
            return self.limits.max_ongoing_sequences
        return max(SEQUENCES_PER_SLOT * sum(model.decode.slots for model in self.models), MIN_ONGOING_SEQUENCES)

    @contextmanager
    def admitted(self) -> Iterator[Callable[[int], None]]:
        """Count an ongoing request until the block ends. Raises OverloadedError at `max_sequences`.

        Yields a function that sets the request's number of sequences after the body has arrived;
        until then it is 1. So the number of sequences may exceed the limit.
        """
        if self.ongoing_sequences >= self.max_sequences:
            raise OverloadedError(
                f"this router is serving {self.ongoing_sequences} sequences and has reached its limit; retry later"
            )
        counted = 0

        def count(sequences: int) -> None:
            nonlocal counted
            self.ongoing_sequences += sequences - counted
            counted = sequences

        self.ongoing += 1
        count(1)
        try:
            yield count
        finally:
            self.ongoing -= 1
            count(0)

    def max_requests_of_key(self, keys: int) -> int | None:
        """Return the limit of ongoing requests of each of `keys` API keys; None: no limit."""
        if self.limits.max_ongoing_requests_per_key is not None:
            return self.limits.max_ongoing_requests_per_key
        return None if keys == 1 else max(self.max_sequences // 2, 1)

    async def model_of(self, name: Any) -> ModelRouter:
        """Return the model that serves requests for `name`: its own name, an alias or an adapter.

        Without the setting `models`, the only model gets every request: its engines check the name.
        Otherwise raises NoModelNamedError for a missing or empty name, UnknownModelError for an
        unknown one, or UnavailableError if the engines of a model that may have the adapter do not
        answer. A name that is not a string goes to the first model.
        """
        if not self._by_name:
            return self.models[0]
        if not name:
            raise NoModelNamedError(f"the request names no model; set `model` to one of {', '.join(self._by_name)}")
        if not isinstance(name, str):
            return self.models[0]  # its engines refuse a name of another type
        found = self._by_name.get(name) or await self.adapters.model_of(name)
        if found is None:
            raise UnknownModelError(f"The model `{name}` does not exist. Valid aliases: {', '.join(self._by_name)}.")
        return found

    @asynccontextmanager
    async def answer(self, request: ClientRequest) -> AsyncGenerator[AnyAnswer, None]:
        """Serve `request` with its model. Raises as `model_of` and `open_answer` do."""
        model = await self.model_of(request.body.get("model"))
        answer = await open_answer(model, request)
        try:
            yield answer
        finally:
            answer.close()

    @property
    def slots_taken(self) -> dict[RoleName, int]:
        """Number of slots that this router holds on engines, by role."""
        return _sums([model.slots_taken for model in self.models])

    def leave(self) -> None:
        """Keep the engines running until this stopping router closes its connections."""
        for model in self.models:
            model.leave()

    async def close(self) -> None:
        """Close the connections to the engines."""
        await asyncio.gather(*(model.close() for model in self.models))

    def ask_decode(self, call: Call) -> AbstractAsyncContextManager[tuple[ResponseStart, AsyncIterator[bytes]]]:
        """Call `model_router.ask_decode` for the models with a decode replica, or for the first.

        Waiting for a model without engines would delay the calls to the others.
        """
        return ask_decode([model for model in self.models if model.ready] or self.models[:1], call)

    def replicas(self) -> dict[RoleName, int]:
        """Return the number of replicas of each role that accept calls, over all models.

        Reads Serve's replica list and calls no replica; Serve's controller checks their health.
        """
        return _sums([model.replicas() for model in self.models])

    @property
    def ready(self) -> bool:
        """True if a decode replica runs, and each model has had one since this router's start.

        Each access records the models that have one now. The second condition keeps traffic away
        from a cluster in which a model has not started yet. Later, a model without engines does not
        make the router unready for the other models.
        """
        running = {model for model in self.models if model.ready}
        self._were_ready |= running
        return bool(running) and len(self._were_ready) == len(self.models)

    @property
    def takes_traffic(self) -> bool:
        """True if load balancers may send requests to this router.

        It is `ready`, and a pair of engines of each model has accepted calls, or the router has
        waited FIRST_PREFILL_S for that.
        """
        if not self.ready:
            return False
        now = time.monotonic()
        self._ready_at = now if self._ready_at is None else self._ready_at
        self._was_complete |= self.degraded is None
        return self._was_complete or now - self._ready_at >= FIRST_PREFILL_S

    @property
    def degraded(self) -> str | None:
        """Reason why no pair of engines accepts calls, by model; None if one of each model does."""
        reasons = ((model, model.degraded) for model in self.models)
        named = [f"{model.names[0]}: {why}" if self._by_name else why for model, why in reasons if why is not None]
        return "; ".join(named) or None

    async def drain(self, engine: str, on: bool | None) -> dict[str, Any]:
        """Drain an engine, undo that or return its state, as `drain_engine` does."""
        return await drain_engine(self.models, engine, on, self.limits.metrics_timeout_s)

    async def engine_metrics(self) -> list[tuple[RoleName, str, str]]:
        """Return (role, replica id, exposition) of each replica that replies in time.

        The timeout is `metrics_timeout_s`.
        """
        return [(role, *reply) for role, reply in await self._ask_engines("metrics")]

    async def engine_status(self) -> list[dict[str, Any]]:
        """Return the status of each engine replica that replies in `metrics_timeout_s`."""
        return [status for _, status in await self._ask_engines("status")]

    async def _ask_engines(self, method: str) -> list[tuple[RoleName, Any]]:
        replies = await asyncio.gather(*(model.ask_engines(method) for model in self.models))
        return [reply for one in replies for reply in one]


def _sums(counts: list[dict[RoleName, int]]) -> dict[RoleName, int]:
    return {role: sum(one[role] for one in counts) for role in counts[0]}
