"""The changes of the campaign: one for each row of the configuration reference. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import BaseModel

from configs.changes import DEPLOYMENTS, Change, change_of
from configs.reference import SECTIONS
from configs.settings.service import DEMO_MODEL_DIR, ModelSettings

APPLICATION = "tandem"
IMPORT_PATH = "tests.campaigns.service.setting_changes.instant_engine:build"
POLICY = "actors.autoscaling.policy:ScaleTogether"
ROLE_POLICY = "actors.autoscaling.policy:ScaleByOngoing"
"""Copy of the name in `actors.autoscaling.policy`: its import imports Ray, and the campaign sets
Ray's token first.
"""

Group = Literal["live", "all", "role"]
Config = dict[str, Any]
LABEL, WORKER, SPECIAL = "zone", "worker", "special"
"""Label and custom resource that only the worker node has."""

VARIABLE = "SETTING_CHANGES"
KEY = "another-key"
SECRET = "another secret of the engines"
BOUNDS = {"min_replicas": 1, "max_replicas": 2}

NOT_TRIED: dict[tuple[str, str], str] = {}
"""Rows of the reference without a step, and the reason."""


@dataclass(frozen=True)
class Files:
    """Files and ports that changed settings name.

    ``certificates``  chain, key and authority, then a copy of each at another path
    """

    folder: Path
    certificates: tuple[tuple[Path, Path, Path], tuple[Path, Path, Path]]
    ports: tuple[int, int, int]


@dataclass(frozen=True)
class Step:
    """One change of one setting.

    ``section``, ``key``  row of the reference
    ``value``    value to which the setting, or the option that replaces it, changes
    ``change``   the way to change it, and the restarts that the reference promises
    ``group``    steps of a group follow each other on one configuration
    ``needs``    `args` that are deployed before, because the change needs them
    ``without``  keys of `args` that are removed before
    ``options``  options by deployment that are deployed before
    ``keep``     whether later steps of the group keep the change
    ``note``     text for the table
    """

    section: str
    key: str
    value: Any
    change: Change
    group: Group
    needs: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    keep: bool = True
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}" if self.section else self.key

    @property
    def deployment(self) -> str:
        """Deployment whose option or setting changes."""
        return DEPLOYMENTS[self.section.partition(".")[0]]

    @property
    def where(self) -> str:
        if self.change.option is not None:
            return f"{self.deployment}: {self.change.option}"
        return "autoscaling_policy" if self.section == "autoscaling_policy" else "args"

    @property
    def restarts(self) -> str:
        """Deployments whose replicas are expected to restart."""
        return {"live": "none", "all": "all"}.get(self.change.cost) or self.deployment

    def start(self, config: Config) -> Config:
        """Return `config` with what this change needs."""
        found = deepcopy(config)
        one = found["applications"][0]
        for key in self.without:
            one["args"].pop(key, None)
        _merge(one["args"], self.needs)
        for name, options in self.options.items():
            _entry(one, name).update(deepcopy(dict(options)))
        if self.section == "autoscaling_policy":
            one.setdefault("autoscaling_policy", {"policy_function": POLICY, "policy_kwargs": {}})
        return found

    def changed(self, config: Config, actor_options: Mapping[str, Any]) -> Config:
        """Return `config`, the result of `start`, with this change.

        ``actor_options``  `ray_actor_options` of the running deployment, which a change repeats
        """
        found = deepcopy(config)
        one = found["applications"][0]
        if self.change.option is None:
            outer = one["args"]
            if self.section == "autoscaling_policy":
                outer = one["autoscaling_policy"]["policy_kwargs"]
            elif self.section:
                outer = _inner(outer, self.section.split("."))
            outer[self.key] = deepcopy(self.value)
            return found
        entry = _entry(one, self.deployment)
        if self.change.option == "user_config":
            inner = entry.setdefault("user_config", {})
            if self.section == "router.routing":
                inner = inner.setdefault("routing", {})
            inner[self.key] = self.value
            return found
        *outer_keys, last = self.change.option.split(".")
        if outer_keys[:1] == ["ray_actor_options"]:
            entry.setdefault("ray_actor_options", deepcopy(dict(actor_options)))
        inner = _inner(entry, outer_keys)
        if self.key == "environment":
            inner[last] = {**inner.get(last, {}), **self.value}
        else:
            inner[last] = deepcopy(self.value)
        return found

    def before(self, config: Config) -> Any:
        """Return the setting's value in `config`, or its default."""
        one = config["applications"][0]
        found = _present(one, self.section, self.key, _field(self.section, self.key))
        if self.change.option is None or self.key in ("environment", "placement"):
            return found
        entry: dict[str, Any] = next((each for each in one["deployments"] if each["name"] == self.deployment), {})
        inner: Any = entry
        for key in self.change.option.split("."):
            inner = inner.get(key) if isinstance(inner, dict) else None
        if self.change.option == "user_config":
            inner = (inner or {}).get("routing", {}) if self.section == "router.routing" else inner
            return (inner or {}).get(self.key, found)
        return found if inner is None else inner


