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

A configuration is a Ray Serve config file. These are the keys of `args` under Tandem's application,
and the `policy_kwargs` of the `autoscaling_policy` beside `args`. An unknown key or a value out of
range in `args` stops the start with an error that names the key. Times are in seconds (`_s`), sizes
in bytes (`_bytes`), MiB (`_mib`) or GiB (`_gib`). The files in `configs/` are complete examples.

The column *change* gives the way to change a setting of a
[running service](#change-a-running-service) with the fewest restarts.
"""

_CHANGES = """## Change a running service

Edit the file and deploy it again, with `serve deploy FILE` or `kubectl apply` of the RayService.
The place of a change determines which replicas restart:

| change | where | restarts |
|---|---|---|
| live: `option` | this option of one deployment, under `deployments` | nothing |
| role: `option` | this option of one deployment, under `deployments` | the replicas of this deployment |
| all | `args`, or `autoscaling_policy` | every router and engine of the application |

**Any change of `args` restarts every replica**, also a change of a timeout or of `replicas`: Serve
computes one code version from all of `args`. It replaces replicas in steps of a fifth of each
deployment, at least one, and stops an old replica before it starts a new one. A role with one
replica has no running replica meanwhile. So leave the deployed `args` unchanged, and put changes
under `deployments`, which override `args`:

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

- **`user_config`** of `Router` takes the keys marked `live: user_config`. These are the fields of
  `RouterLimits` (`configs/settings/router.py`), `routing` included; any other key of `router` is
  refused. `user_config` is merged over `args`: keys that it does not name keep the value of `args`,
  and a key that is removed returns to it. If a key or a value is wrong, the router keeps its
  present settings. It logs the error, shows it on the [status page](observing.md#status-page) and
  in `/tandem/status` (`rejected_config`), and sets `tandem_user_config_rejected` to 1. `make run`
  refuses such a file.
- **`num_replicas`** is for roles whose `replicas` is a number. For autoscaled roles, write
  `autoscaling_config` under `deployments` from the first deployment on, with
  `policy: {policy_function: "actors.autoscaling.policy:ScaleByOngoing"}`. Its bounds then change
  live. Adding it later, or changing the policy, restarts everything.
- **`ray_actor_options`** replaces all such options of the deployment, so repeat all of them:
  `num_cpus`, `num_gpus`, `resources`, `label_selector`, and `runtime_env: {env_vars: ...}` with
  `environment` and the variables that Tandem sets. For engines these are `VLLM_NO_USAGE_STATS=1`
  and `VLLM_API_KEY=`; with a local model `HF_HUB_OFFLINE=1`; without a GPU
  `VLLM_CPU_KVCACHE_SPACE`, `VLLM_CPU_OMP_THREADS_BIND`, `OMP_NUM_THREADS`, and, unless
  `enforce_eager` is false, `TORCHDYNAMO_DISABLE=1`. For routers they are
  `RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD=0` and `RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP=0`.
  `serve build app.main:app` prints them for default settings.
  With `executor: ray`, `placement_group_bundles` contains the GPUs, and
  `placement_group_bundle_label_selector` the labels.
- **`max_replicas_per_node`** is 1 for `placement: apart`.

Once changes have been tried, the next planned restart is the time to move them into `args`.
"""

_SEVERAL = """## Several models

`models` is a list of models behind one endpoint. Each has the keys `model` to `decode` of
[the service](#the-service), and engines, slots, routing state and adapters of its own. All other
keys are shared. `configs/two-models.yaml` is a complete configuration. An excerpt of another one:

```yaml
args:
  models:
    - model: /models/qwen3-8b
      served_model_name: [qwen3, qwen3-latest]   # the name and an alias
      engine: {max_model_len: 8192}
      decode: {replicas: 2, num_gpus: 1}
      prefill: {num_gpus: 1}
    - model: /models/gemma-3-4b
      served_model_name: gemma
      prefill: {num_gpus: 1}
      decode: {num_gpus: 1}
  router: {http_port: 8000}
```

- A request's `model` selects the engines: a name, an alias, or the name of an adapter. It must name
  one; an unknown name gets vLLM's 404 ([HTTP API](http-api.md#several-models)).
- The deployments are named after the first name of each model, `Prefill-qwen3` and `Decode-qwen3`;
  characters other than letters, digits and `._-` become `-`. Use these names under `deployments`.
- Each role is scaled by itself, with an autoscaling_config as `replicas`. `ScaleTogether` scales
  the roles of one model only; `make run` and `make doctor` refuse it with `models`. Ray's own
  commands accept it: such a service starts, and its roles keep their numbers of replicas.
- The limits of `router` hold for all models together.
- A change of `args`, such as another model in the list, restarts all replicas. To add a model
  without restarts, deploy a second application with its own port.
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
        "([the KV store](kv-store.md)). Not for accelerators yet."
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
    parts = [_INTRODUCTION, _CHANGES, _SEVERAL]
    for title, model, sections in SECTIONS:
        wrapped = textwrap.fill(_TEXTS[title], 100, break_on_hyphens=False)
        parts.append(f"## {title}\n\n{wrapped}\n\n| key | default | change | meaning |\n|---|---|---|---|")
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
    how = change.cost if change.option is None else f"{change.cost}: `{change.option}`"
    if field.default_factory is not None:
        default = repr(field.default_factory())
    elif field.default is PydanticUndefined:
        default = "required"
    elif isinstance(field.default, BaseModel):
        default = "see below"
    else:
        default = repr(field.default)
    shown = default if default in ("required", "see below") else f"`{default}`"
    return f"| `{name}` | {shown} | {'' if shown == 'see below' else how} | {field.description or ''} |"


if __name__ == "__main__":
    print(reference(), end="")
