"""Generate docs/configuration.md from the settings: `python -m configs.reference`.

A test compares the committed page with the output.
"""

from __future__ import annotations

import textwrap
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from configs.changes import Change, change_of
from configs.settings.auth import AuthSettings
from configs.settings.deployment import CpuSettings, RoleSettings
from configs.settings.kv import KVStoreSettings, TransferSettings
from configs.settings.router import RouterLimits, RouterSettings, RoutingSettings
from configs.settings.scaling import ScalingSettings
from configs.settings.service import ServiceSettings

_INTRODUCTION = """# Configuration reference

<!-- Written by `python -m configs.reference`; do not edit by hand. -->

A configuration is a Ray Serve config file. These are the keys of `args` under Tandem's application.
An unknown key or a value out of range stops the start with an error that names the key. Times are
in seconds (`_s`), sizes in bytes (`_bytes`), MiB (`_mib`) or GiB (`_gib`). The files in `configs/`
are complete examples. In parentheses: the default, and how to [change the key of a running
service](#change-a-running-service) with the fewest restarts; nothing means *all*.
"""

_CHANGES = """## Change a running service

Edit the file and deploy it again (`serve deploy FILE`, or `kubectl apply` of the RayService). The
place of a change determines which replicas restart:

| change | where | restarts |
|---|---|---|
| live: `option` | this option of one deployment, under `deployments` | nothing |
| role: `option` | this option of one deployment, under `deployments` | the replicas of this deployment |
| all | `args`, or `autoscaling_policy` | every router and engine of the application |

**Any change of `args` restarts every replica**, also of a timeout or of `replicas`: Serve computes
one code version from all of `args`. It replaces a fifth of each deployment at a time, at least one,
and stops an old replica before it starts a new one, so a role with one replica is away meanwhile.
Leave the deployed `args` unchanged, and put changes under `deployments`, which override them:

```yaml
applications:
  - name: tandem
    import_path: app.main:build
    args: {...}                       # unchanged
    deployments:
      - {name: Prefill, num_replicas: 3}
      - name: Router
        user_config:
          request_timeout_s: 120
          routing: {decode_weight: 2}
```

- **`user_config`** of `Router` takes the keys marked `live: user_config` (the fields of
  `RouterLimits`, `routing` included) and is merged over `args`: a key that is removed returns to
  the value of `args`. After a wrong key or value, the router keeps its settings, logs the error,
  shows it on the [status page](observing.md#status-page) and in `/tandem/status`
  (`rejected_config`), and sets `tandem_user_config_rejected` to 1. `make run` refuses such a file.
- **`num_replicas`** is for roles whose `replicas` is a number. For autoscaled roles, write
  `autoscaling_config` under `deployments` from the first deployment on, with `policy:
  {policy_function: "actors.autoscaling.policy:ScaleByOngoing"}`; its bounds then change live.
  Adding it later, or changing the policy, restarts everything.
- **`ray_actor_options`** replaces all such options, so repeat them: `num_cpus`, `num_gpus`,
  `resources`, `label_selector`, and `runtime_env: {env_vars: ...}` with `environment` and the
  variables that Tandem sets (`serve build app.main:app` prints the defaults): for engines
  `VLLM_NO_USAGE_STATS=1` and `VLLM_API_KEY=`; with a local model `HF_HUB_OFFLINE=1`; without a GPU
  `VLLM_CPU_KVCACHE_SPACE`, `VLLM_CPU_OMP_THREADS_BIND`, `OMP_NUM_THREADS` and, unless
  `enforce_eager` is false, `TORCHDYNAMO_DISABLE=1`; for routers
  `RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD=0` and `RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP=0`. With
  `executor: ray`, `placement_group_bundles` contains the GPUs and
  `placement_group_bundle_label_selector` the labels.
- **`max_replicas_per_node`** is 1 for `placement: apart`.

Once changes have been tried, the next planned restart is the time to move them into `args`.
"""

SECTIONS: tuple[tuple[str, type[BaseModel], tuple[str, ...]], ...] = (
    ("The service", ServiceSettings, ("",)),
    ("`prefill` and `decode`", RoleSettings, ("prefill", "decode")),
    ("`transfer`", TransferSettings, ("transfer",)),
    ("`store`", KVStoreSettings, ("store",)),
    ("`router`", RouterSettings, ("router",)),
    ("`router.routing`", RoutingSettings, ("router.routing",)),
    ("`auth`", AuthSettings, ("auth",)),
    ("`cpu`", CpuSettings, ("cpu",)),
    ("`autoscaling_policy`", ScalingSettings, ("autoscaling_policy",)),
)
"""Title of each table, its settings model, and the model's sections in a configuration."""

_TEXTS = {
    "The service": (
        "`args:`. For speculative decoding with a draft model, set `engine.speculative_config`; with n-gram drafts, "
        "only `decode.engine.speculative_config`. LoRA adapters need `engine.enable_lora` and "
        "`frontend.lora_modules` or `allow_runtime_lora_updating`, and without a GPU an `engine.max_loras` greater "
        "than their number ([what is supported](supported.md))."
    ),
    "`prefill` and `decode`": (
        "One set of keys per role. An argument in `engine` here overrides the same argument in `engine` of the service."
    ),
    "`transfer`": (
        "The KV connector: how engines reach each other, and the deadlines of a transfer ([protocol](protocol.md))."
    ),
    "`store`": (
        "Engines of both roles store the KV of prompts and answers, and load it instead of computing it "
        "([the KV store](kv-store.md))."
    ),
    "`router`": (
        "Each router replica applies the deadlines and limits to its own requests. `user_config` changes the keys "
        "marked `live: user_config` ([changes](#change-a-running-service))."
    ),
    "`router.routing`": "Which engines serve a request ([routing](routing.md)).",
    "`auth`": "API keys.",
    "`cpu`": "For roles without `num_gpus`.",
    "`autoscaling_policy`": (
        "A key beside `args`: `autoscaling_policy: {policy_function: actors.autoscaling.policy:ScaleTogether, "
        "policy_kwargs: {...}}`. The table lists its `policy_kwargs`. Bounds and delays are those of each role's "
        "`replicas` (`min_replicas`, `max_replicas`, `look_back_period_s`, `upscale_delay_s`, `downscale_delay_s`). "
        "Without this policy, each role is fixed or scaled separately ([scaling](scaling.md))."
    ),
}


def reference() -> str:
    """Return the page as Markdown."""
    parts = [_INTRODUCTION, _CHANGES]
    for title, model, sections in SECTIONS:
        wrapped = textwrap.fill(_TEXTS[title], 100, break_on_hyphens=False)
        parts.append(f"## {title}\n\n{wrapped}\n")
        rows = [_row(name, field, change_of(sections[0], name)) for name, field in _fields(model).items()]
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    own = model.model_fields
    if model is RouterSettings:
        limits = RouterLimits.model_fields
        return {name: own[name] for name in (*(n for n in own if n not in limits), *limits)}
    return dict(own)


def _row(name: str, field: Any, change: Change) -> str:
    if field.default_factory is not None:
        default = repr(field.default_factory())
    elif field.default is PydanticUndefined:
        default = "required"
    elif isinstance(field.default, BaseModel):
        default = "see below"
    else:
        default = repr(field.default)
    how = "" if change.option is None else f"; {change.cost}: `{change.option}`"
    shown = "" if default == "see below" else " (required)" if default == "required" else f" (`{default}`{how})"
    text = f"- `{name}`{shown}: {field.description or ''}".rstrip()
    return textwrap.fill(text, 100, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)


if __name__ == "__main__":
    print(reference(), end="")
