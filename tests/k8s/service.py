"""Rules between a RayService's pods and the Tandem configuration embedded in it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from ray._private.ray_constants import RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S

from app.http.http_server import SERVICE_PATH
from app.launch_environment import ENGINE_QUEUE_BYTES
from app.run import load, ours
from app.upgrade.plan import UNITS
from configs.settings.base import SettingsError
from configs.settings.deployment import PlacementSettings, RoleSettings
from configs.settings.router import RouterSettings
from configs.settings.service import ServiceSettings

ROLES = ("router", "prefill", "decode")
RAY_DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
UCX_PORTS = "UCX_TCP_PORT_RANGE"
# UCX listens on each interface of each worker, on random ports: room for many engine workers.
FEWEST_UCX_PORTS = 100
# Ray's keepalive timeout and KubeRay's reconnect timeout of workers with head fault tolerance
# (`cut_off_node_s` in actors/upstream/ray_private.py).
KEEPALIVE_S = 120
CUT_OFF_NODE_S = KEEPALIVE_S + 600
# Ports that network-policies.yaml admits for the data-parallel ranks of a replica.
RANK_PORTS = 16


def amount(quantity: str | float) -> float:
    """Return a quantity of Kubernetes as a number: `500m` is 0.5, `2Gi` is 2**31."""
    ((number, unit),) = re.findall(r"^([\d.]+)(.*)$", str(quantity))
    return float(number) * float(UNITS[unit])


def environment(group: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of the Ray container, which is the first container."""
    return {one["name"]: one for one in group["template"]["spec"]["containers"][0].get("env", [])}


def problems(service: dict[str, Any]) -> list[str]:
    try:
        config, settings = embedded(service)
    except SettingsError as error:
        return [f"serveConfigV2: {line}" for line in str(error).splitlines()]
    cluster = service["spec"]["rayClusterConfig"]
    groups = cluster.get("workerGroupSpecs", [])
    return [
        *_http(config, cluster, settings),
        *_router_port(groups, settings),
        *_head(cluster["headGroupSpec"]),
        *(
            line
            for (name, own), wanted in zip(deployments(settings), scaling(config, settings), strict=True)
            for line in _placed(name, own, wanted, groups)
        ),
        *(line for group in groups for line in _timeouts(group, settings)),
        *_cluster_timeouts(service["spec"], settings),
        *(line for group in groups for line in _ports(group, settings)),
        *(line for group in groups for line in _store(group, settings)),
        *(line for group in [cluster["headGroupSpec"], *groups] for line in _shared_memory(group, settings)),
    ]


def embedded(service: dict[str, Any]) -> tuple[dict[str, Any], ServiceSettings]:
    """Parse `serveConfigV2` as the launcher does: Serve's schema, our settings, vLLM's arguments.

    Raises SettingsError.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "serve.yaml"
        path.write_text(service["spec"]["serveConfigV2"])
        return load(path, None)


def deployments(settings: ServiceSettings) -> list[tuple[str, RouterSettings | RoleSettings]]:
    """Return the deployments, each with the key of its settings."""
    return [("router", settings.router), *settings.roles()]


def scaling(config: dict[str, Any], settings: ServiceSettings) -> list[int | dict[str, Any]]:
    """Return `num_replicas` or `autoscaling_config` of each deployment: options under the file's
    `deployments` override `args`.
    """
    names = ["Router", *(f"{role.capitalize()}{suffix}" for suffix in settings.each_model() for role in ROLES[1:])]
    options = {one["name"]: one for one in ours(config).get("deployments") or ()}
    return [
        options.get(name, {}).get("autoscaling_config") or options.get(name, {}).get("num_replicas") or own.replicas
        for name, (_, own) in zip(names, deployments(settings), strict=True)
    ]


def groups_for(placed: PlacementSettings, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the worker groups whose labels a deployment's selector accepts."""
    return [
        one
        for one in groups
        if all(one.get("labels", {}).get(key) == value for key, value in placed.label_selector.items())
    ]


