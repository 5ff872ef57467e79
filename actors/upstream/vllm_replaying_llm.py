"""Extend vLLM's AsyncLLM: record the tokens of streams, and repeat a recorded stream on resume.

A resumed call runs through vLLM's serving layer from its first token: detokenizer, stop strings,
parsers, logprobs and usage rebuild their state from the same outputs, in the same groups, as in the
interrupted call. Source:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/engine/async_llm.py
"""

import asyncio
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import xxhash
from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams, SamplingType
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.metrics.loggers import StatLoggerBase, StatLoggerFactory
from vllm.v1.metrics.stats import SchedulerStats

from actors.errors import EngineDownError
from actors.replay_log import SERVED_CALL, KvArrivals, ServedCall
from actors.request import TRANSFER_FIELD, TokenSource
from actors.upstream.vllm_forced_tokens import FORCED_TOKENS
from actors.upstream.vllm_output_processor import SharedRequestOutputs, one_token, samples_first_token
from actors.upstream.vllm_sendable import check_sendable
from connectors.protocol.params import EMITTED_TOKENS

ABORTED = str(FinishReason.ABORT)


def why_not_replayable(config: VllmConfig) -> str | None:
    if config.speculative_config is not None:
        return "with speculative decoding, vLLM allows no logits processor to repeat the tokens already sent"
    if config.model_config.return_sampling_mask:
        return "with return_sampling_mask, vLLM allows no logits processor to repeat the tokens already sent"
    return None


def make_replayable(config: VllmConfig) -> None:
    name = "ForcedTokensV2" if config.use_v2_model_runner else "ForcedTokens"
    own = [*(config.model_config.logits_processors or ()), f"actors.upstream.vllm_forced_tokens:{name}"]
    config.model_config.logits_processors = own


class ReplayCollector:
    """Passes a request's outputs to vLLM's collector, one token group of the replay log at a time.

    The collector merges unread outputs, so the groups would depend on timing. Each group waits
    until the reader calls `release` after the previous one. Without a replay log, only the first
    output is a group of its own: a prefill engine may have sent its token to the client.
    """

    def __init__(self, collector: RequestOutputCollector, served: ServedCall) -> None:
        self._collector = collector
        self._served = served
        self._groups = deque(served.replay)
        self._split_first = not served.replay
        self._waiting: deque[RequestOutput] = deque()
        self._held = False

    def put(self, output: Any) -> None:
        """Receive the output of one or several steps, or an error; called by vLLM."""
        if not isinstance(output, RequestOutput):
            self._collector.put(output)
            return
        if output.outputs[0].finish_reason == ABORTED:
            # The engine core is stopping: it repeats no more of the replay log.
            self._waiting.clear()
            self._collector.put(output)
            return
        self._waiting.append(output)
        self._advance()

    def release(self) -> None:
        """Pass on the next group, once the reader has processed the previous output."""
        self._held = False
        self._advance()

    def _advance(self) -> None:
        while self._waiting and not self._held:
            if not self._groups:
                self._collector.put(self._waiting.popleft())
                self._held, self._split_first = self._split_first, False
                continue
            group = self._groups[0]
            tokens: list[int] = []
            taken = 0
            while taken < len(self._waiting) and len(tokens) < len(group):
                tokens += self._waiting[taken].outputs[0].token_ids
                taken += 1
            ended = self._waiting[taken - 1].finished
            if len(tokens) < len(group) and not ended:
                return
            if tuple(tokens) != group or (ended and len(self._groups) > 1):
                self._waiting.clear()
                self._collector.put(
                    self._served.fail(
                        "the stream was interrupted, and the next engine did not repeat the tokens already sent; "
                        "send the request again"
                    )
                )
                return
            merged = self._waiting.popleft()
            for _ in range(taken - 1):
                merged.add(self._waiting.popleft(), aggregate=True)
            self._groups.popleft()
            self._held = True
            self._collector.put(merged)


class KvArrivalsLogger(StatLoggerBase):
    def __init__(self, arrivals: KvArrivals) -> None:
        self._arrivals = arrivals

    def record(self, scheduler_stats: SchedulerStats | None, *_: Any, engine_idx: int = 0, **__: Any) -> None:
        if scheduler_stats is not None:
            self._arrivals.observe(scheduler_stats.kv_connector_stats, engine_idx)
            self._arrivals.waiting[engine_idx] = scheduler_stats.num_waiting_reqs

    def log_engine_initialized(self) -> None:
        """Do nothing; vLLM's hook."""


