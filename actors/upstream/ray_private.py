"""Access to private parts of Ray 2.60: control store, log directory, replica results, timeouts.

Source: https://github.com/ray-project/ray/blob/ray-2.60.0/python/ray/experimental/internal_kv.py
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.experimental import internal_kv
from ray.serve._private.replica import Replica
from ray.serve.handle import DeploymentBroadcastResponse

NAMESPACE = b"tandem"

RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Seconds for which a raylet tries to reconnect to the Ray head.

KubeRay sets it to 600 in worker pods of a cluster with fault tolerance
(ray-operator/controllers/ray/common/pod.go).
"""

DEFAULT_RECONNECT_S = 60.0
"""Ray's default of RECONNECT_VARIABLE, in src/ray/common/ray_config_def.h."""


def store_connected() -> bool:
    return bool(internal_kv._internal_kv_initialized())  # noqa: SLF001


def store_put(key: bytes, value: bytes | str, overwrite: bool = True) -> bool:
    """Store `value`; return whether `key` had a value, which stays unless `overwrite`."""
    return bool(internal_kv._internal_kv_put(key, value, overwrite=overwrite, namespace=NAMESPACE))  # noqa: SLF001


def store_get(key: bytes) -> bytes | None:
    value: bytes | None = internal_kv._internal_kv_get(key, namespace=NAMESPACE)  # noqa: SLF001
    return value


def store_exists(key: bytes) -> bool:
    return bool(internal_kv._internal_kv_exists(key, namespace=NAMESPACE))  # noqa: SLF001


def store_keys(prefix: bytes) -> list[bytes]:
    return list(internal_kv._internal_kv_list(prefix, namespace=NAMESPACE))  # noqa: SLF001


def store_delete(key: bytes, by_prefix: bool = False) -> None:
    internal_kv._internal_kv_del(key, del_by_prefix=by_prefix, namespace=NAMESPACE)  # noqa: SLF001


def log_directory() -> Path:
    return Path(ray._private.worker._global_node.get_logs_dir_path())  # noqa: SLF001


def cut_off_node_s() -> float:
    """Return the longest time in seconds for which actors run on a node cut off from the Ray head.

    The node's raylet finds the connection broken after the keepalive timeout, then tries to
    reconnect, and ends its actors when it gives up. Uses the configuration of this process.
    """
    keepalive_s = ray._config.grpc_client_keepalive_timeout_ms() / 1000  # noqa: SLF001
    return float(keepalive_s + float(os.environ.get(RECONNECT_VARIABLE) or DEFAULT_RECONNECT_S))


async def replica_results(broadcast: DeploymentBroadcastResponse) -> Sequence[Any]:
    """Return one result per replica, each to be awaited separately.

    The public `results_async` gathers all results: one late replica would delay all of them.
    """
    results: Sequence[Any] = await broadcast._fetch_replica_results_async()  # noqa: SLF001
    return results


def on_stop(do: Callable[[], None]) -> None:
    """Call `do` in the running event loop as soon as Serve tells this process's replica to stop.

    Serve's public hook, `__del__`, waits for the calls through Serve first, perhaps for minutes.
    """
    loop, stop = asyncio.get_running_loop(), Replica._perform_graceful_shutdown  # noqa: SLF001

    async def told(self: Replica) -> None:
        loop.call_soon_threadsafe(do)
        await stop(self)

    Replica._perform_graceful_shutdown = told  # noqa: SLF001
