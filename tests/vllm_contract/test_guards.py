"""Check that the sources of private symbols that `connectors/vllm_hma/upstream` uses have not
changed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from connectors.vllm_hma import upstream
from testing.source_digests import changes

GUARDS: dict[str, dict[str, str]] = {
    "vllm_adapter_loads": {
        "vllm/lora/lora_model.py:LoRAModel.from_local_checkpoint": "8ee27a308624",
        "vllm/lora/utils.py:get_adapter_absolute_path": "37c3d85b46cb",
        "vllm/lora/worker_manager.py:LRUCacheWorkerLoRAManager.add_adapter": "1b0ef1ca9b6f",
        "vllm/lora/worker_manager.py:WorkerLoRAManager._load_adapter": "bde6c00c5af6",
        "vllm/v1/core/kv_cache_utils.py:_gen_lora_extra_hash_keys": "73b58685a635",
    },
    "cpu_build/vllm_cpu_attention": {
        "vllm/v1/attention/backends/cpu_attn.py:_get_attn_isa": "8f1cbc670bcd",
    },
    "vllm_coordinator": {
        "vllm/v1/engine/coordinator.py:DPCoordinatorProc.run_coordinator": "734c039f6d0b",
    },
    "vllm_early_end": {
        "vllm/v1/core/sched/utils.py:check_stop": "8e51f1dcb6ec",
        "vllm/v1/core/sched/async_scheduler.py:AsyncScheduler": "b40608f6e722",
    },
    "vllm_emitted_tokens": {
        "vllm/v1/request.py:Request.append_output_token_ids": "c221adabfba9",
        "vllm/v1/core/sched/scheduler.py:Scheduler.add_request": "753346a92049",
        "vllm/v1/structured_output/__init__.py:StructuredOutputManager.grammar_init": "2551addccca9",
        "vllm/v1/structured_output/request.py:StructuredOutputRequest": "88257b0ec204",
        "vllm/v1/worker/gpu_input_batch.py:CachedRequestState": "6b5a997bb000",
        "vllm/v1/worker/gpu_model_runner.py:GPUModelRunner._update_states": "23c0535218aa",
    },
    "vllm_failed_loads": {
        "vllm/v1/core/sched/scheduler.py:Scheduler.__init__": "5b2bca265b25",
    },
    "vllm_media_names": {
        "vllm/model_executor/models/qwen3_vl.py:Qwen3VLMultiModalProcessor._get_mm_hashes": "c7f3b00d3456",
        "vllm/multimodal/hasher.py:MultiModalHasher.hash_kwargs": "d4a8bfb2e512",
        "vllm/multimodal/processing/inputs.py:ProcessorInputs.get_mm_hashes": "a74506e655d0",
    },
    "vllm_request_prompt": {
        "vllm/v1/core/sched/output.py:NewRequestData": "f0fa549ca8c7",
        "vllm/v1/core/sched/scheduler.py:Scheduler._update_after_schedule": "51bdf1970b18",
        "vllm/v1/request.py:Request.__init__": "b7b816b65290",
    },
}
"""For each file of `connectors/vllm_hma/upstream`: `file:symbol` in an installed package, and
its digest.
"""


@pytest.mark.parametrize("part", sorted(GUARDS))
def test_upstream_code_is_what_the_connector_was_written_for(part: str) -> None:
    """After an upgrade: read the change, adapt the file or delete it, then update the digest
    here.
    """
    assert changes(GUARDS[part], f"connectors/vllm_hma/upstream/{part}.py") == []


def test_every_private_part_has_a_guard() -> None:
    folder = Path(upstream.__path__[0])
    files = {path for path in folder.rglob("*.py") if path.stem not in ("__init__", "parent_watchdog")}
    assert {path.relative_to(folder).with_suffix("").as_posix() for path in files} == set(GUARDS)
