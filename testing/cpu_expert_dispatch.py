"""What vLLM's CPU build lacks for experts on several data-parallel ranks, so that tests can run such a model.

``CpuCommunicator`` inherits ``all_gatherv`` and ``reduce_scatterv``, which raise NotImplementedError
(vllm/distributed/device_communicators/base_device_communicator.py). With expert parallelism the kernel also ignores
``expert_map`` and reads beyond the weights of its own experts (``CPUUnquantizedExperts.apply``).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

_APPLY = CPUUnquantizedExperts.apply


def _all_gatherv(
    self: CpuCommunicator, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> Any:
    """Concatenate the rows of all ranks, ``sizes`` of each."""
    if isinstance(input_, list):
        return [_all_gatherv(self, one, dim, sizes) for one in input_]
    assert dim == 0
    sizes = sizes or [len(input_)] * self.world_size
    # Gloo gathers tensors of equal size only.
    padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
    padded[: len(input_)] = input_
    gathered = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(gathered, padded, group=self.device_group)
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


def _reduce_scatterv(
    self: CpuCommunicator, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """Return this rank's rows of the sum of all ranks' tensors."""
    assert dim in (0, -input_.dim())
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    total = input_.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=self.device_group)
    start = sum(sizes[: self.rank_in_group])
    return total[start : start + sizes[self.rank_in_group]]


def _apply(self: CPUUnquantizedExperts, *, topk_weights: Any, topk_ids: Any, expert_map: Any, **others: Any) -> None:
    """Compute this rank's experts: translate their ids, and give those of other ranks no weight."""
    if expert_map is not None:
        local = expert_map[topk_ids.long()]
        topk_weights = topk_weights.masked_fill(local < 0, 0.0)
        topk_ids = local.clamp(min=0).to(topk_ids.dtype)
    _APPLY(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=None, **others)


def install() -> None:
    """Give vLLM these functions. Raises RuntimeError if it has collectives of its own."""
    for name, function in (("all_gatherv", _all_gatherv), ("reduce_scatterv", _reduce_scatterv)):
        if name in vars(CpuCommunicator) and vars(CpuCommunicator)[name] is not function:
            raise RuntimeError(f"vLLM's CpuCommunicator has {name} now: delete testing/cpu_expert_dispatch.py")
        setattr(CpuCommunicator, name, function)
    CPUUnquantizedExperts.apply = _apply
