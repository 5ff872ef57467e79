"""Settings of the service: one frozen model, read from the `args` of a Serve config file.

Times are in seconds (`_s`), sizes in bytes (`_bytes`), MiB (`_mib`) or GiB (`_gib`). Tandem passes
engine arguments to vLLM unchanged; `actors.engine.arguments` checks their names against the
installed vLLM.
"""

import re
from pathlib import Path
from typing import Any

from pydantic import Field, SecretStr, field_validator, model_validator

from configs.settings.auth import AuthSettings
from configs.settings.base import ROLES, Frozen, RoleName
from configs.settings.deployment import CpuSettings, RoleSettings, RpcTlsSettings
from configs.settings.kv import KVStoreSettings, TransferSettings
from configs.settings.router import RouterSettings

DEMO_MODEL = "demo"
"""Value of `model` for the checkpoint embedded in `app.demo`."""

DEMO_MODEL_DIR = Path(__file__).resolve().parents[2] / "app" / "demo" / "model"
DEMO_SERVED_NAME = "tandem-demo"

LAST_PORT = 65535

ADAPTER_KEYS = ("name", "path")
"""Required keys of an entry of `frontend.lora_modules`."""

UNNAMEABLE = re.compile("[^A-Za-z0-9._-]")
"""Characters of a model's name that become `-` in the names of its deployments."""


def _adapter(given: Any) -> dict[str, Any]:
    """Return an adapter, given as `name=path` or as a mapping, as a mapping.

    Raises ValueError if `given` is neither, or has no name or no path.
    """
    if isinstance(given, str):
        name, _, path = given.partition("=")
        given = {"name": name, "path": path}
    if not isinstance(given, dict) or not all(given.get(key) and isinstance(given[key], str) for key in ADAPTER_KEYS):
        raise ValueError(f"lora_modules: {given!r} must be `name=path` or `{{name: ..., path: ...}}`")
    return given


