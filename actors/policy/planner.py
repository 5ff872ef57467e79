"""Route each request, and update cost estimates from its outcome.

Callers pass the time of a monotonic clock in seconds, and report events. Costs are learnt only from
stages that a request reached.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import count

from actors.policy.admission import KvCache
from actors.policy.choice import NO_CONSTRAINT, Asked, Candidate, Decision, Options, candidate, choose
from actors.policy.costs import HANDOVER, LOCAL, PREFILL, STEP, Components, Costs, prompt_quantities
from actors.policy.loads import EngineLoad, InflightRequest, Measured
from actors.policy.prefixes import EngineStore, Prefixes, Stores, held_pieces
from actors.policy.prompts import ID_BYTES, PIECE_BYTES, Passage, Prompt
from configs.settings.router import RoutingSettings

ASSUMED_TOKENS = 256.0
"""Weight of the assumed bytes per token, in tokens."""

REMEMBERED_TOKENS = 100_000.0
"""Number of prompt tokens after which earlier ones have the weight 1/e in the bytes per token."""

REMEMBERED_ANSWERS = 50.0

Defer = Callable[[Callable[[], None]], object]  # runs its argument, at once or later


class Planner:
    """State of one model's engines in a router: running work, costs and cached prefixes.

    Records running work at once. Updates costs through `later`, because an update takes longer and
    would delay an answer.
    """

    settings: RoutingSettings
    _costs: Costs

    def __init__(self, settings: RoutingSettings, later: Defer = lambda do: do()) -> None:
        self._later = later
        self._reset(settings)
        self._prefill: defaultdict[str, EngineLoad] = defaultdict(EngineLoad)
        self._decode: defaultdict[str, EngineLoad] = defaultdict(EngineLoad)
        self._prefixes = Prefixes(_pieces(settings, settings.prefix_tokens_per_engine))
        self._stores = Stores(settings)
        self._keys = count()
        self._decisions = 0

    def reconfigure(self, settings: RoutingSettings) -> None:
        """Apply new settings; discard all measurements if `assumed_*` or `fades_s` has changed."""
        if _assumptions(settings) == _assumptions(self.settings):
            self.settings = settings
        else:
            self._reset(settings)
        self._prefixes.most_pieces = _pieces(settings, settings.prefix_tokens_per_engine)
        self._stores.reconfigure(settings)

    def _reset(self, settings: RoutingSettings) -> None:
        self.settings = settings
        self._costs = Costs(settings)
        self._text_bytes = settings.assumed_bytes_per_token * ASSUMED_TOKENS
        self._text_tokens = ASSUMED_TOKENS
        self._answer_tokens = float(settings.assumed_answer_tokens)
        self._answers = 1.0

    def decide(
        self,
        prompt: Prompt,
        prefill: Mapping[str, int],
        decode: Mapping[str, int],
        now: float,
        asked: Asked = NO_CONSTRAINT,
        *,
        avoid: AbstractSet[str] = frozenset(),
        stores: Mapping[str, EngineStore] | None = None,
        kv_caches: Mapping[str, KvCache] = {},
    ) -> Decision:
        """Decide where to send `prompt`. Forget engines that have stopped and have no open call.

        ``prefill``, ``decode``  ongoing sequences of each role's engines that accept calls
        ``avoid``                engines of either role that must not be chosen
        ``stores``               KV store of each engine that has one; None: unchanged
        ``kv_caches``            KV cache of each decode engine that announces it
        """
        self._decisions += 1
        if stores is not None:
            self._stores.announce(stores)
        self._forget_others(prefill.keys(), decode.keys())
        candidates = self._candidates(
            _turned(decode, avoid, self._decisions),
            _turned(prefill, avoid, self._decisions) if asked.whole is None else {},
            prompt,
            now,
        )
        options = Options(self.prompt_tokens(prompt), self.answer_tokens(prompt), *candidates, self._costs, now)
        decision = choose(self.settings, options, asked)
        return decision._replace(kv_tokens=self._kv_tokens(prompt, decision, kv_caches))

    def _candidates(
        self, decode: Mapping[str, int], prefill: Mapping[str, int], prompt: Prompt, now: float
    ) -> tuple[list[Candidate], list[Candidate]]:
        engines = [*decode, *prefill]
        ongoing = [*decode.values(), *prefill.values()]
        loads = [self._decode.get(engine) for engine in decode] + [self._prefill.get(engine) for engine in prefill]
        held = self._cached(self._prefixes, engines, prompt)
        loaded = self._loaded(engines, held, prompt)
        found = [candidate(*state, now) for state in zip(engines, loads, ongoing, held, loaded, strict=True)]
        return found[: len(decode)], found[len(decode) :]

    def begin(self, prompt: Prompt, decode: str, prefill: str | None, now: float) -> InflightRequest:
        """Record the engines chosen for the legs; decode alone if `prefill` is None."""
        computes = prefill or decode
        decode_held, held = self._cached(self._prefixes, (decode, computes), prompt)
        load = self._decode[decode]
        inflight = InflightRequest(
            key=next(self._keys),
            prompt=prompt,
            decode=decode,
            prefill=prefill,
            prompt_tokens=self.prompt_tokens(prompt),
            held_tokens=held,
            loaded_tokens=self._loaded((computes,), (held,), prompt)[0],
            decode_held_tokens=decode_held,
            streams=len(load.streams),
        )
        load.calls.add(inflight.key)
        engines: tuple[str, str | None, str | None] = (LOCAL, decode, None)
        if prefill is not None:
            load, engines = self._prefill[prefill], (PREFILL, None, prefill)
            load.calls.add(inflight.key)
        parts = self._prompt_parts(inflight, now)
        load.prompts.add(inflight.key, parts, self._costs.expect_s(*engines, parts, now), now)
        for engine in {decode, computes}:
            new = [piece for passage in prompt.passages for piece in self._prefixes.add(engine, passage)]
            inflight.added[engine] = tuple(new)
        return inflight

    def admitted(self, inflight: InflightRequest) -> None:
        """Record that the request has its slot on decode: until now it used no KV there."""
        if not inflight.admitted and not inflight.over:
            inflight.admitted = True
            for passage in inflight.prompt.passages:
                self._decode[inflight.decode].pieces.update(passage.pieces)

    def prefilled(self, inflight: InflightRequest, now: float, prompt_tokens: int | None = None) -> None:
        """Record that prefill has computed the prompt; `prompt_tokens` if its answer has them."""
        if inflight.prefill is None or inflight.prefilled_at is not None or inflight.over:
            return
        inflight.prefilled_at = now
        load = self._prefill[inflight.prefill]
        load.silent_at = None
        if prompt_tokens is not None:
            self._count_tokens(inflight, prompt_tokens)
        if measured := load.prompts.finish(inflight.key, now, self._prompt_parts(inflight, now)):
            self._learn(PREFILL, None, inflight.prefill, measured, now)
        self._later(partial(self._stores.add, inflight.prefill, inflight.prompt))

    def handed_over(self, inflight: InflightRequest) -> None:
        """Stop counting the request on its prefill engine after decode's first token."""
        if inflight.prefill is not None:
            self._prefill[inflight.prefill].calls.discard(inflight.key)

    def opened(self, inflight: InflightRequest, now: float) -> None:
        if inflight.opened_at is not None or inflight.over:
            return
        load = self._decode[inflight.decode]
        if inflight.prefill is None:
            if measured := load.prompts.finish(inflight.key, now):
                self._learn(LOCAL, inflight.decode, None, measured, now)
            load.computed_tokens += inflight.new_tokens
        elif inflight.prefilled_at is not None:
            parts = self._costs.parts(HANDOVER, (1.0, inflight.moved_tokens, inflight.streams), now)
            self._learn(HANDOVER, inflight.decode, inflight.prefill, (parts, now - inflight.prefilled_at), now)
        inflight.opened_at = now
        load.streams_begin(inflight.key, now)
        inflight.opened_stream_seconds = load.stream_seconds(now)
        inflight.opened_computed_tokens = load.computed_tokens

    def ended(
        self,
        inflight: InflightRequest,
        now: float,
        answer_tokens: int = 0,
        repeated_tokens: int = 0,
        broken: bool = False,
        interrupted: bool = False,
    ) -> None:
        """Record the end of the legs; later reports about the request are ignored.

        ``answer_tokens``    tokens in the decode engine's stream
        ``repeated_tokens``  those of them that another engine had sampled
        ``interrupted``      whether another engine continues the answer
        ``broken``           whether decode may have no KV of the prompt, unless it began a stream
        """
        if inflight.over:
            return
        if inflight.prefill is not None and inflight.prefilled_at is None:
            self._prefixes.drop(inflight.prefill, inflight.added[inflight.prefill])
        if broken and inflight.opened_at is None:
            self._prefixes.drop(inflight.decode, inflight.added[inflight.decode])
        else:
            self._later(partial(self._stores.add, inflight.decode, inflight.prompt))
        load = self._decode[inflight.decode]
        made = answer_tokens - repeated_tokens
        if inflight.opened_at is not None and made > 1 and now > inflight.opened_at:
            self._observe_steps(inflight, load, made, now)
        if answer_tokens and not interrupted:
            kept = self._answers * (1 - 1 / REMEMBERED_ANSWERS)
            self._answer_tokens = (self._answer_tokens * kept + answer_tokens) / (kept + 1)
            self._answers = kept + 1
            if len(inflight.prompt.passages) == 1:
                passage = inflight.prompt.passages[0]
                self._prefixes.add_answer(inflight.decode, passage, answer_tokens)
                self._later(partial(self._stores.add_answer, inflight.decode, passage, answer_tokens))
        load.prompts.drop(inflight.key, now)
        load.streams_end(inflight.key, now)
        load.calls.discard(inflight.key)
        if inflight.admitted:
            load.forget_pieces(inflight.prompt)
        if inflight.prefill is not None:
            self._prefill[inflight.prefill].prompts.drop(inflight.key, now)
            self._prefill[inflight.prefill].calls.discard(inflight.key)
        inflight.over = True

    def failed(self, engine: str, now: float, silent: bool = False) -> None:
        """Record that `engine` has failed a call, was too late or, if `silent`, sent nothing.

        Refused, rejected and cancelled calls are no failures.
        """
        for loads in (self._prefill, self._decode):
            if engine in loads:
                loads[engine].failed_at = now
                if silent:
                    loads[engine].silent_at = now

    def computed(self, inflight: InflightRequest) -> None:
        """Record that the request's decode engine has sent tokens: it does not hang."""
        self._decode[inflight.decode].silent_at = None

    def prompt_tokens(self, prompt: Prompt) -> int:
        """Return the estimated number of prompt tokens, at least 1."""
        return max(sum(self._tokens(one, len(one.data)) for one in prompt.passages), 1)

    def _kv_tokens(self, prompt: Prompt, decision: Decision, kv_caches: Mapping[str, KvCache]) -> int:
        """Return the tokens of KV that `prompt` and its expected answer add to decode.

        A prefix that ongoing requests use is not added. Any other cached one is: vLLM counts its
        blocks as free until a request uses them.
        """
        decode = None if decision.chosen is None else decision.chosen.decode
        load = None if decode is None else self._decode.get(decode)
        pieces = () if load is None else load.pieces
        used = sum(self._tokens(one, PIECE_BYTES * held_pieces(pieces, one.pieces)) for one in prompt.passages)
        tokens, answer = self.prompt_tokens(prompt), self.answer_tokens(prompt)
        cache = kv_caches.get(decode) if decode is not None else next(iter(kv_caches.values()), None)
        if cache is None:
            return max(tokens - used, 1) + answer
        return cache.share(tokens + answer, min(used, tokens - 1), prompt.answers)

    def answer_tokens(self, prompt: Prompt) -> int:
        most = prompt.most_answer_tokens
        each = self._answer_tokens if most is None else min(self._answer_tokens, most)
        return max(round(each * prompt.answers), 1)

    def _observe_steps(self, inflight: InflightRequest, load: EngineLoad, answer_tokens: int, now: float) -> None:
        assert inflight.opened_at is not None
        seconds, steps = now - inflight.opened_at, answer_tokens - 1
        streams = (load.stream_seconds(now) - inflight.opened_stream_seconds) / seconds
        computed = (load.computed_tokens - inflight.opened_computed_tokens) / steps
        parts = self._costs.parts(STEP, (1.0, streams, computed), now)
        self._learn(STEP, inflight.decode, None, (parts, seconds / steps), now)

    def _prompt_parts(self, inflight: InflightRequest, now: float) -> Components:
        new, loaded = inflight.new_tokens, inflight.loaded_tokens
        prompt = prompt_quantities(new, inflight.held_tokens, loaded)
        if inflight.prefill is not None:
            return self._costs.parts(PREFILL, prompt, now)
        return self._costs.parts(LOCAL, (*prompt, new * inflight.streams), now)

    def _learn(self, cost: str, decode: str | None, prefill: str | None, measured: Measured, now: float) -> None:
        self._later(partial(self._costs.observe, cost, decode, prefill, *measured, now))

    def _loaded(self, engines: Sequence[str], held: Sequence[int], prompt: Prompt) -> list[int]:
        """Return the tokens in each engine's KV store beyond those `held` in its cache."""
        loaded = [0] * len(engines)
        if not self._stores.by_engine:
            return loaded
        # Skip engines whose cache has as many tokens as a store can have: lookups are the cost of
        # a decision in a large fleet.
        most = sum(self._most_cached(passage) for passage in prompt.passages)
        loading = []
        for index, engine in enumerate(engines):
            store = self._stores.by_engine.get(engine)
            if store is not None and _whole(most, store.chunk_tokens) > held[index]:
                loading.append((index, store))
        stores = list({store.id for _, store in loading})
        stored = dict(zip(stores, self._cached(self._stores.prefixes, stores, prompt), strict=True))
        for index, store in loading:
            loaded[index] = max(_whole(stored[store.id], store.chunk_tokens) - held[index], 0)
        return loaded

    def _cached(self, prefixes: Prefixes, caches: Sequence[str], prompt: Prompt) -> list[int]:
        tokens = [0] * len(caches)
        for passage in prompt.passages:
            last, own = None, 0
            for index, held in enumerate(prefixes.held(caches, passage)):
                if held is not last:  # the result repeats one object for most caches
                    last, own = held, self._tokens(passage, held.data_bytes) + held.answer_tokens
                    own = min(own, self._most_cached(passage))
                tokens[index] += own
        return tokens

    def _most_cached(self, passage: Passage) -> int:
        # Engines always compute the last token.
        return max(self._tokens(passage, len(passage.data)) - 1, 0)

    def _tokens(self, passage: Passage, data_bytes: int) -> int:
        return round(data_bytes / (ID_BYTES if passage.ids else self._text_bytes / self._text_tokens))

    def _count_tokens(self, inflight: InflightRequest, prompt_tokens: int) -> None:
        """Correct the estimates by the engine's token count; learn the bytes per token of text."""
        passages = inflight.prompt.passages
        if len(passages) == 1 and not passages[0].ids and passages[0].data and prompt_tokens > 0:
            kept = max(1 - prompt_tokens / REMEMBERED_TOKENS, 0.0)
            self._text_bytes = self._text_bytes * kept + len(passages[0].data)
            self._text_tokens = self._text_tokens * kept + prompt_tokens
        share = prompt_tokens / inflight.prompt_tokens
        inflight.prompt_tokens = prompt_tokens
        for name in ("held_tokens", "loaded_tokens", "decode_held_tokens"):
            setattr(inflight, name, round(getattr(inflight, name) * share))

    def _forget_others(self, prefill: AbstractSet[str], decode: AbstractSet[str]) -> None:
        if self._prefill.keys() <= prefill and self._decode.keys() <= decode:
            return
        for loads, running in ((self._prefill, prefill), (self._decode, decode)):
            for engine in [one for one in loads if one not in running and not loads[one].calls]:
                del loads[engine]
        self._prefixes.keep_only({*self._prefill, *self._decode, *prefill, *decode})
        self._costs.keep_only({*self._prefill, *prefill}, {*self._decode, *decode})


def _turned(ongoing: Mapping[str, int], avoid: AbstractSet[str], turn: int) -> dict[str, int]:
    """Return the usable engines, rotated by `turn` to spread requests over equal ones."""
    names = sorted(ongoing.keys() - avoid)
    first = turn % len(names) if names else 0
    return {name: ongoing[name] for name in names[first:] + names[:first]}


def _whole(tokens: int, chunk_tokens: int) -> int:
    return tokens // chunk_tokens * chunk_tokens


def _pieces(settings: RoutingSettings, tokens: int) -> int:
    return int(tokens * settings.assumed_bytes_per_token / PIECE_BYTES)


def _assumptions(settings: RoutingSettings) -> dict[str, object]:
    return {name: value for name, value in settings if name.startswith("assumed_") or name == "fades_s"}
