"""Policies: the router's own planner, and others. Only the oracle reads the simulation's state."""

from actors.policy.loads import InflightRequest
from actors.policy.planner import Planner
from actors.policy.prefixes import EngineStore
from benchmarks.routing.fleet import Fleet, Route
from benchmarks.routing.loads import Request
from benchmarks.routing.machine import BLOCK_TOKENS
from configs.settings.router import RoutingSettings


class Ours:
    """The router's planner, with the events that a router reports."""

    def __init__(self, settings: RoutingSettings | None = None) -> None:
        self._planner = Planner(settings or RoutingSettings())
        self._inflight: dict[int, InflightRequest] = {}

    def route(self, request: Request, fleet: Fleet) -> Route:
        # An engine that has restarted is another one for the router.
        prefill = {f"p{n}.{engine.restarts}": 0 for n, engine in enumerate(fleet.prefill)}
        decode = {f"d{n}.{engine.restarts}": 0 for n, engine in enumerate(fleet.decode)}
        stores = {}
        for name in (*prefill, *decode) if fleet.stored_tokens else ():
            host = fleet.host(name.partition(".")[0])
            stores[name] = EngineStore(f"host {host}", fleet.stored_tokens, BLOCK_TOKENS)
        decision = self._planner.decide(request.seen, prefill, decode, fleet.now, stores=stores)
        chosen = next(iter(decision.prefill), None)
        self._inflight[request.number] = self._planner.begin(request.seen, decision.decode[0], chosen, fleet.now)
        return Route(_index(decision.decode[0]), None if chosen is None else _index(chosen))

    def saw(self, what: str, request: Request, fleet: Fleet) -> None:
        inflight = self._inflight[request.number]
        if what == "prefilled":
            self._planner.prefilled(inflight, fleet.now, request.prompt_tokens)
        elif what == "first":
            self._planner.opened(inflight, fleet.now)
        elif what == "done":
            self._planner.ended(self._inflight.pop(request.number), fleet.now, request.answer_tokens)


def _index(name: str) -> int:
    return int(name[1:].partition(".")[0])


class Threshold:
    """Remote from this number of uncached tokens on, which this policy knows exactly.

    Chooses the engines with the fewest open requests of this router.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._turn = 0
        self._sent: dict[int, Route] = {}

    def _least(self, engines: int, busy: list[int | None]) -> int:
        self._turn += 1
        return min(range(engines), key=lambda engine: (busy.count(engine), (engine + self._turn) % engines))

    def route(self, request: Request, fleet: Fleet) -> Route:
        decode = self._least(len(fleet.decode), [route.decode for route in self._sent.values()])
        held = fleet.decode[decode].cache.held_tokens(request.blocks)
        prefill = None
        if request.prompt_tokens - held >= self._tokens:
            prefill = self._least(len(fleet.prefill), [route.prefill for route in self._sent.values()])
        self._sent[request.number] = route = Route(decode, prefill)
        return route

    def saw(self, what: str, request: Request, fleet: Fleet) -> None:
        if what == "done":
            del self._sent[request.number]
        elif what == "kv":  # its prefill engine has completed it
            self._sent[request.number] = Route(self._sent[request.number].decode, None)


class RoundRobin:
    """Policy that always chooses a pair, each role in turn, as public proxies do."""

    def __init__(self) -> None:
        self._turn = 0

    def route(self, request: Request, fleet: Fleet) -> Route:
        self._turn += 1
        return Route(self._turn % len(fleet.decode), self._turn % len(fleet.prefill))

    def saw(self, what: str, request: Request, fleet: Fleet) -> None:
        pass
