"""One vLLM engine inside an actor, behind vLLM's own OpenAI application.

Functions of this module import vLLM when they run, so that processes without an engine start fast.
"""

import argparse
import asyncio
import json
import logging
import math
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass, fields
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from actors.engine.adapters import EngineAdapters
from actors.engine.arguments import engine_arguments
from actors.engine.asgi_call import AsgiApp, Notices, call_asgi
from actors.engine.chat_template import REMEDY, renders_time, template_of
from actors.engine.heartbeat import HUNG_MARGIN_S, HeartbeatMonitor
from actors.engine.node_failures import new_engine_id
from actors.engine.startup.gpu_defaults import set_gpu_defaults
from actors.errors import CannotResumeError, EngineDownError, EngineStartError
from actors.large_json import decode_large_bodies_off_loop
from actors.replay_log import ServedCall
from actors.request import TRANSFER_FIELD, Call, Heartbeat, Moved, ProducerAddress, ResponseStart, StreamChunk
from actors.upstream.vllm_processes.fork_server import may_fork, use_fork_server
from configs.settings.base import HiddenText, RoleName
from configs.settings.service import ServiceSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    from actors.autoscaling.stat_logger import LoadLogger
    from actors.upstream.vllm_replaying_llm import ReplayingLLM

logger = logging.getLogger(__name__)

CONNECTOR = "TandemConnector"
CONNECTOR_MODULE = "connectors.vllm_hma.connector"
KV_ROLES: dict[RoleName, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}

FIRST_REQUEST_TIMEOUT_S = 120.0
"""Timeout in seconds of the first request to each rank of an engine; vLLM may compile kernels."""

SHUTDOWN_S = 15.0
"""Seconds for an engine's processes to end; vLLM's 5 s are too few on a busy machine."""

PROBE_TOKENS = [0, 1]
PRODUCE: Mapping[str, Any] = {"do_remote_decode": True}
DESCRIBE: Mapping[str, Any] = {"do_remote_decode": True, "describe": True}
"""Transfer parameters of `VllmEngine.probe`: PRODUCE on a prefill engine, DESCRIBE on any."""


@dataclass
class StopFlag:
    """Stand-in for vLLM's HTTP server: its error handlers set the flag when the engine has died."""

    should_exit: bool = False