class ModelSettings(Frozen):
    """Settings of one model and its engines."""

    model: str = Field(DEMO_MODEL, min_length=1, description="a path, a hub id, or `demo` (the embedded model)")
    served_model_name: str | list[str] | None = Field(
        None,
        description="model name in the API, or a list: the name and its aliases; unset: the value of `model`, or "
        "`tandem-demo` for the embedded model",
    )
    engine: dict[str, Any] = Field(default_factory=dict, description="vLLM engine arguments of both roles")
    frontend: dict[str, Any] = Field(
        default_factory=dict,
        description="arguments of vLLM's OpenAI layer, for example `tool_call_parser`, of both roles, because both "
        "render the prompt. Those of vLLM's HTTP server are refused ([where they "
        "are](coming-from-vllm-serve.md#where-each-argument-goes))",
    )
    allow_runtime_lora_updating: bool = Field(
        False,
        description="serve `/v1/load_lora_adapter` and `/v1/unload_lora_adapter` ([adapters](models.md#adapters)); "
        "needs `engine.enable_lora`. Any client that the router admits can then make engines read any path",
    )
    prefill: RoleSettings = Field(RoleSettings(), description="the Prefill deployment")
    decode: RoleSettings = Field(RoleSettings(), description="the Decode deployment")

    @field_validator("served_model_name")
    @classmethod
    def _distinct_names(cls, names: str | list[str] | None) -> str | list[str] | None:
        if isinstance(names, list) and (not names or len(set(names)) < len(names)):
            raise ValueError("must have at least one name, and each only once")
        return names

    @field_validator("frontend")
    @classmethod
    def _adapters(cls, frontend: dict[str, Any]) -> dict[str, Any]:
        """Accept adapters as on vLLM's command line: `name=path`, or a mapping instead of JSON."""
        given = frontend.get("lora_modules")
        if given is None:
            return frontend
        if not isinstance(given, list):
            raise ValueError("lora_modules must be a list of `name=path` or `{name: ..., path: ...}`")
        return {**frontend, "lora_modules": [_adapter(one) for one in given]}

    @property
    def model_path(self) -> str:
        return str(DEMO_MODEL_DIR) if self.model == DEMO_MODEL else self.model

    @property
    def model_names(self) -> tuple[str, ...]:
        """Model name in client requests, and its aliases."""
        if isinstance(self.served_model_name, list):
            return tuple(self.served_model_name)
        if self.served_model_name is not None:
            return (self.served_model_name,)
        return (DEMO_SERVED_NAME if self.model == DEMO_MODEL else self.model,)

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of the adapters that `frontend.lora_modules` loads at the start."""
        return tuple(one["name"] for one in self.frontend.get("lora_modules") or ())

    def role(self, name: RoleName) -> RoleSettings:
        return self.prefill if name == "prefill" else self.decode


class ServiceSettings(ModelSettings):
    """The settings in `args` of a Serve config file: the argument of `app.main:build`."""

    models: list[ModelSettings] = Field(
        default_factory=list,
        description="several models behind one endpoint ([several models](models.md)): a list of mappings with "
        "the keys above, which then must not be set here",
    )
    transfer: TransferSettings = Field(TransferSettings(), description="the KV connector")
    store: KVStoreSettings = Field(KVStoreSettings(), description="the KV store; off by default")
    router: RouterSettings = Field(RouterSettings(), description="the Router deployment")
    auth: AuthSettings = Field(AuthSettings(), description="API keys")
    rpc_tls: RpcTlsSettings | None = Field(
        None,
        description="mutual TLS between routers and engines: `certfile`, `keyfile` and `ca_certs`, PEM files on the "
        "node of each replica ([TLS](network.md#tls))",
    )
    cpu: CpuSettings = Field(CpuSettings(), description="engines without a GPU; ignored by roles with `num_gpus`")

    @model_validator(mode="after")
    def _one_form(self) -> "ServiceSettings":
        both = sorted(self.model_fields_set & ModelSettings.model_fields.keys())
        if self.models and both:
            raise ValueError(f"{', '.join(both)}: set these for each of `models`, not at the top level")
        return self

    @model_validator(mode="after")
    def _names_are_distinct(self) -> "ServiceSettings":
        names = [name for one in self.models for name in (*one.model_names, *one.adapter_names)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"models: several models or adapters have the name {', '.join(twice)}; set different names in "
                "served_model_name or frontend.lora_modules"
            )
        for one in self.models:
            same = [other.model_name for other in self.models if _suffix(other) == _suffix(one)]
            if len(same) > 1:
                raise ValueError(
                    f"models: {' and '.join(map(repr, same))} give two deployments the name Prefill{_suffix(one)}, "
                    "because `-` replaces all characters but letters, digits and `._-`; set another served_model_name"
                )
        return self

    @model_validator(mode="after")
    def _one_engine_to_a_port(self) -> "ServiceSettings":
        for name, role in self.roles():
            fixed = {"transfer.side_channel_port": self.transfer.side_channel_port, f"{name}.rpc_port": role.rpc_port}
            for setting, port in fixed.items():
                if port and role.replicas != 1 and role.placement != "apart":
                    raise ValueError(
                        f"{name}.placement must be `apart`: two replicas on one node cannot share "
                        f"{setting} {port}; alternatively, set the port to 0 for any free port"
                    )
                if port and port + role.data_parallel_size - 1 > LAST_PORT:
                    raise ValueError(
                        f"{name}.data_parallel_size: rank {role.data_parallel_size - 1} would listen on port "
                        f"{port + role.data_parallel_size - 1}; choose a lower {setting}, or 0 for any free port"
                    )
        return self

    @model_validator(mode="after")
    def _ranks_without_a_store(self) -> "ServiceSettings":
        for name, role in self.roles():
            if role.data_parallel_size > 1 and self.store.enabled:
                raise ValueError(
                    f"{name}.data_parallel_size must be 1 with a KV `store`: the combination is not tested"
                )
        return self

    def roles(self) -> list[tuple[str, RoleSettings]]:
        """Return the roles of all models, each with its path in `args` (`models.0.prefill`)."""
        if not self.models:
            return [(role, self.role(role)) for role in ROLES]
        return [(f"models.{i}.{role}", one.role(role)) for i, one in enumerate(self.models) for role in ROLES]

    def each_model(self) -> dict[str, "ServiceSettings"]:
        """Return the settings of each model in the form of a service with one model.

        Each key is the suffix of the model's deployment names: `-NAME`, or empty without `models`.
        """
        if not self.models:
            return {"": self}
        fields = ModelSettings.model_fields
        return {
            _suffix(one): self.model_copy(update={"models": [], **{name: getattr(one, name) for name in fields}})
            for one in self.models
        }

    def with_secret(self, fallback: SecretStr) -> "ServiceSettings":
        """Return these settings with the operator's secret, or with `fallback` if there is none.

        Raises SettingsError if the secret is from the environment and too short.
        """
        secret = self.transfer.operators_secret() or fallback
        return self.model_copy(update={"transfer": self.transfer.model_copy(update={"secret": secret})})


def _suffix(model: ModelSettings) -> str:
    return f"-{UNNAMEABLE.sub('-', model.model_name)}"
