"""Add up the engines that a configuration starts, and compare the sum with this node."""

from __future__ import annotations

from collections.abc import Iterator

import psutil

from app.doctor import Finding
from app.start_screen import replicas_of
from configs.settings.base import ROLES
from configs.settings.service import ServiceSettings

WORKER_GIB = 1.5
"""Memory of a CPU worker beside its weights and KV cache; an estimate."""

GPU_MEMORY_UTILIZATION = 0.92
"""vLLM's default (``CacheConfig.gpu_memory_utilization``)."""


def check_engines(settings: ServiceSettings) -> Iterator[Finding]:
    models = settings.each_model().items()
    roles = {f"{role}{suffix}": one.role(role) for suffix, one in models for role in ROLES}
    engine = {f"{role}{suffix}": one.engine | one.role(role).engine for suffix, one in models for role in ROLES}
    counts = {name: replicas_of(role.replicas) for name, role in roles.items()}
    gpus = {name: role.num_gpus for name, role in roles.items() if role.num_gpus}
    if gpus:
        import torch

        total, found = sum(counts[name] * each for name, each in gpus.items()), torch.cuda.device_count()
        terms = " + ".join(f"{name} {counts[name]} x {each:g}" for name, each in gpus.items())
        rest = f", so other nodes must have {total - found:g}" if total > found else ""
        yield Finding("engines", f"{terms} = {total:g} GPUs; this node has {found}{rest}")
    workers = sum(counts[name] * role.tensor_parallel_size for name, role in roles.items() if not role.num_gpus)
    if workers:
        needed = workers * (settings.cpu.kv_cache_gib + WORKER_GIB)
        free = psutil.virtual_memory().available / 2**30
        rest = ", so other nodes must hold the rest" if needed > free else ""
        what = f"{workers} engine workers need {needed:.0f} GiB of memory and their weights; this node has {free:.0f}"
        yield Finding("engines", f"{what} free{rest}")
    for name, role in roles.items():
        share = float(engine[name].get("gpu_memory_utilization", GPU_MEMORY_UTILIZATION))
        ranks = role.tensor_parallel_size * role.data_parallel_size
        if role.num_gpus and ranks > max(role.num_gpus, 1):
            what = f"{name}: an engine of {ranks} ranks has {role.num_gpus:g} GPUs"
            yield Finding("engines", what, f"set num_gpus to {ranks}, or lower tensor_parallel_size")
        elif 0 < role.num_gpus < share:
            yield Finding(
                "engines",
                f"{name}: an engine has {role.num_gpus:g} of a GPU and takes {share:g} of its memory",
                f"set the engine argument gpu_memory_utilization to at most {role.num_gpus:g}",
            )
