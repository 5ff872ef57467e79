"""Write the lists of keys in docs/configuration.md: `python -m configs.reference`.

A test compares the committed page with the output.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
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

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"

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


def reference() -> str:
    """Return the page with its lists of keys written again; the text around them stays."""
    heading, *parts = PAGE.read_text(encoding="utf-8").split("\n## ")
    tables = {title: (model, sections[0]) for title, model, sections in SECTIONS}
    for number, part in enumerate(parts):
        title = part.partition("\n")[0]
        if title in tables:
            model, section = tables.pop(title)
            rows = [_row(name, field, change_of(section, name)) for name, field in _fields(model).items()]
            before, _, entries = part.partition("\n- `")
            after = entries.partition("\n\n")[2]
            parts[number] = "\n".join([before, *rows, *(("", after) if after else ("",))])
    assert not tables, f"{PAGE} has no heading {', '.join(tables)}"
    return "\n## ".join([heading, *parts])


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
    PAGE.write_text(reference(), encoding="utf-8")
