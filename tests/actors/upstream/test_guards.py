"""Check that the sources of private symbols that `actors/upstream` uses have not changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors import upstream
from testing.source_digests import changes, digest

GUARDS: dict[str, dict[str, str]] = {
    "ray_private": {
        "ray/experimental/internal_kv.py:_internal_kv_initialized": "e6c78a6b7242",
        "ray/experimental/internal_kv.py:_internal_kv_put": "ecbbe9ab34ac",
        "ray/experimental/internal_kv.py:_internal_kv_get": "bce5df1df602",
        "ray/experimental/internal_kv.py:_internal_kv_exists": "848e9ba0b048",
        "ray/experimental/internal_kv.py:_internal_kv_list": "9060d128888c",
        "ray/experimental/internal_kv.py:_internal_kv_del": "c802230e9dd9",
        "ray/serve/handle.py:DeploymentBroadcastResponse": "6d25542e30cb",
        "ray/serve/_private/replica.py:Replica.perform_graceful_shutdown": "46f9c0307273",
        "ray/serve/_private/replica.py:Replica._perform_graceful_shutdown": "c11975d20869",
    },
    "ray_processes": {
        "ray/_private/services.py:start_ray_process": "37bd0cd9b2a2",
        "ray/_private/services.py:ConsolePopen": "df336ef65a75",
    },
    "uvicorn_protocol": {
        "uvicorn/protocols/http/httptools_impl.py:HttpToolsProtocol": "d36be75988c4",
        "uvicorn/protocols/http/httptools_impl.py:RequestResponseCycle": "fc368901cc16",
    },
    "uvicorn_server": {
        "uvicorn/server.py:Server.capture_signals": "262f2296df41",
        "uvicorn/server.py:Server.serve": "c143ac4318b2",
        "uvicorn/server.py:Server.shutdown": "1e34f6833403",
    },
    "vllm_processes/busy_wait": {
        "vllm/distributed/device_communicators/shm_broadcast.py:SpinCondition": "fc89baeffc89",
    },
    "vllm_output_processor": {
        "vllm/v1/core/sched/utils.py:check_stop": "8e51f1dcb6ec",
        "vllm/v1/engine/output_processor.py:OutputProcessor.__init__": "74c5bb1275a6",
        "vllm/v1/engine/output_processor.py:OutputProcessor.add_request": "9a8370d9c58b",
        "vllm/v1/engine/output_processor.py:OutputProcessor.process_outputs": "41bacc31a1d2",
        "vllm/v1/engine/output_processor.py:RequestState": "21971d6b5094",
        "vllm/v1/metrics/stats.py:PrefillStats": "c2628809498d",
    },
    "cpu_build/vllm_cpu_kernels": {
        "vllm/v1/attention/backends/cpu_attn.py:_get_attn_isa": "8f1cbc670bcd",
        "vllm/platforms/cpu.py:CpuPlatform.get_attn_backend_cls": "dc6552b78277",
        "vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py:cpu_gdn_attention_core": "552618baa8c9",
        "vllm/distributed/device_communicators/cpu_communicator.py:CpuCommunicator": "f10573320909",
        "vllm/model_executor/layers/fused_moe/experts/cpu_moe.py:CPUUnquantizedExperts.apply": "639eb5e36a3b",
    },
    "cpu_build/vllm_cpu_worker": {
        "vllm/v1/worker/cpu_worker.py:CPUWorker.init_device": "7746f1ce7ec6",
        "vllm/v1/worker/gpu_model_runner.py:GPUModelRunner._bookkeeping_sync": "0d82455ca5db",
        "vllm/v1/worker/gpu_model_runner.py:GPUModelRunner._sample": "c2c78eadf33f",
    },
    "vllm_forced_tokens": {
        "vllm/v1/sample/logits_processor/builtin.py:process_dict_updates": "484fb7bf1b85",
        "vllm/v1/worker/gpu/sample/logits_processor/interface.py:LogitsProcessor": "7a8aa30f9d9f",
    },
    "vllm_processes/fork_server": {
        "vllm/utils/system_utils.py:get_mp_context": "dc8be2b45150",
    },
    "vllm_processes/kill_process_tree": {
        "vllm/utils/system_utils.py:kill_process_tree": "3293208c3f39",
        "vllm/v1/utils.py:shutdown": "16215a35b124",
        "vllm/v1/engine/utils.py:CoreEngineProcManager.monitor_engine_liveness": "a5d0cc6e4dc0",
    },
    "vllm_processes/fork_server_preload": {
        "vllm/utils/system_utils.py:set_process_title": "b34ced06aaad",
    },
    "vllm_processes/resource_tracker": {
        "multiprocessing/spawn.py:spawn_main": "9195320fdcb4",
    },
    "vllm_replaying_llm": {
        "vllm/v1/engine/async_llm.py:AsyncLLM._add_request": "c65a88c234a4",
        "vllm/v1/engine/async_llm.py:AsyncLLM._run_output_handler": "286e27fe8c72",
        "vllm/v1/engine/async_llm.py:AsyncLLM.generate": "e6550c29fcad",
        "vllm/v1/engine/core_client.py:AsyncMPClient._call_utility_async": "a3cd76092d06",
        "vllm/v1/engine/output_processor.py:RequestOutputCollector": "becdae9f698c",
    },
    "vllm_sendable": {
        "vllm/v1/serial_utils.py:MsgpackEncoder": "57d928bf0f8d",
    },
}
"""For each file of `actors/upstream`: `file:symbol` in an installed package, and the digest of
its code.
"""


@pytest.mark.parametrize("workaround", sorted(GUARDS))
def test_upstream_code_is_what_the_workaround_was_written_for(workaround: str) -> None:
    """After an upgrade: read the change, adapt the workaround or delete it, then update the
    digest here.
    """
    assert changes(GUARDS[workaround], f"actors/upstream/{workaround}.py") == []


def test_every_workaround_has_a_guard() -> None:
    folder = Path(upstream.__path__[0])
    files = {path for path in folder.rglob("*.py") if path.stem != "__init__"}
    assert {path.relative_to(folder).with_suffix("").as_posix() for path in files} == set(GUARDS)


def test_a_changed_symbol_is_found() -> None:
    """A comment does not change the digest; another argument does."""
    before = "class A:\n    def f(self):\n        return 1\n"
    assert digest(before, "A.f") == digest(before.replace("return 1", "return 1  # one"), "A.f")
    assert digest(before, "A.f") != digest(before.replace("(self)", "(self, x)"), "A.f")
