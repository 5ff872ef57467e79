"""Read a changed setting where it is in effect, and compare it with the new value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from configs.settings.auth import API_KEYS_VARIABLE, OPERATOR_KEYS_VARIABLE, VLLM_API_KEY_VARIABLE
from tests.campaigns.service.setting_changes.running import Replicas, Service
from tests.campaigns.service.setting_changes.steps import Step

ENGINES = {"prefill": "Prefill", "decode": "Decode"}
CPU_VARIABLES = {
    "kv_cache_gib": "VLLM_CPU_KVCACHE_SPACE",
    "omp_threads": "OMP_NUM_THREADS",
    "threads_bind": "VLLM_CPU_OMP_THREADS_BIND",
}
ORIGIN = "https://chat.example"
KEYS_OF_THE_ENVIRONMENT = (API_KEYS_VARIABLE, VLLM_API_KEY_VARIABLE, OPERATOR_KEYS_VARIABLE)


def not_in_effect(step: Step, service: Service, replicas: Replicas, worker: str, session: Path) -> str | None:
    """Return what differs from the step's value, or None if the value is in effect everywhere.

    ``worker``   id of the node that the label, the resource and the GPUs are on
    ``session``  folder with the logs of the Ray nodes
    """
    role = step.section.partition(".")[0]
    if step.key == "replicas":
        return _differs("replicas", len(replicas[step.deployment]), step.value)
    if step.key == "drain_s":
        found = service.drains(step.deployment)
        return _differs("the controller", found, dict.fromkeys(replicas[step.deployment], step.value))
    if step.section == "autoscaling_policy":
        return _differs("the policy", service.scaling()[step.key], step.value)
    if step.key == "models":
        names = {f"{role}-first" for role in ENGINES.values()} | {"Router"}
        return _differs("deployments", set(replicas), names)
    where = (
        ("Router",) if role in ("router", "auth") else (ENGINES[role],) if role in ENGINES else ("Prefill", "Decode")
    )
    for deployment in where:
        states = service.states(replicas, deployment)
        if not states:
            return f"{deployment}: no replica runs"
        for state in states:
            if problem := _in_replica(step, state, worker, service, deployment):
                return f"{deployment}: {problem}"
    check = OBSERVED.get((step.section, step.key))
    return check(service, replicas, session) if check is not None else _rejected(step, service)


def _in_replica(step: Step, state: Mapping[str, Any], worker: str, service: Service, deployment: str) -> str | None:
    """Return what differs in one replica, or None."""
    section, key, value = step.section, step.key, step.value
    if step.change.option == "user_config":
        if section == "router":
            return _differs("limits", state["limits"][key], value)
        return _differs("routing", [one[key] for one in state["routing"]], [value] * len(state["routing"]))
    if key == "start_attempts":
        return _differs(key, state[key], value)
    if step.change.cost == "role":
        return _option(step, state, worker, service, deployment)
    settings = _under(state["settings"], section)
    if key == "secret":
        return _differs("the secret", state["secret"], value)
    if section == "auth":
        return None  # `OBSERVED` checks it by a request
    if key in settings and (problem := _differs("settings", settings[key], _listed(value))):
        return problem
    return _derived(step, state)


def _option(step: Step, state: Mapping[str, Any], worker: str, service: Service, deployment: str) -> str | None:
    """Return what differs from an option of the deployment, or None."""
    key, value, resources = step.key, step.value, state["resources"]
    match key:
        case "num_cpus":
            return _differs("CPUs", resources.get("CPU"), value)
        case "num_gpus":
            return _differs("GPUs", resources.get("GPU"), value)
        case "resources":
            held = {name: resources.get(name) for name in value}
            return _differs("resources", held, value) or _differs("the node", state["node_id"], worker)
        case "label_selector":
            return _differs("the node", state["node_id"], worker)
        case "environment":
            found = {name: state["environment"].get(name) for name in value}
            return _differs("the environment", found, value)
    return _differs("max_replicas_per_node", service.options(deployment)["max_replicas_per_node"], value)


def _derived(step: Step, state: Mapping[str, Any]) -> str | None:
    """Return what differs from the value behind the settings: arguments, addresses, environment."""
    section, key, value = step.section, step.key, step.value
    match section, key:
        case ("", "model"):
            return _differs("the engine", state["engine"]["model"], value)
        case ("", "served_model_name"):
            return _differs("the engine", state["engine"]["served_model_name"], value)
        case ("" | "prefill" | "decode", "engine"):
            return _differs("the engine", {one: state["engine"].get(one) for one in value}, value)
        case ("transfer", "node_lost_s"):
            return None  # an argument of the actor, not of the connector
        case ("transfer", _):
            return _differs("the connector", state["connector"][key], value)
        case ("store", "path"):
            return _differs("the store", state["connector"]["store"]["path"], value)
        case ("store", _):
            return _differs("the store", state["connector"]["store"][key], value)
        case ("cpu", _):
            return _differs("the environment", state["environment"].get(CPU_VARIABLES[key]), str(value))
        case ("router", "http_port"):
            return _differs("the server", state["listens"][1], value)
        case ("router", "http_host"):
            return _differs("the server", state["listens"][0], value)
        case ("router", "leave_s"):
            return _differs("the server", state["leave_s"], value)
        case (_, "max_ongoing_sequences"):
            return _differs("slots", state["ranks"][0]["slots"], value)
        case (_, "max_queued_requests"):
            return _differs("the queue", state["ranks"][0]["queue"], value)
        case (_, "rpc_host"):
            return _differs("the RPC server", state["ranks"][0]["rpc"]["host"], value)
        case (_, "rpc_port"):
            return _differs("the RPC server", state["ranks"][0]["rpc"]["port"], value)
        case (_, "tensor_parallel_size"):
            return _differs("the engine", state["engine"]["tensor_parallel_size"], value)
        case (_, "data_parallel_size"):
            return _differs("ranks", len(state["ranks"]), value)
        case (_, "executor"):
            return _differs("the engine", state["engine"].get("distributed_executor_backend"), value)
        case (_, "num_gpus"):
            on_cpu = "worker_cls" in state["engine"]
            return _differs("GPUs", state["resources"].get("GPU"), value) or _differs("a CPU engine", on_cpu, False)
    return None


def _rejected(step: Step, service: Service) -> str | None:
    """Return the routers' error of a changed `user_config`, or None."""
    if step.change.option != "user_config":
        return None
    for one in service.status()["routers"]:
        if one["rejected_config"] is not None:
            return f"rejected: {one['rejected_config']}"
        if step.key == "max_ongoing_sequences" and one["limit"] != step.value:
            return f"/tandem/status: {one['limit']}"
    return None


