"""Checks of a machine: packages, libraries, GPUs, folders, ports, certificates, network devices."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

from actors.engine.startup.gpu_defaults import SAMPLER, why_not_compiled
from actors.process import open_files_of
from actors.tls import TlsFiles, router_files, rpc_files
from app.doctor import Finding
from app.http.http_server import proxies_refuse
from app.installation import release_of
from app.launch_environment import home_problem, ray_temporary_directory, shared_memory
from app.run import port_taken
from configs.settings.base import ROLES
from configs.settings.service import ServiceSettings
from connectors.errors import ConfigurationError
from connectors.open_files import REMEDY, too_few

PYTHON = ("3.11", "3.12", "3.13")
RELEASES = {"vLLM": "0.32.0", "Ray": "2.60.0", "NIXL": "1.5.1"}

RAY_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""Longest path of a socket below Ray's temporary directory; the last number is a process id."""

UNIX_SOCKET_BYTES = 107
"""Linux's limit on the path of a Unix socket, without its final zero byte."""

NUMA = "libnuma.so.1"

FOLDERS = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "VLLM_CACHE_ROOT")

EXPIRES_SOON = timedelta(days=3)

RDMA = Path("/sys/class/infiniband")
NETWORK = Path("/sys/class/net")
PROC = Path("/proc")
HOST_PIDS = 0xEFFFFFFC
"""Inode of the host's PID namespace (PROC_PID_INIT_INO in include/linux/proc_ns.h)."""

DMA_BUF_KERNEL = (5, 12)
"""First release of Linux whose RDMA devices can register dma-bufs."""

RDMA_TRANSPORTS = ("rc", "ud", "dc", "ib", "rc_x", "rc_v", "ud_x", "ud_v", "dc_x")


def check_python() -> Iterator[Finding]:
    found = platform.python_version()
    supported = found.rpartition(".")[0] in PYTHON
    remedy = "" if supported else f"use Python {', '.join(PYTHON)}: make install PYTHON=python{PYTHON[0]}"
    yield Finding("python", f"Python {found}", remedy)
    for name, wanted in RELEASES.items():
        installed = (release_of(name) or "").partition("+")[0]
        wrong = f"install {name} {wanted}: make install"
        yield Finding("python", f"{name} {installed or 'is not installed'}", "" if installed == wanted else wrong)


def check_libraries(settings: ServiceSettings) -> Iterator[Finding]:
    """Check that libnuma is installed. vLLM's CPU kernels load it; engines with GPUs do not."""
    if all(role.num_gpus for _, role in settings.roles()):
        return
    try:
        ctypes.CDLL(NUMA)
    except OSError as error:
        yield Finding("libraries", str(error), "install the library; on Debian and Ubuntu: apt install libnuma1")
        return
    yield Finding("libraries", f"{NUMA} is installed")


def check_gpus(settings: ServiceSettings, proc: Path = PROC, rdma: Path = RDMA) -> Iterator[Finding]:
    """Check the number of GPUs that each engine needs on one node, CUDA IPC between them, and the
    compiler of FlashInfer's sampler.

    The ranks of executor `ray` may be on several nodes, with one GPU each. Yields nothing if no
    engine needs a GPU.
    """
    wanted = max(1 if role.executor == "ray" else role.num_gpus for _, role in settings.roles())
    if not wanted:
        return
    import torch

    found = torch.cuda.device_count()
    remedy = "" if found >= wanted else "install vLLM's CUDA build and an NVIDIA driver, or lower num_gpus"
    yield Finding("gpus", f"{found} GPUs found, an engine needs {wanted:g} on one node", remedy)
    reason = why_not_compiled()
    for name, role in settings.roles():
        if role.num_gpus and reason:
            demanded = role.environment.get(SAMPLER, os.environ.get(SAMPLER)) == "1"
            remedy = f"install them, or remove {SAMPLER}" if demanded else ""
            yield Finding("gpus", f"{name}: vLLM samples without FlashInfer: {reason}", remedy)
    if not _names(rdma):
        yield from _cuda_ipc(settings, found, proc)