def _http(config: dict[str, Any], cluster: dict[str, Any], settings: ServiceSettings) -> Iterator[str]:
    options = config.get("http_options", {})
    if options.get("host") != "0.0.0.0":
        yield "serveConfigV2: http_options.host must be 0.0.0.0, or the proxies answer to their own pods only"
    if config.get("proxy_location", "EveryNode") != "EveryNode":
        yield "serveConfigV2: proxy_location must be EveryNode, as the head's proxy gets no requests"
    port = options.get("port", 8000)
    yield from _declared("head", cluster["headGroupSpec"], "serve", port, "http_options.port")
    for group in cluster.get("workerGroupSpecs", []):
        name = group["groupName"]
        yield from _declared(name, group, "serve", port, "http_options.port")
        listens = settings.router.http_port is not None and group in groups_for(settings.router, [group])
        if not listens and not _engines(group, settings) and _probed(group) != ("/-/healthz", port):
            yield f"{name}: the readiness probe must ask Serve's proxy: /-/healthz on port {port}"


def _declared(name: str, group: dict[str, Any], port: str, wanted: int, setting: str, why: str = "") -> Iterator[str]:
    """The container's port of a name must be the one in the configuration."""
    container = group["template"]["spec"]["containers"][0]
    found = {one.get("name"): one["containerPort"] for one in container.get("ports", [])}.get(port)
    if found != wanted:
        yield f"{name}: port `{port}` is {found}, but {setting} {wanted}{why}"


def _router_port(groups: list[dict[str, Any]], settings: ServiceSettings) -> Iterator[str]:
    """Routers with their own port: a Service must detect a stopping router in time."""
    port = settings.router.http_port
    if port is None:
        return
    if settings.router.http_host != "0.0.0.0":
        yield "serveConfigV2: router.http_host must be 0.0.0.0, or routers answer to their own pods only"
    for group in groups_for(settings.router, groups):
        name = group["groupName"]
        yield from _declared(name, group, "router", port, "router.http_port")
        if _probed(group) != (SERVICE_PATH, port):
            yield f"{name}: the readiness probe must ask the router: {SERVICE_PATH} on port {port}"
        probe = group["template"]["spec"]["containers"][0].get("readinessProbe", {})
        noticed_s = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
        if settings.router.leave_s <= noticed_s:
            yield (
                f"router.leave_s ({settings.router.leave_s:g} s) must be longer than {name}'s readiness probe takes to "
                f"notice ({noticed_s} s)"
            )


def _probed(group: dict[str, Any]) -> tuple[Any, Any]:
    get = group["template"]["spec"]["containers"][0].get("readinessProbe", {}).get("httpGet", {})
    return get.get("path"), get.get("port")


def _head(head: dict[str, Any]) -> Iterator[str]:
    parameters = head.get("rayStartParams") or {}
    if parameters.get("num-cpus") != "0":
        yield 'head: rayStartParams num-cpus must be "0", or replicas are placed on it'
    if amount(_limits(head).get("nvidia.com/gpu", 0)):
        yield "head: has a GPU that no replica may use"


def _placed(
    role: str, own: RouterSettings | RoleSettings, wanted: int | dict[str, Any], groups: list[dict[str, Any]]
) -> Iterator[str]:
    fitting = groups_for(own, groups)
    if len(fitting) != 1:
        names = ", ".join(one["groupName"] for one in fitting) or "none"
        yield f"{role}: label_selector {own.label_selector} must match one worker group, not {names}"
        return
    (group,) = fitting
    low, high = replicas(wanted)
    if wanted is not own.replicas and isinstance(wanted, dict) and "policy" not in wanted:
        yield f"{role}: autoscaling_config has no policy: Serve's own does not count Tandem's requests"
    if own.placement != "apart":
        yield f"{role}: placement must be apart: one replica to a pod"
    if high > group["maxReplicas"] or low > group["minReplicas"]:
        yield (
            f"{role}: {low} to {high} replicas, but group {group['groupName']} has {group['minReplicas']} to "
            f"{group['maxReplicas']} pods"
        )
    limits = _limits(group)
    if own.num_cpus > amount(limits.get("cpu", 0)):
        yield f"{role}: num_cpus {own.num_cpus:g}, but a pod of {group['groupName']} has {limits.get('cpu', 0)}"
    if isinstance(own, RoleSettings):
        if own.num_gpus != amount(limits.get("nvidia.com/gpu", 0)):
            yield f"{role}: num_gpus {own.num_gpus:g}, but a pod has {limits.get('nvidia.com/gpu', 0)}"
        ranks = own.tensor_parallel_size * own.data_parallel_size
        if own.num_gpus and own.num_gpus != ranks:
            yield f"{role}: num_gpus {own.num_gpus:g} for {ranks} ranks (tensor_parallel_size x data_parallel_size)"


