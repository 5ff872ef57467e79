"""The connector of a campaign."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from connectors.vllm_hma.config import parse_config
from tests.campaigns.faults.presets import PRESETS, connector


def test_presets_make_a_server_s_arguments() -> None:
    """Ours are valid for our connector; theirs name the side channel in the environment."""
    config, environment = PRESETS["tandem"].server_arguments("producer", 5700, Path("trace"))
    parsed = parse_config(config["kv_connector_extra_config"])
    assert (config["kv_role"], parsed.side_channel_port, parsed.trace_path) == ("kv_producer", 5700, "trace")
    assert environment == {}
    config, environment = PRESETS["nixl-push"].server_arguments("consumer", 5700, Path("trace"))
    assert (config["kv_connector"], config["kv_role"]) == ("NixlPushConnector", "kv_consumer")
    assert environment == {"VLLM_NIXL_SIDE_CHANNEL_PORT": "5700"}


def test_any_other_connector_is_named_by_its_configuration() -> None:
    """The campaign sets the connector's role."""
    given = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_connector_extra_config": {"a": 1}}
    found = connector(json.dumps(given))
    config, _ = found.server_arguments("producer", 1, Path("trace"))
    assert config == given | {"kv_role": "kv_producer"}
    assert not found.together


@pytest.mark.parametrize(("text", "told"), [("nix", "nixl-push"), ("{", "JSON"), ("{}", "kv_connector")])
def test_what_is_no_connector_is_refused_with_a_reason(text: str, told: str) -> None:
    """A misspelt name must not start engines."""
    with pytest.raises(ValueError, match=told):
        connector(text)