class VllmEngine:
    """A running engine. `start` creates it, `close` ends its processes.

    Each data-parallel rank has its own engine core and connector, so a call specifies a rank.
    """

    adapters: EngineAdapters

    def __init__(
        self,
        llm: "ReplayingLLM",
        app: AsgiApp,
        stop_flag: StopFlag,
        stack: AsyncExitStack,
        cannot_resume: str | None,
        load: "LoadLogger | None",
        supervisor: str,
        ranks: int = 1,
        hung_s: float = math.inf,
    ) -> None:
        """Take over a started engine.

        ``stack``          its `aclose` ends the application and the engine's processes
        ``cannot_resume``  why the engine cannot repeat a replay log; None if it can
        ``supervisor``     token with which the connector accepts reports of lost engines
        ``hung_s``         seconds without an answer of an engine core after which it counts as hung
        """
        self._llm = llm
        self._load = load
        self._app = app
        self._cannot_resume = cannot_resume
        self.can_resume = cannot_resume is None
        """Whether the engine can continue the streams of other engines."""
        self._stop_flag = stop_flag
        self._stack = stack
        self.ranks = range(ranks)
        self._heartbeats = [HeartbeatMonitor(partial(llm.ping_rank, rank)) for rank in self.ranks]
        self._supervisor = supervisor
        self._hung_s = hung_s
        self.described: list[dict[str, Any]] = []

    @classmethod
    async def start(cls, settings: ServiceSettings, role: RoleName, node_ip: str) -> "VllmEngine":
        """Start the engine's processes and vLLM's OpenAI application: tens of seconds, or minutes.

        Raises EngineStartError if vLLM's CPU build cannot run the model, its cache or its adapters,
        vLLM's own error, and TimeoutError if a rank does not answer its first request.
        """
        if settings.role(role).num_gpus:
            set_gpu_defaults()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app

        from actors.autoscaling.stat_logger import LoadLogger
        from actors.upstream.vllm_processes.kill_process_tree import ignore_ended_processes
        from actors.upstream.vllm_processes.resource_tracker import detach_resource_tracker
        from actors.upstream.vllm_replaying_llm import ReplayingLLM, make_replayable, why_not_replayable
        from connectors.vllm_hma.model.weights import begin_digests

        ignore_ended_processes()
        detach_resource_tracker()
        supervisor = secrets.token_hex()
        arguments = engine_arguments(settings, role)
        if may_fork(settings, role, arguments):
            use_fork_server()
        engine_args = AsyncEngineArgs(
            **arguments,
            kv_transfer_config=kv_transfer_config(settings, role, node_ip, supervisor),
        )
        config = engine_config(engine_args)
        if not settings.role(role).num_gpus:
            from actors.upstream.cpu_build import vllm_cpu_kernels

            backend, cache_dtype = config.attention_config.backend, config.cache_config.cache_dtype
            problem = vllm_cpu_kernels.engine_problem(config.model_config, backend, cache_dtype, config.parallel_config)
            if problem is None and config.lora_config is not None:
                modules = settings.frontend.get("lora_modules") or ()
                problem = vllm_cpu_kernels.adapter_problem(config.lora_config.max_loras, len(modules))
            if problem is not None:
                raise EngineStartError(str(problem))
        cannot_resume = "only decode engines continue streams" if role == "prefill" else why_not_replayable(config)
        if cannot_resume is None:
            make_replayable(config)
        else:
            logger.info("this engine cannot continue streams of other engines: %s", cannot_resume)
        if config.load_config.load_format != "dummy":
            begin_digests(Path(config.model_config.model))
        stack = AsyncExitStack()
        load = LoadLogger(config) if settings.role(role).scaled else None
        llm = ReplayingLLM.start(config, engine_args, load)
        stack.callback(llm.shutdown, SHUTDOWN_S)
        try:
            namespace = _frontend_namespace(engine_args, settings.frontend)
            tasks = await llm.get_supported_tasks()
            level = logging.getLogger().level
            decode_large_bodies_off_loop()
            app = build_app(namespace, tasks, llm.model_config)
            # `build_app` imports a package that raises the root logger's level; restore it.
            logging.getLogger().setLevel(level)
            await init_app_state(llm, app.state, namespace, tasks)
            template = template_of(llm.renderer.tokenizer, namespace.chat_template)
            if role == "decode" and renders_time(template):
                logger.warning("the chat template renders the time, so chats transfer no KV; %s", REMEDY)
            stop_flag = StopFlag()
            app.state.server = stop_flag
            await stack.enter_async_context(app.router.lifespan_context(app))
        except BaseException:
            await stack.aclose()
            raise
        ranks = config.parallel_config.data_parallel_size
        on_cpu = config.lora_config is not None and not settings.role(role).num_gpus
        cpu_slots = config.lora_config.max_loras if on_cpu else None
        hung_s = settings.transfer.step_s + HUNG_MARGIN_S
        engine = cls(llm, app, stop_flag, stack, cannot_resume, load, supervisor, ranks, hung_s)
        try:
            engine.adapters = EngineAdapters(app.state.openai_serving_models, llm, cpu_slots)
            # Also runs the first request of each rank: the first step of an engine is slow.
            engine.described = await asyncio.gather(
                *(engine.probe(DESCRIBE, FIRST_REQUEST_TIMEOUT_S, rank) for rank in engine.ranks)
            )
        except BaseException:
            await engine.close()
            raise
        frontend = frontend_digest(settings.frontend, template, config)
        engine.described = [described | {"frontend": frontend} for described in engine.described]
        llm.identities = [described.get("identity", "") for described in engine.described]
        return engine

    async def serve(
        self, call: Call, rank: int = 0, notices: Notices | None = None, began_at: float | None = None
    ) -> AsyncGenerator[Any, None]:
        """Run `call` through vLLM's application on `rank`; yield items of the answer and notices.

        ``began_at``  monotonic time from which the timings count; None: from now

        Closing the generator aborts the request. Raises EngineDownError if the engine dies,
        CannotResumeError if it cannot continue `call.replay_log`. These errors bypass vLLM's
        application, which would convert them to an HTTP response. Exceptions of the application
        pass through, except a refusal of the request after the stream's start: its error becomes an
        event of the stream.
        """
        if call.replay_log and self._cannot_resume is not None:
            raise CannotResumeError(self._cannot_resume)
        notices = Notices() if notices is None else notices
        first_token: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        first_token.add_done_callback(lambda _: notices.put(Heartbeat(tokens=True)))
        served = ServedCall(
            replay=call.replay_log,
            data_parallel_rank=rank,
            first_token=first_token,
            began_at=time.monotonic() if began_at is None else began_at,
            transfer=call.transfer,
            movable=call.movable and self._cannot_resume is None,
            moved=lambda transfer: notices.put(Moved(dict(transfer))),
        )
        streams = False
        repeated: list[bytes | StreamChunk] = []
        try:
            with self.heartbeats(rank, notices.beat):
                # `ReplayingLLM.generate` reads the context.
                async with aclosing(call_asgi(self._app, call, context=served.context(), notices=notices)) as answer:
                    async for item in answer:
                        self._check_alive()
                        served.check()
                        match item:
                            case bytes():
                                # A chunk with tokens shows that this engine has the prompt's KV.
                                repeated.append(served.chunk(item))
                                if not served.repeats:
                                    for one in repeated:
                                        yield one
                                    repeated.clear()
                            case Moved():
                                for one in (*repeated, served.chunk(b"")):
                                    yield one
                                yield item
                            case ResponseStart(streams=False):
                                yield ResponseStart(item.status, item.headers, served.take_timings())
                            case _:
                                streams = streams or isinstance(item, ResponseStart)
                                yield item
                    for one in repeated:
                        yield one
        except Exception as error:
            # In a started stream, vLLM's responses API raises EngineDeadError to its caller
            # (vllm/entrypoints/openai/responses/api_router.py). The router can retry after
            # EngineDownError only.
            served.check()
            self._check_alive()
            refusal = _refusal(error) if streams else None
            if refusal is None:
                raise
            yield refusal
        finally:
            if served.moves_as is not None:
                # Frees the KV also if the stream ended by itself or its client disconnected. An
                # engine that continues the stream already has the KV.
                await self.discard(served.moves_as, rank)

    def heartbeats(self, rank: int, beat: Callable[[], None]) -> AbstractContextManager[None]:
        return self._heartbeats[rank].subscribed(beat)

    def producer(self, rank: int = 0) -> ProducerAddress:
        described = self.described[rank]
        try:
            return msgspec.convert(described, ProducerAddress)
        except msgspec.ValidationError as error:
            raise EngineStartError(
                f"{CONNECTOR} reported no valid side channel address of this engine, but {described!r}: {error!r}; "
                "install one version of Tandem on all nodes"
            ) from error

    async def probe(self, transfer: Mapping[str, Any], timeout_s: float, rank: int = 0) -> dict[str, Any]:
        """Run a request of a few tokens with these parameters; return the connector's reply.

        With the reply to PRODUCE, fetches the probe's KV, or computes it if the transfer fails.
        """
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, extra_args={TRANSFER_FIELD: dict(transfer)})
        found = None
        async with asyncio.timeout(timeout_s):
            async for output in self._llm.generate(
                {"prompt_token_ids": PROBE_TOKENS}, params, f"probe-{uuid.uuid4().hex}", data_parallel_rank=rank
            ):
                found = output.kv_transfer_params
        return found or {}

    async def discard(self, transfer_id: str, rank: int = 0) -> None:
        """Tell the connector of `rank` to free the KV of this transfer, which happens later."""
        try:
            await self._tell({"do_remote_decode": True, "transfer_id": transfer_id, "discard": True}, rank)
        except Exception as error:
            logger.warning("cannot discard transfer %s; its lease will expire: %r", transfer_id, error)

    def take_waiting(self, rank: int = 0) -> int:
        """Return how many requests vLLM had not begun at the last step; 0 until a further step."""
        return self._llm.arrivals.waiting.pop(rank, 0)

    def movable(self, rank: int = 0) -> dict[str, int]:
        """Return the ids of the streams that may move, and how many tokens may follow in each."""
        return self._llm.movable(rank)

    async def move(self, request_id: str, rank: int = 0) -> None:
        """End a stream soon with `Moved`, unless it ends by itself. Repeated calls do nothing."""
        served = self._llm.call_of(request_id)
        if served is None or served.moves_as is not None:
            return
        served.moves_as = uuid.uuid4().hex
        params = {"move": request_id, "transfer_id": served.moves_as, "supervisor": self._supervisor}
        await self._tell({"do_remote_decode": True, **params}, rank)

    async def lose(self, engines: str) -> None:
        """Report lost engines, by id prefix, to all ranks' connectors."""
        for rank in self.ranks:
            await self._tell({"engines_lost": engines, "supervisor": self._supervisor}, rank)

    async def _tell(self, params: dict[str, Any], rank: int) -> None:
        """Send `params` to the connector of `rank`, in a request that vLLM rejects at once."""
        name = f"tandem-{uuid.uuid4().hex}"
        await self._llm.notify_kv_transfer_request_rejected(name, params, data_parallel_rank=rank)

    def load(self) -> dict[str, float]:
        return self._load.read(self._llm) if self._load is not None else {}

    def describe(self) -> dict[str, Any]:
        config = self._llm.vllm_config
        engine, start = config.kv_transfer_config.engine_id, config.instance_id
        # vLLM (`run_engine_core` in vllm/v1/engine/core.py) and the connector compose the ids in
        # the same way.
        ids = [f"{engine}_dp{rank}.{start}" for rank in self.ranks] if len(self.ranks) > 1 else [f"{engine}.{start}"]
        return {
            "engine_ids": ids,
            "identities": [described.get("identity", "") for described in self.described],
            "model": config.model_config.served_model_name,
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "data_parallel_size": len(self.ranks),
        }

    @property
    def slots(self) -> int:
        config = self._llm.vllm_config
        # vLLM adds up the blocks of all ranks (`_apply_ready_response` in
        # vllm/v1/engine/core_client.py).
        kv_blocks = (config.cache_config.num_gpu_blocks or 0) // len(self.ranks)
        return slots_of(config.scheduler_config.max_num_seqs, kv_blocks)

    @property
    def kv_tokens(self) -> int:
        """Tokens in the KV cache of each data-parallel rank, as in vLLM's log; 0: unknown."""
        return self._llm.vllm_config.cache_config.kv_cache_size_tokens or 0

    @property
    def dead(self) -> bool:
        return self._stop_flag.should_exit or self._llm.errored

    async def check_health(self) -> None:
        self._check_alive()
        unanswered_s = max(heartbeats.unanswered_s for heartbeats in self._heartbeats)
        if unanswered_s > self._hung_s:
            raise EngineDownError(
                f"the vLLM engine of this actor has not answered for {unanswered_s:.0f} s, so it hangs; "
                "if a step may take longer, raise `transfer.step_s`"
            )

    def _check_alive(self) -> None:
        if self.dead:
            raise EngineDownError("the vLLM engine of this actor has died or is closed; see its log for the cause")

    async def close(self) -> None:
        self._stop_flag.should_exit = True
        for heartbeats in self._heartbeats:
            heartbeats.close()
        await self._stack.aclose()