def _keys(service: Service, replicas: Replicas, session: Path) -> str | None:
    return _differs("a request without a key", service.request(key=False), "401")


def _client_certificate(service: Service, replicas: Replicas, session: Path) -> str | None:
    return _differs("a request without a certificate", service.request(certificate=False), "403")


def _preflight(header: str, value: str) -> Callable[[Service, Replicas, Path], str | None]:
    def check(service: Service, replicas: Replicas, session: Path) -> str | None:
        asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-one"}
        with service.client() as http:
            found = http.options("/v1/completions", headers=asked).headers.get(header, "")
        return None if value in found else f"{header} of a preflight: {found!r}"

    return check


def _no_access_log(service: Service, replicas: Replicas, session: Path) -> str | None:
    found = [one for one in replicas["Router"] if any(session.rglob(f"access-{one}.log"))]
    return f"an access log of {found}" if found else None


def _request_log(service: Service, replicas: Replicas, session: Path) -> str | None:
    service.request()
    text = "".join(path.read_text() for one in replicas["Router"] for path in session.rglob(f"access-{one}.log"))
    return None if '"max_tokens"' in text else f"the access log has no parameters: {text[-300:]!r}"


OBSERVED: dict[tuple[str, str], Callable[[Service, Replicas, Path], str | None]] = {
    ("auth", "api_keys"): _keys,
    ("auth", "operator_keys"): _keys,
    ("router", "ssl_ca_certs"): _client_certificate,
    ("router", "allowed_origins"): _preflight("access-control-allow-origin", ORIGIN),
    ("router", "allowed_methods"): _preflight("access-control-allow-methods", "GET, POST"),
    ("router", "allowed_headers"): _preflight("access-control-allow-headers", "x-one"),
    ("router", "allow_credentials"): _preflight("access-control-allow-credentials", "true"),
    ("router", "access_log"): _no_access_log,
    ("router", "request_log"): _request_log,
}
"""Checks of what clients and operators see, by section and key."""


def _under(settings: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    for key in section.split(".") if section else ():
        settings = settings.get(key, {})
    return settings


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _differs(what: str, found: object, wanted: object) -> str | None:
    return None if found == wanted else f"{what}: {found!r} instead of {wanted!r}"