def replicas(wanted: int | dict[str, Any]) -> tuple[int, int]:
    """Return the fewest and the most replicas that Serve may request; its defaults are 1 and 1."""
    if isinstance(wanted, int):
        return wanted, wanted
    return wanted.get("min_replicas", 1), wanted.get("max_replicas", 1)


def _timeouts(group: dict[str, Any], settings: ServiceSettings) -> Iterator[str]:
    """Each timeout ends before the next: lease < Serve's drain < Ray's drain < pod's grace."""
    name, pod, router = group["groupName"], group["template"]["spec"], settings.router
    served = []  # engines that stop with their routers serve what these still receive
    drain = float(environment(group).get(RAY_DRAIN, {}).get("value", RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S))
    chain = [
        ("transfer.lease_s", settings.transfer.lease_s),
        (RAY_DRAIN, drain),
        ("terminationGracePeriodSeconds", pod.get("terminationGracePeriodSeconds", 30)),
    ]
    for role, own in settings.roles():
        if group in groups_for(own, [group]):
            chain.insert(1, (f"{role}.drain_s", own.drain_s))
            served.append((("router.leave_s", router.leave_s), (f"{role}.drain_s", own.drain_s)))
    pairs = [*pairwise(chain), *served]
    if group in groups_for(router, [group]):
        pairs.append((("router.drain_s", router.drain_s), (RAY_DRAIN, drain)))
        pairs.append((("router.leave_s", router.leave_s), ("router.drain_s", router.drain_s)))
    for (inner, shorter), (outer, longer) in pairs:
        if shorter >= longer:
            yield f"{name}: {outer} ({longer:g} s) must be longer than {inner} ({shorter:g} s)"


def _cluster_timeouts(spec: dict[str, Any], settings: ServiceSettings) -> Iterator[str]:
    delay = spec.get("rayClusterDeletionDelaySeconds", 60)
    if delay <= settings.router.request_timeout_s:
        yield (
            f"rayClusterDeletionDelaySeconds ({delay} s) must be longer than router.request_timeout_s "
            f"({settings.router.request_timeout_s:g} s)"
        )
    lost_s = settings.transfer.node_lost_s
    if lost_s is not None and spec["rayClusterConfig"].get("gcsFaultToleranceOptions") and lost_s < CUT_OFF_NODE_S:
        yield f"transfer.node_lost_s must be at least {CUT_OFF_NODE_S}: a cut-off worker pod runs that long"
    idle = spec["rayClusterConfig"].get("autoscalerOptions", {}).get("idleTimeoutSeconds", 60)
    if idle <= settings.transfer.lease_s:
        yield f"idleTimeoutSeconds ({idle} s) must be longer than transfer.lease_s ({settings.transfer.lease_s:g} s)"


def _engines(group: dict[str, Any], settings: ServiceSettings) -> list[tuple[str, RoleSettings]]:
    """Return the roles whose replicas may run in this group's pods."""
    return [(name, own) for name, own in settings.roles() if group in groups_for(own, [group])]