def base_config(port: int) -> Config:
    """Return the configuration from which each group starts."""
    role = {"num_cpus": 0.3, "start_attempts": 1, "rpc_host": "127.0.0.1"}
    args = {
        "model": "demo",
        "engine": {"max_model_len": 2048},
        "prefill": dict(role),
        "decode": dict(role),
        "transfer": {"side_channel_host": "127.0.0.1"},
        "router": {"http_port": port, "leave_s": 0.1, "routing": {"policy": "always_remote"}},
    }
    # No proxy runs, so Serve need not wait until proxies know that a router stops.
    router = {"name": "Router", "graceful_shutdown_wait_loop_s": 0.2}
    one = {"name": APPLICATION, "route_prefix": "/", "import_path": IMPORT_PATH, "args": args, "deployments": [router]}
    return {"proxy_location": "Disabled", "applications": [one]}


def rows() -> list[tuple[str, str]]:
    """Return the section and key of each row of the reference, except those that name a section."""
    return [
        (section, key)
        for _, model, sections in SECTIONS
        for section in sections
        for key, one in model.model_fields.items()
        if not isinstance(one.default, BaseModel)
    ]


def steps(files: Files) -> list[Step]:
    """Return the steps by group: the live ones, then those in `args`, then those of one role."""
    found = [*_live(), *_all(files), *_role()]
    return [step for group in get_args(Group) for step in found if step.group == group]


def _live() -> Iterator[Step]:
    for section, key in rows():
        change = change_of(section, key)
        if change.cost != "live":
            continue
        value = {"replicas": 2, "policy": "least_load", "first_token": "prefill"}.get(key)
        step = Step(section, key, another(section, key) if value is None else value, change, "live")
        yield Step(**{**vars(step), "keep": key != "replicas"})
    # The bounds of an autoscaled role, as docs/configuration.md describes them.
    scaling = {"autoscaling_config": BOUNDS | {"policy": {"policy_function": ROLE_POLICY}}}
    yield Step(
        "decode",
        "replicas",
        2,
        Change("live", "autoscaling_config.min_replicas"),
        "live",
        options={"Decode": scaling},
        keep=False,
        note="autoscaled",
    )


def _all(files: Files) -> Iterator[Step]:
    special = _special_values(files)
    first = files.certificates[0]
    tls = {"router": {"ssl_certfile": str(first[0]), "ssl_keyfile": str(first[1])}}
    no_tls = {"router": {"ssl_certfile": None, "ssl_keyfile": None, "ssl_ca_certs": None}}
    scaled = {role: {"replicas": BOUNDS, "rpc_port": 0} for role in ("prefill", "decode")}
    extra: dict[tuple[str, str], dict[str, Any]] = {
        ("", "models"): {"without": tuple(ModelSettings.model_fields), "keep": False},
        ("", "rpc_tls"): {"keep": False},
        ("", "allow_runtime_lora_updating"): {"keep": False},
        ("transfer", "side_channel_host"): {"needs": {"transfer": {"advertise_host": "127.0.0.1"}}},
        ("transfer", "side_channel_port"): {"keep": False},
        ("router", "http_host"): {"keep": False},
        ("router", "ssl_certfile"): {"needs": tls},
        ("router", "ssl_ca_certs"): {"keep": False},
        ("router", "otlp_traces_endpoint"): {"keep": False},
        ("router", "access_log"): {"needs": no_tls, "keep": False},
    }
    for role in ("prefill", "decode"):
        extra[role, "executor"] = {"needs": {role: {"num_gpus": 1}}, "keep": False}
        extra[role, "data_parallel_size"] = {"keep": False}
        extra[role, "rpc_port"] = {"keep": False}
        extra[role, "tensor_parallel_size"] = {"keep": False}
    for section, key in rows():
        if change_of(section, key).cost == "all":
            value = special[section, key] if (section, key) in special else another(section, key)
            own = extra.get((section, key), {})
            if section == "autoscaling_policy":
                own = {"needs": scaled}
            yield Step(section, key, value, change_of(section, key), "all", **own)
        if key == "num_gpus":
            # The option cannot make an engine run on another device: `args` determine that.
            yield Step(section, key, 1, Change("all"), "all", keep=False, note="from 0")


