"""Choose routes with full knowledge: try every option on a copy of the simulation, take the best.

Each trial runs until the requests in the simulation, this one and the next arrivals have ended; a
rule of thumb over true costs sends the arrivals. Not the optimum (no decision plans for the whole
future), but more than a router can know.
"""

from benchmarks.routing.fleet import Fleet, Route
from benchmarks.routing.loads import Load, Request

AHEAD = 5
"""Number of next arrivals in a trial."""


class Oracle:
    """Minimizes the times to answers' ends, or with `ttft_only` those to their first tokens."""

    def __init__(self, load: Load, ttft_only: bool) -> None:
        self._requests = {request.number: request for request in load.requests}
        self._ttft_only = ttft_only
        self._turn = 0

    def route(self, request: Request, fleet: Fleet) -> Route:
        routes = _routes(fleet)
        self._turn += 1
        first = self._turn % len(routes)
        return min(routes[first:] + routes[:first], key=lambda route: self._trial(request, route, fleet))

    def saw(self, what: str, request: Request, fleet: Fleet) -> None:
        pass

    def _trial(self, request: Request, route: Route, fleet: Fleet) -> float:
        trial = fleet.fork()
        trial.send(request, route)
        coming = [number for _, number in trial.upcoming("arrival")[:AHEAD]]
        watched = {*trial.jobs, *coming}
        open_jobs, waiting, total_s = dict(trial.jobs), set(watched), 0.0
        while waiting:
            for what, number in trial.advance():
                if what == "arrival" and number in watched:
                    arrived = self._requests[number]
                    open_jobs[number] = trial.send(arrived, rule_of_thumb(arrived, trial))
                elif number in waiting and what == ("first" if self._ttft_only else "done"):
                    total_s += trial.now - open_jobs[number].arrived_at
                    waiting.discard(number)
                elif what == "done" and number in waiting:
                    waiting.discard(number)  # the request had its first token before the fork
        return total_s


def _routes(fleet: Fleet) -> list[Route]:
    decode, prefill = range(len(fleet.decode)), range(len(fleet.prefill))
    return [Route(d, None) for d in decode] + [Route(d, p) for d in decode for p in prefill]


def rule_of_thumb(request: Request, fleet: Fleet) -> Route:
    """Return the route whose queued prompt tokens and own ones take the least true time.

    On decode, its own tokens also delay each running stream.
    """

    def seconds(route: Route) -> float:
        engine = fleet.decode[route.decode] if route.prefill is None else fleet.prefill[route.prefill]
        queue = sum(job.prompt_tokens - max(job.computed, 0) for job in engine.waiting)
        own = request.prompt_tokens - engine.cache.held_tokens(request.blocks)
        hardware = fleet.hardware
        token_s = hardware.prefill_token_s * engine.factor
        streams = len(fleet.decode[route.decode].running)
        if route.prefill is None:
            return (queue + own * (1 + streams)) * token_s
        return (queue + own) * token_s + hardware.link_overhead_s + streams * hardware.decode_sequence_s

    return min(_routes(fleet), key=seconds)
