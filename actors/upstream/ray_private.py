"""Ray's control store, log directory and replica results, for which Ray 2.60 has no public API.

Source: https://github.com/ray-project/ray/blob/ray-2.60.0/python/ray/experimental/internal_kv.py
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.experimental import internal_kv
from ray.serve.handle import DeploymentBroadcastResponse

NAMESPACE = b"tandem"
"""Namespace of Tandem's keys in the control store."""


def store_connected() -> bool:
    """Return whether this process is connected to a Ray cluster's control store."""
    return bool(internal_kv._internal_kv_initialized())  # noqa: SLF001


def store_put(key: bytes, value: bytes | str, overwrite: bool = True) -> None:
    """Store `value`; without `overwrite`, the first value of concurrent writers is kept."""
    internal_kv._internal_kv_put(key, value, overwrite=overwrite, namespace=NAMESPACE)  # noqa: SLF001


def store_get(key: bytes) -> bytes | None:
    """Return the value of `key`, or None."""
    value: bytes | None = internal_kv._internal_kv_get(key, namespace=NAMESPACE)  # noqa: SLF001
    return value


def store_exists(key: bytes) -> bool:
    """Return whether there is a value of `key`."""
    return bool(internal_kv._internal_kv_exists(key, namespace=NAMESPACE))  # noqa: SLF001


def store_keys(prefix: bytes) -> list[bytes]:
    """Return the keys that begin with `prefix`."""
    return list(internal_kv._internal_kv_list(prefix, namespace=NAMESPACE))  # noqa: SLF001


def store_delete(key: bytes, by_prefix: bool = False) -> None:
    """Delete `key`, or all keys that begin with it."""
    internal_kv._internal_kv_del(key, del_by_prefix=by_prefix, namespace=NAMESPACE)  # noqa: SLF001


def log_directory() -> Path:
    """Return Ray's log directory of this session on this node."""
    return Path(ray._private.worker._global_node.get_logs_dir_path())  # noqa: SLF001


async def replica_results(broadcast: DeploymentBroadcastResponse) -> Sequence[Any]:
    """Return one result per replica, each to be awaited separately.

    The public `results_async` gathers all results: one late replica would delay all of them.
    """
    results: Sequence[Any] = await broadcast._fetch_replica_results_async()  # noqa: SLF001
    return results