def _ports(group: dict[str, Any], settings: ServiceSettings) -> Iterator[str]:
    name = group["groupName"]
    if not _engines(group, settings):
        return
    port = settings.transfer.side_channel_port
    if not port:
        yield "transfer.side_channel_port must be fixed, or no NetworkPolicy can name it"
    else:
        yield from _declared(name, group, "side-channel", port, "transfer.side_channel_port")
    container = group["template"]["spec"]["containers"][0]
    probe = container.get("readinessProbe", {})
    handlers = {key: value for key, value in probe.items() if isinstance(value, dict)}
    rpc = [one["containerPort"] for one in container.get("ports", []) if one.get("name") == "rpc"]
    if handlers not in ({"tcpSocket": {"port": one}} for one in ("rpc", *rpc)):
        yield f"{name}: the readiness probe must be tcpSocket on port `rpc`, on which only a ready engine listens"
    for role, own in _engines(group, settings):
        why = ": it must be fixed, or no NetworkPolicy can name it"
        yield from _declared(name, group, "rpc", own.rpc_port, f"{role}.rpc_port", why)
        if own.data_parallel_size > RANK_PORTS:
            yield (
                f"{name}: {role}.data_parallel_size {own.data_parallel_size}, but network-policies.yaml admits "
                f"{RANK_PORTS} ranks: raise endPort of both ports, or use more replicas"
            )
    low, _, high = environment(group).get(UCX_PORTS, {}).get("value", "").partition("-")
    if not (low.isdigit() and high.isdigit()) or int(high) - int(low) + 1 < FEWEST_UCX_PORTS:
        yield f"{name}: {UCX_PORTS} must be a range of at least {FEWEST_UCX_PORTS} ports, such as 20000-20999"


def _store(group: dict[str, Any], settings: ServiceSettings) -> Iterator[str]:
    """The store's folders need volumes of the engines' pods that hold what the settings allow."""
    store, name = settings.store, group["groupName"]
    if not store.enabled or not _engines(group, settings):
        return
    if not store.path:
        return
    volume = _volume(group, store.path)
    if volume is None:
        yield f"{name}: no volume is mounted at or above store.path {store.path}"
        return
    limit = volume.get("emptyDir", {}).get("sizeLimit")
    if limit is not None and amount(limit) <= store.disk_gib * 2**30:
        yield f"{name}: the volume of store.path has {limit}, but store.disk_gib {store.disk_gib:g} needs more"
    if "emptyDir" in volume and _mounted_at(group, volume["name"]) == Path(store.path):
        yield f"{name}: store.path must be below its mount: all users may write to the root of an emptyDir"


def _shared_memory(group: dict[str, Any], settings: ServiceSettings) -> Iterator[str]:
    """Ray's object store, an engine's queue and the KV store fit into the volume of /dev/shm."""
    name, store = group.get("groupName", "head"), settings.store
    size = (group.get("rayStartParams") or {}).get("object-store-memory")
    if size is None:
        yield f"{name}: rayStartParams object-store-memory must be set, or Ray takes 30% of the pod's memory"
        return
    needed = int(size)
    if _engines(group, settings):
        needed += ENGINE_QUEUE_BYTES
        if store.enabled:
            needed += store.staging_mib * 2**20
            needed += int(store.memory_gib * 2**30) if Path(store.memory_path).is_relative_to("/dev/shm") else 0
    limit = (_volume(group, "/dev/shm") or {}).get("emptyDir", {}).get("sizeLimit", 0)
    if amount(limit) < needed:
        yield f"{name}: the volume of /dev/shm has {limit}, but Ray, vLLM and the store need {needed / 2**20:g} MiB"


def _volume(group: dict[str, Any], path: str) -> dict[str, Any] | None:
    """The volume that holds a path in the pod's first container: the one mounted closest to it."""
    pod = group["template"]["spec"]
    mounts = {Path(one["mountPath"]): one["name"] for one in pod["containers"][0].get("volumeMounts", [])}
    closest = max((one for one in mounts if Path(path).is_relative_to(one)), key=lambda at: len(at.parts), default=None)
    volumes = {one["name"]: one for one in pod.get("volumes", [])}
    return None if closest is None else volumes[mounts[closest]]


def _mounted_at(group: dict[str, Any], volume: str) -> Path:
    mounts = group["template"]["spec"]["containers"][0]["volumeMounts"]
    return next(Path(one["mountPath"]) for one in mounts if one["name"] == volume)


def _limits(group: dict[str, Any]) -> dict[str, Any]:
    limits: dict[str, Any] = group["template"]["spec"]["containers"][0].get("resources", {}).get("limits", {})
    return limits
