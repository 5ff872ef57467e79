"""Settings that change while the router runs: Serve calls `reconfigure` with `user_config`."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from actors.router.router import Router
from configs.settings.router import RouterLimits, RoutingSettings
from tests.actors.fleet import Handle, router_of

BUILT = RouterLimits(
    max_body_bytes=64 * 2**20, request_timeout_s=100, routing=RoutingSettings(policy="always_remote", decode_weight=2)
)


def router() -> Router:
    return router_of(BUILT, Handle([]), Handle([]))


def rejected(router: Router) -> float:
    return router.metrics.value("tandem_user_config_rejected")


def test_a_change_keeps_the_other_built_settings() -> None:
    """Settings inside `routing` are kept, too: `user_config` names the changes, not all
    settings.
    """
    one = router()
    one.reconfigure({"request_timeout_s": 120, "routing": {"decode_weight": 3}})
    assert one.limits == BUILT.model_copy(
        update={"request_timeout_s": 120.0, "routing": RoutingSettings(policy="always_remote", decode_weight=3)}
    )


def test_a_key_that_is_taken_away_returns_to_its_built_value() -> None:
    """The file determines the settings, not the order of its versions."""
    one = router()
    one.reconfigure({"request_timeout_s": 120})
    one.reconfigure({"max_prompts": 7})
    assert one.limits == BUILT.model_copy(update={"max_prompts": 7})
    one.reconfigure({})
    assert one.limits == BUILT


@pytest.mark.parametrize(
    ("user_config", "told"),
    [
        ({"request_timeout": 120}, "request_timeout: no such setting; did you mean request_timeout_s?"),
        ({"request_timeout_s": -1}, "request_timeout_s: Input should be greater than 0"),
        ({"routing": {"policy": "fastest"}}, "routing.policy: Input should be"),
        ({"routing": None}, "routing: "),
        ({"http_port": 8100}, "http_port: not a key of user_config; docs/configuration.md says how to change it"),
        ("request_timeout_s", "must be a mapping"),
    ],
)
def test_a_mistake_keeps_the_settings_and_is_reported(
    user_config: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Serve would stop a replica whose `reconfigure` raises, and with it every open stream."""
    one = router()
    one.reconfigure({"request_timeout_s": 120})
    with caplog.at_level(logging.ERROR):
        one.reconfigure(user_config)
    assert one.limits == BUILT.model_copy(update={"request_timeout_s": 120.0})
    assert told in str(one.rejected_config)
    assert told in caplog.text
    assert rejected(one) == 1
    one.reconfigure({"request_timeout_s": 130})
    assert (one.limits.request_timeout_s, one.rejected_config, rejected(one)) == (130, None, 0)
