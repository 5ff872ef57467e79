"""Wrong requests (`wrong.yaml`): status and error of both sides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from configs.settings.service import DEMO_SERVED_NAME
from tests.campaigns.differential.cases import ABSENT, JSON_TYPE, RESPONSES, Case, Request, request
from tests.campaigns.differential.features import BUILDERS, table
from tests.campaigns.differential.others import FRAMEWORK

OURS = "the router refuses it before any engine sees it, in its own words"

OF_THE_ROUTER: tuple[tuple[str, Any], ...] = (("n", 100_000), ("structured_outputs", "x"), ("structured_outputs", []))
"""Wrong values that the router refuses itself, and vLLM too."""

BREAKS = "vLLM's Responses API breaks the connection at an engine's refusal in a stream"
BROKEN_OFF = ((RESPONSES, "structured_outputs", {"regex": "["}),)
"""Values to which the single server does not answer if the request is streamed."""


def wrong_cases() -> Iterator[Case]:
    """Yield each wrong value in an otherwise valid request; a field's first also streamed."""
    tables = table("wrong.yaml")
    for path, build in BUILDERS.items():
        for part in (tables["everywhere"], {} if path == RESPONSES else tables["generating"], tables[path]):
            for field, values in part.items():
                for value in values:
                    shown = "left out" if value is ABSENT else repr(value)[:60]
                    name = f"{path} wrong {field}: {shown}"
                    wrong = request(path, build(name, **{field: value}))
                    ours = OURS if (field, value) in OF_THE_ROUTER else ""
                    words: dict[str, Any] = {"message_differs": ours, "only_status": ours if field == "n" else ""}
                    yield Case(name, (wrong,), **words)
                    if value is values[0] and field not in ("stream", "stream_options"):
                        name += ", streamed"
                        breaks = BREAKS if (path, field, value) in BROKEN_OFF else ""
                        streamed = request(path, build(name, stream=True, **{field: value}))
                        yield Case(name, (streamed,), **words, unanswered=breaks)
    for path, fields in tables["together"]:
        name = f"{path} wrong together: {sorted(fields)} {str(sorted(fields.items()))[:120]}"
        yield Case(name, (request(path, BUILDERS[path](name, **fields)),))


def broken_cases() -> Iterator[Case]:
    """Yield bodies that are no valid request, and unusual content types."""
    bodies = {
        "no JSON": b"{",
        "a list": b"[]",
        "text": b'"x"',
        "nothing": b"",
        "null": b"null",
        "no UTF-8": b'{"a": "\xff"}',
    }
    for path in BUILDERS:
        for name, content in bodies.items():
            framework = FRAMEWORK if name == "no UTF-8" else ""
            yield Case(f"{path} {name}", (Request(path, content),), message_differs=OURS, only_status=framework)
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            headers = JSON_TYPE | {"content-type": kind}
            body = BUILDERS[path](f"{path} {kind}")
            yield Case(f"{path} sent as {kind or 'nothing'}", (request(path, body, headers),))
        body = BUILDERS[path](f"{path} charset")
        headers = {"content-type": "application/json; charset=utf-8"}
        yield Case(f"{path} sent with a charset", (request(path, body, headers),), "remote")
        yield Case(f"{path} nothing but a model", (request(path, {"model": DEMO_SERVED_NAME}),))
        yield Case(f"{path} an empty object", (request(path, {}),))
