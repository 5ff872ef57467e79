"""Writes the configuration reference from the settings: `python -m configs.reference > docs/configuration.md`.

A test compares the committed page with what this prints.
"""

from __future__ import annotations

import textwrap
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from configs.settings import (
    AuthSettings,
    CpuSettings,
    KVStoreSettings,
    RoleSettings,
    RouterLimits,
    RouterSettings,
    RoutingSettings,
    ScalingSettings,
    ServiceSettings,
    TransferSettings,
)

_INTRODUCTION = """# Configuration reference

<!-- Written by `python -m configs.reference`; do not edit by hand. -->

A configuration is a Ray Serve config file. These are the keys of `args` under Tandem's application.
Unknown keys and values out of range stop the start with a message that names them. Times are in
seconds (`_s`), sizes in bytes (`_bytes`) or GiB (`_gib`). The files in `configs/` are complete
examples.
"""

_SECTIONS: tuple[tuple[str, type[BaseModel], str], ...] = (
    ("The service", ServiceSettings, "`args:`"),
    (
        "`prefill` and `decode`",
        RoleSettings,
        "One set of keys per role. `engine` here overrides `engine` of the service.",
    ),
    (
        "`transfer`",
        TransferSettings,
        "The KV connector: how engines reach each other, and the deadlines of a transfer ([protocol](protocol.md)).",
    ),
    (
        "`store`",
        KVStoreSettings,
        "Engines of both roles store the KV of prompts and answers, and load it instead of computing it "
        "([the KV store](kv-store.md)). Not for accelerators yet.",
    ),
    (
        "`router`",
        RouterSettings,
        "The keys from `request_timeout_s` on change at run time through Serve's `user_config` of the `Router` "
        "deployment; a change of the others replaces the routers.",
    ),
    (
        "`router.routing`",
        RoutingSettings,
        "Which engines serve a request ([routing](routing.md)). These keys change at run time too.",
    ),
    ("`auth`", AuthSettings, "API keys."),
    ("`cpu`", CpuSettings, "For roles without `num_gpus`."),
    (
        "`autoscaling_policy`",
        ScalingSettings,
        "A key beside `args`: `autoscaling_policy: {policy_function: actors.autoscaling.policy:ScaleTogether, "
        "policy_kwargs: {...}}`. The table lists its `policy_kwargs`. Bounds and delays are those of each role's "
        "`replicas` (`min_replicas`, `max_replicas`, `look_back_period_s`, `upscale_delay_s`, `downscale_delay_s`). "
        "Without this policy, each role is fixed or scaled separately ([scaling](scaling.md)).",
    ),
)


def reference() -> str:
    """The page, as Markdown."""
    parts = [_INTRODUCTION]
    for title, model, text in _SECTIONS:
        wrapped = textwrap.fill(text, 100, break_on_hyphens=False)
        parts.append(f"## {title}\n\n{wrapped}\n\n| key | default | meaning |\n|---|---|---|")
        parts.append("\n".join(_row(name, field) for name, field in _fields(model).items()) + "\n")
    return "\n".join(parts)


def _fields(model: type[BaseModel]) -> dict[str, Any]:
    own = model.model_fields
    if model is RouterSettings:
        limits = RouterLimits.model_fields
        return {name: own[name] for name in (*(n for n in own if n not in limits), *limits)}
    return dict(own)


def _row(name: str, field: Any) -> str:
    if field.default_factory is not None:
        default = repr(field.default_factory())
    elif field.default is PydanticUndefined:
        default = "required"
    elif isinstance(field.default, BaseModel):
        default = "see below"
    else:
        default = repr(field.default)
    shown = default if default in ("required", "see below") else f"`{default}`"
    return f"| `{name}` | {shown} | {field.description or ''} |"


if __name__ == "__main__":
    print(reference(), end="")