def _always(logger: StatLoggerBase) -> StatLoggerFactory:
    return lambda *_: logger


class ReplayingLLM(AsyncLLM):
    """An AsyncLLM that records a stream's token groups and repeats its replay log."""

    arrivals: KvArrivals
    identities: Sequence[str] = ()

    @classmethod
    def start(
        cls, config: VllmConfig, engine_args: AsyncEngineArgs, load: StatLoggerBase | None = None
    ) -> "ReplayingLLM":
        """Start the engine. Unless `disable_log_stats` is set, record the arrival times of KV."""
        arrivals = KvArrivals()
        loggers = [] if load is None else [load]
        # With any logger, vLLM would collect statistics in spite of `disable_log_stats`.
        if not engine_args.disable_log_stats:
            loggers.append(KvArrivalsLogger(arrivals))
        llm = cls.from_vllm_config(
            config,
            enable_log_requests=engine_args.enable_log_requests,
            disable_log_stats=engine_args.disable_log_stats,
            stat_loggers=[_always(logger) for logger in loggers] or None,
        )
        # vLLM's constructor may already have called `_run_output_handler`.
        processor: Any = llm.output_processor
        processor.arrivals = llm.arrivals = arrivals
        return llm

    async def ping_rank(self, rank: int) -> None:
        """Await a rank's answer to a no-op request; vLLM's own methods call all ranks."""
        client: Any = self.engine_core
        await client._call_utility_async("is_sleeping", engine=client.core_engines[rank])  # noqa: SLF001

    def movable(self, rank: int) -> dict[str, int]:
        """Return the streams of a rank that may move, by request id: how many tokens may follow."""
        states: Any = self._outputs.request_states
        return {
            request_id: (state.max_tokens_param or 0) - served.recorded
            for request_id, state in states.items()
            if (served := self.call_of(request_id)) is not None
            and served.may_move
            and served.data_parallel_rank == rank
            # vLLM would keep the last tokens of an incomplete interval.
            and state.stream_interval <= 1
            and state.prompt_embeds is None
        }

    def call_of(self, request_id: str) -> ServedCall | None:
        """Return the call whose first engine request has this id; None if there is none."""
        return getattr(self._outputs.request_states.get(request_id), "served", None)

    def _run_output_handler(self) -> None:
        if self.output_handler is None:
            cache = self.vllm_config.cache_config
            SharedRequestOutputs.take_over(
                self.output_processor, cache.block_size if cache.enable_prefix_caching else None
            )
        super()._run_output_handler()

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        check_sendable(prompt, sampling_params, options)
        call = served = SERVED_CALL.get()
        if served is not None:
            # The router chose the rank; vLLM's responses API has no parameter for it.
            options["data_parallel_rank"] = served.data_parallel_rank
        one = sampling_params.output_kind is RequestOutputKind.DELTA and sampling_params.n == 1
        if served is not None and not (one and served.begin()):
            if served.replay:
                raise served.fail(
                    "the stream was interrupted, and only a stream of one generation with one choice can be continued; "
                    "send the request again"
                )
            served = None
        params = self._forced(sampling_params, served)
        samples = samples_first_token(params)
        if served is not None:
            served.source = partial(self._source, served.data_parallel_rank, options.get("lora_request"))
            served.split_first = True
            # vLLM would not look for a repetition at the token with which a moved request ends.
            served.movable = served.movable and self._prefills(params) and params.repetition_detection is None
            if samples:
                params, served.unfinished = one_token(params), params.max_tokens != 1
        try:
            async with aclosing(super().generate(prompt, params, request_id, **options)) as outputs:
                async for output in outputs:
                    if any(one.finish_reason == ABORTED for one in output.outputs):
                        # A stopping engine core sends it (v1/engine/core.py). A cancelled call has
                        # no reader at this point. vLLM's serving layer would answer 200.
                        lost = EngineDownError("the engine stopped and aborted the request")
                        raise lost if call is None else call.end(lost)
                    if call is not None and any(one.token_ids for one in output.outputs):
                        call.sampled()
                    if call is not None and (output.metrics is None or output.metrics.scheduled_ts):
                        call.computed(output.metrics, self.arrivals.take(call.request_id))
                    if served is not None:
                        served.record(output.outputs[0].token_ids)
                        if samples and output.prompt_token_ids is not None:
                            served.prompt_tokens, samples = len(output.prompt_token_ids), False
                    yield output
                    if served is not None:
                        served.taken()
                        moved = output.kv_transfer_params or {}
                        if moved.get("moved") and not output.finished:
                            served.moved(moved if "transfer_id" in moved else {})
                            await asyncio.Event().wait()  # until the call is cancelled
        finally:
            if call is not None:
                self.arrivals.take(call.request_id)
                if served is not None and served.unfinished:
                    self._outputs.unfinished.discard(call.request_id or "")

    @property
    def _outputs(self) -> SharedRequestOutputs:
        assert isinstance(self.output_processor, SharedRequestOutputs)
        return self.output_processor

    def _source(self, rank: int, lora: LoRARequest | None) -> TokenSource | None:
        """Return the identity of what computes a call's tokens; None if it is not known.

        An adapter may be known later than its first tokens: vLLM records a step's statistics after
        it has passed on the tokens.
        """
        engine = self.identities[rank] if rank < len(self.identities) else ""
        adapter = "" if lora is None else self.arrivals.adapter(rank, f"{lora.lora_int_id} {lora.lora_path}")
        return TokenSource(engine, adapter) if engine and (adapter or lora is None) else None

    def _forced(self, params: SamplingParams, served: ServedCall | None) -> SamplingParams:
        """Return `params` with the replay log's tokens and without a client's FORCED_TOKENS.

        Raises CannotResumeError if the repeated tokens would have other logprobs.
        """
        replayed = [token for group in served.replay for token in group] if served else []
        if (
            served
            and replayed
            and params.num_logprobs is not None
            and self.model_config.logprobs_mode.startswith("processed")
        ):
            raise served.fail(
                "the stream was interrupted, and a stream with logprobs cannot be continued on another engine, "
                f"because the engine's logprobs_mode is {self.model_config.logprobs_mode}; send the request again"
            )
        own = (FORCED_TOKENS, EMITTED_TOKENS)
        extra = {key: value for key, value in (params.extra_args or {}).items() if key not in own}
        if not replayed and extra == (params.extra_args or {}):
            return params
        if served and replayed:
            if self._prefills(params):
                # The sampler repeats the last token, which may end the answer, but not if it moved.
                last = len(replayed) - (0 if served.transfer else 1)
                served.emitted.extend(replayed[:last])
                served.prefilled = last
                extra |= {EMITTED_TOKENS: replayed[:last], FORCED_TOKENS: replayed[last:]}
                extra |= {TRANSFER_FIELD: dict(served.transfer)} if served.transfer else {}
            else:
                extra |= {FORCED_TOKENS: replayed}
        params = params.clone()
        params.extra_args = extra
        return params

    def _prefills(self, params: SamplingParams) -> bool:
        """Return whether computing the sent tokens with the prompt changes no later token."""
        seeded = params.sampling_type is SamplingType.RANDOM_SEED
        return (
            params.num_logprobs is None
            and params.prompt_logprobs is None
            # vLLM finds the end of a reasoning in the tokens of each step.
            and not (params.structured_outputs and self.vllm_config.structured_outputs_config.reasoning_parser)
            # In the V1 runner, generators draw and thinking budgets read tokens in each step.
            and (self.vllm_config.use_v2_model_runner or not (seeded or params.thinking_token_budget is not None))
        )

    async def _add_request(self, request: Any, prompt: Any, parent_req: Any, index: int, queue: Any) -> None:
        served = SERVED_CALL.get()
        if served is not None and served.split_first:
            served.split_first = False  # later requests of this call have another reader
            queue = ReplayCollector(queue, served)
            served.taken = queue.release
            served.prompt_digest = _prompt_digest(request)
            if served.unfinished:
                self._outputs.unfinished.add(request.request_id)
        try:
            await super()._add_request(request, prompt, parent_req, index, queue)
        except BaseException:
            # vLLM may raise QueueOverflowError (`max_num_queued_reqs`) before the output processor
            # registers the request; nothing else would remove its id.
            self._outputs.unfinished.discard(request.request_id)
            raise
        if served is not None and served.emitted:
            try:
                await self.engine_core.abort_requests_async(await self._outputs.restore(request.request_id))
            except BaseException:
                # `generate` has no queue yet, so it would not abort the request.
                await self.abort(request.request_id, internal=True)
                raise


def _prompt_digest(request: EngineCoreRequest) -> bytes | None:
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return None
    digest = xxhash.xxh3_128(array("q", request.prompt_token_ids).tobytes())
    for feature in request.mm_features or ():
        position = feature.mm_position
        digest.update(f"{feature.identifier} {position.offset} {position.length};".encode())
    return digest.digest()