def _special_values(files: Files) -> dict[tuple[str, str], Any]:
    """Return the values in `args` for which `another` has no valid one."""
    first, second = files.certificates
    found: dict[tuple[str, str], Any] = {
        ("", "model"): str(DEMO_MODEL_DIR),
        ("", "served_model_name"): ["renamed", "alias"],
        ("", "engine"): {"max_model_len": 2048, "enable_lora": True, "max_loras": 2},
        ("", "frontend"): {"enable_prompt_tokens_details": True},
        ("", "models"): [{"model": "demo", "served_model_name": "first"}],
        ("", "rpc_tls"): dict(zip(("certfile", "keyfile", "ca_certs"), map(str, first), strict=True)),
        ("transfer", "side_channel_host"): "0.0.0.0",
        ("transfer", "side_channel_port"): files.ports[0],
        ("transfer", "advertise_host"): "127.0.0.3",
        ("transfer", "secret"): SECRET,
        ("transfer", "backends"): ["UCX", "POSIX"],
        ("transfer", "devices"): ["lo"],
        ("transfer", "trace_path"): str(files.folder / "trace.jsonl"),
        ("transfer", "node_lost_s"): 1000.0,
        ("store", "path"): str(files.folder / "store"),
        ("store", "memory_path"): "/dev/shm/tandem-setting-changes",
        ("router", "http_port"): files.ports[1],
        ("router", "http_host"): "127.0.0.2",
        ("router", "leave_s"): 0.2,
        ("router", "ssl_certfile"): str(second[0]),
        ("router", "ssl_keyfile"): str(second[1]),
        ("router", "ssl_ca_certs"): str(first[2]),
        ("router", "allowed_origins"): ["https://chat.example"],
        ("router", "allowed_methods"): ["GET", "POST"],
        ("router", "allowed_headers"): ["x-one"],
        ("router", "otlp_traces_endpoint"): "http://127.0.0.1:9/v1/traces",
        ("router", "request_log"): "parameters",
        ("auth", "api_keys"): [KEY],
        ("auth", "operator_keys"): [KEY],
        ("cpu", "threads_bind"): "auto",
        ("autoscaling_policy", "prefill_busy"): 0.8,
        ("autoscaling_policy", "kv_use"): 0.8,
        ("autoscaling_policy", "slack"): 0.25,
    }
    for role in ("prefill", "decode"):
        found[role, "engine"] = {"max_num_seqs": 8}
        found[role, "rpc_host"] = "127.0.0.2"
        found[role, "rpc_port"] = files.ports[2]
        found[role, "start_attempts"] = 4
    return found


def _role() -> Iterator[Step]:
    values: dict[str, Any] = {
        "label_selector": {LABEL: WORKER},
        "num_cpus": 0.2,
        "num_gpus": 0.5,
        "resources": {SPECIAL: 1.0},
        "environment": {VARIABLE: "changed"},
        "placement": 1,
    }
    # First `num_gpus`: options of earlier steps stay, and would hide the GPUs in `args` it needs.
    for section, key in sorted(rows(), key=lambda row: row[1] != "num_gpus"):
        change = change_of(section, key)
        if change.cost == "role":
            # The option changes a number of GPUs; an engine without a GPU would stay on the CPU.
            needs = {section: {"num_gpus": 1}} if key == "num_gpus" else {}
            yield Step(section, key, values[key], change, "role", needs=needs, keep=key != "num_gpus")


def another(section: str, key: str) -> Any:
    """Return a value of this setting other than its default."""
    one = _field(section, key)
    if get_origin(one.annotation) is Literal:
        return next(value for value in get_args(one.annotation) if value != one.default)
    match one.default:
        case bool():
            return not one.default
        case int() | float():
            return one.default + 1
        case None:
            return 7
        case _:
            return f"{one.default}-x"


def _field(section: str, key: str) -> Any:
    return next(model for _, model, sections in SECTIONS if section in sections).model_fields[key]


def _present(one: Mapping[str, Any], section: str, key: str, setting: Any) -> Any:
    """Return the value of a setting in an application, or its default."""
    found: Any = one.get("args", {})
    path = section.split(".") if section else []
    if section == "autoscaling_policy":
        found, path = one.get("autoscaling_policy", {}).get("policy_kwargs", {}), []
    for outer in path:
        found = found.get(outer) or {}
    return found.get(key, setting.get_default(call_default_factory=True))


def _entry(one: Config, deployment: str) -> dict[str, Any]:
    """Return the entry of `deployment` under `deployments`; add it if there is none."""
    for found in one["deployments"]:
        if found["name"] == deployment:
            return cast(dict[str, Any], found)
    entry = {"name": deployment}
    one["deployments"].append(entry)
    return entry


def _inner(outer: dict[str, Any], path: list[str]) -> dict[str, Any]:
    for key in path:
        outer = outer.setdefault(key, {})
    return outer


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict) and key != "replicas":
            _merge(into[key], value)
        else:
            into[key] = deepcopy(value)