def _cuda_ipc(settings: ServiceSettings, gpus: int, proc: Path) -> Iterator[Finding]:
    """Yield conditions that prevent CUDA IPC between engines of this node; open no handle.

    Without it and RDMA, UCX emulates writes to GPU memory over TCP
    (https://github.com/vllm-project/vllm/pull/55906).
    """
    import torch

    apart = [f"{a}-{b}" for a, b in combinations(range(gpus), 2) if not torch.cuda.can_device_access_peer(a, b)]
    if apart:
        remedy = "give both roles GPUs with peer access (nvidia-smi topo -p2p w), or use RDMA"
        yield Finding("gpus", f"KV between GPUs {', '.join(apart)} moves over TCP: no peer access", remedy)
    if any(role.label_selector for _, role in settings.roles()) and (proc / "self/ns/pid").stat().st_ino != HOST_PIDS:
        remedy = "set hostPID: true for the pods of both roles and show them each other's GPUs, or use RDMA"
        yield Finding("gpus", "KV between pods moves over TCP: this pod has its own PID namespace", remedy)


def check_shared_memory() -> Iterator[Finding]:
    yield Finding("shared-memory", *shared_memory(engines=len(ROLES)))


def check_open_files(settings: ServiceSettings) -> Iterator[Finding]:
    """Check the hard limit of open files, to which a serving process raises its soft limit."""
    needed, limit = open_files_of(settings.router), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    what = f"a process may open {'any number of' if limit == resource.RLIM_INFINITY else f'{limit:,}'} files"
    yield Finding("open-files", f"{what}; a router may need {needed:,}", REMEDY if too_few(limit, needed) else "")


def check_home() -> Iterator[Finding]:
    """Check that the home directory, and the libraries' folders elsewhere, can be written."""
    problem = home_problem()
    remedy = "" if problem is None else "set HOME to a directory that this user can write"
    yield Finding("home", problem or f"{os.path.expanduser('~')} can be written", remedy)
    for variable in FOLDERS:
        folder = os.environ.get(variable, "")
        if folder and not writable(Path(folder)):
            yield Finding("home", f"{variable}: {folder} cannot be written", "unset it, or mount a writable volume")


def writable(folder: Path) -> bool:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def longest_temporary_directory() -> int:
    return UNIX_SOCKET_BYTES - len(RAY_SOCKET)


def check_temporary_directory() -> Iterator[Finding]:
    folder, limit = ray_temporary_directory(), longest_temporary_directory()
    if not writable(Path(folder, "ray")):
        yield Finding("temporary", f"{folder} cannot be written", "mount a writable volume there (docker run --tmpfs)")
    fits = len(os.fsencode(folder)) <= limit
    remedy = "" if fits else "set RAY_TMPDIR to a shorter path, such as /tmp"
    yield Finding(
        "temporary",
        f"{folder}: {len(os.fsencode(folder))} bytes long; Ray's socket paths leave room for {limit}",
        remedy,
    )


def check_ports(config: Mapping[str, Any], settings: ServiceSettings) -> Iterator[Finding]:
    """Check that configured ports, and at least two of each UCX_TCP_PORT_RANGE, are free."""
    if config.get("proxy_location") != "Disabled":
        http = config.get("http_options") or {}
        yield _port(http.get("host", "127.0.0.1"), http.get("port", 8000), "http_options.port")
    if settings.router.http_port is not None:
        yield _port(settings.router.http_host, settings.router.http_port, "router.http_port")
    engine_ports = {
        (host or "0.0.0.0", port + rank, setting)
        for name, role in settings.roles()
        for host, port, setting in (
            (settings.transfer.side_channel_host, settings.transfer.side_channel_port, "transfer.side_channel_port"),
            (role.rpc_host, role.rpc_port, f"{name}.rpc_port"),
        )
        if port
        for rank in range(role.data_parallel_size)
    }
    for host, port, setting in sorted(engine_ports):
        yield _port(host, port, setting)
    ranges = {ucx_environment(role.environment).get("UCX_TCP_PORT_RANGE", "") for _, role in settings.roles()}
    for text in sorted(ranges - {""}):
        yield _port_range(text)


def check_tls(config: Mapping[str, Any], settings: ServiceSettings) -> Iterator[Finding]:
    """Check the certificate files of the router's port and of the connections to engines.

    They must be readable, the key must match, and the certificate must not expire within
    EXPIRES_SOON. Also report what Serve's proxies, if any, refuse.
    """
    if settings.router.ssl_certfile is not None and config.get("proxy_location") != "Disabled":
        yield Finding("tls", proxies_refuse(settings.router))
    for files in (router_files(settings.router), rpc_files(settings)):
        if files is not None:
            yield _certificate(files)