def engine_config(engine_args: "AsyncEngineArgs") -> "VllmConfig":
    """Return vLLM's configuration, with the batch sizes of `vllm serve` as defaults."""
    from vllm.usage.usage_lib import UsageContext

    return engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER)


def slots_of(max_num_seqs: int, kv_blocks: int) -> int:
    """Return the number of sequences that one data-parallel rank accepts at once.

    `max_num_seqs` run, and as many wait in the engine, so that the next step can replace one. Each
    needs at least one of `kv_blocks` blocks; 0: unknown.
    """
    return max(min(2 * max_num_seqs, kv_blocks), 1) if kv_blocks else 2 * max_num_seqs


def _refusal(error: Exception) -> bytes | None:
    """Return an error event if vLLM refused the request after its stream started, else None.

    vLLM's Responses API raises an exception instead of sending one.
    """
    from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

    # After the response has started, Starlette wraps the exception in a RuntimeError.
    cause = error.__cause__ if isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception) else error
    found = create_error_response(cause).error
    if found.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return None
    said = {"type": "error", "code": found.type, "message": found.message, "param": found.param}
    return f"event: error\ndata: {json.dumps(said)}\n\n".encode()


def kv_transfer_config(settings: ServiceSettings, role: RoleName, node_ip: str, supervisor: str) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role=KV_ROLES[role],
        kv_load_failure_policy="recompute",
        engine_id=new_engine_id(),
        kv_connector_extra_config=settings.transfer.connector_config(node_ip)
        | settings.store.connector_config()
        | {"supervisor": HiddenText(supervisor)},
    )


def frontend_digest(frontend: Mapping[str, Any], template: str | Mapping[str, str], config: "VllmConfig") -> str:
    """Return a digest of all but the model that turns a request into prompt and parameters."""
    model, output = config.model_config, config.structured_outputs_config
    sampling = model.logits_processors, model.logprobs_mode, model.max_logprobs, model.get_diff_sampling_param()
    made_of = frontend, template, model.max_model_len, sampling, str(output)
    return xxhash.xxh3_64_hexdigest(json.dumps(made_of, sort_keys=True, default=str).encode())


def _frontend_namespace(engine_args: Any, frontend: dict[str, Any]) -> argparse.Namespace:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.openai.models.protocol import LoRAModulePath
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    for field in fields(engine_args):
        setattr(namespace, field.name, getattr(engine_args, field.name))
    for name, value in frontend.items():
        setattr(namespace, name, value)
    # vLLM's server imports tool parser plugins before it starts.
    if namespace.tool_parser_plugin:
        ToolParserManager.import_tool_parser(namespace.tool_parser_plugin)
    # `frontend` has these as JSON, which vLLM's command-line parser would have converted.
    namespace.lora_modules = [LoRAModulePath(**one) for one in namespace.lora_modules or ()] or None
    return namespace