def _certificate(files: TlsFiles) -> Finding:
    try:
        files.load()
        end = files.expires_at()
    except ConfigurationError as error:
        return Finding("tls", str(error), "renew or replace the files")
    soon = "renew it" if end - datetime.now(UTC) < EXPIRES_SOON else ""
    return Finding("tls", f"{files.certfile} and its key match; it expires at {end:%Y-%m-%d %H:%M} UTC", soon)


def _port(host: str, port: int, setting: str) -> Finding:
    if taken := port_taken(host, port):
        return Finding("ports", taken, f"stop the process that listens there, or change {setting}")
    return Finding("ports", f"{host}:{port} is free")


def _port_range(text: str) -> Finding:
    low, _, high = text.partition("-")
    if not (low.isdigit() and high.isdigit() and int(low) <= int(high) < 65536):
        return Finding("ports", f"UCX_TCP_PORT_RANGE {text!r} is not a range", "write it as 20000-20999")
    free = sum(_port("0.0.0.0", port, "").ok for port in range(int(low), int(high) + 1))
    few = "" if free >= 2 else "widen UCX_TCP_PORT_RANGE: each worker needs one port per network interface"
    return Finding("ports", f"UCX_TCP_PORT_RANGE {text}: {free} are free", few)


def check_ucx_devices(
    settings: ServiceSettings, rdma: Path = RDMA, network: Path = NETWORK, proc: Path = PROC
) -> Iterator[Finding]:
    """Check RDMA's access to GPUs, its limit of pinned memory, and UCX's devices and transports.

    Reads `transfer.devices`, UCX_NET_DEVICES and UCX_TLS.
    """
    devices, interfaces = _names(rdma), _names(network)
    yield Finding("ucx", f"RDMA: {', '.join(devices) or 'none'}; network: {', '.join(interfaces)}")
    if devices and (limit := resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]) != resource.RLIM_INFINITY:
        remedy = "remove the limit: ulimit -l unlimited; on Kubernetes, LimitMEMLOCK=infinity for the container runtime"
        yield Finding("ucx", f"only {limit / 2**20:,.0f} MiB of memory may be pinned (RLIMIT_MEMLOCK)", remedy)
    driver = proc / "driver/nvidia/version"
    if devices and driver.exists() and any(role.num_gpus for _, role in settings.roles()):
        how = gpudirect((proc / "modules").read_text(), driver.read_text(), platform.release())
        remedy = "modprobe nvidia_peermem (GPU operator: driver.rdma.enabled), or the driver's open kernel modules"
        what = f"RDMA reaches GPU memory: {how}" if how else "RDMA does not reach GPU memory: KV moves through the host"
        yield Finding("ucx", what, "" if how else remedy)
    for name, role in settings.roles():
        environment = ucx_environment(role.environment)
        named = settings.transfer.devices or environment.get("UCX_NET_DEVICES", "all").split(",")
        setting = "transfer.devices" if settings.transfer.devices else "UCX_NET_DEVICES"
        for device in filter(None, named):
            if device.partition(":")[0] not in ("all", *devices, *interfaces):
                present = ", ".join([*(f"{one}:1" for one in devices), *interfaces])
                remedy = f"set {setting} to devices of this machine ({present}), or remove it: UCX then chooses"
                yield Finding(
                    "ucx",
                    f"{name}: UCX is configured to use {device}, which this machine does not have",
                    remedy,
                )
        transports = environment.get("UCX_TLS", "").split(",")
        asked = [one for one in transports if one in RDMA_TRANSPORTS]
        if asked and "tcp" not in transports and not devices:
            remedy = (
                "give the machine an RDMA device (a pod requests the device plugin's resource), or add tcp to UCX_TLS"
            )
            yield Finding("ucx", f"{name}: UCX_TLS contains {asked[0]}, but there is no RDMA device", remedy)


def gpudirect(modules: str, driver: str, kernel: str) -> str | None:
    """Return how RDMA devices reach GPU memory, or None.

    ``modules``, ``driver``  contents of /proc/modules and /proc/driver/nvidia/version
    """
    for module in {line.partition(" ")[0] for line in modules.splitlines()} & {"nvidia_peermem", "nv_peer_mem"}:
        return f"{module} is loaded"
    # Only the open modules export GPU memory as dma-bufs.
    supported = tuple(map(int, re.findall(r"\d+", kernel)[:2])) >= DMA_BUF_KERNEL
    return f"dma-buf, Linux {kernel}" if supported and "Open Kernel Module" in driver else None


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def ucx_environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return the UCX variables of a role's processes: this process's, overridden by `own`."""
    return {name: value for name, value in (os.environ | dict(own)).items() if name.startswith("UCX_")}
