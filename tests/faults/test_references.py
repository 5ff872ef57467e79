"""Altered references differ from genuine ones in the named property only."""

from __future__ import annotations

import copy
import random

import pytest

from tests.campaigns.faults.references import NotApplicable, altered

GENUINE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "engine-7",
    "remote_request_id": "cmpl-1",
    "remote_block_ids": [[4, 5, 6], [9]],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 90,
    "tp_size": 1,
}
KEY = {
    "altered engine id": "remote_engine_id",
    "altered host": "remote_host",
    "closed port": "remote_port",
    "foreign port": "remote_port",
    "altered request id": "remote_request_id",
    "altered token count": "remote_num_tokens",
    "altered TP size": "tp_size",
    "block ids shifted": "remote_block_ids",
    "block ids reversed": "remote_block_ids",
    "block ids out of range": "remote_block_ids",
    "a block missing": "remote_block_ids",
}


@pytest.mark.parametrize("variant", KEY)
def test_only_what_is_named_changes(variant: str) -> None:
    """For any random draw; a connector without the key is left alone, and the report says so."""
    before = copy.deepcopy(GENUINE)
    for seed in range(20):
        changed = altered(variant, GENUINE, random.Random(seed), 80)
        assert {key for key in GENUINE if changed.get(key) != GENUINE[key]} == {KEY[variant]}
    assert before == GENUINE
    with pytest.raises(NotApplicable):
        altered(variant, {"do_remote_prefill": True}, random.Random(0), 80)


def test_blocks_are_altered_group_by_group() -> None:
    """The order of one block cannot be reversed."""
    assert altered("block ids reversed", GENUINE, random.Random(0), 80)["remote_block_ids"] == [[6, 5, 4], [9]]
    assert altered("a block missing", GENUINE, random.Random(0), 80)["remote_block_ids"] == [[4, 5], []]
    with pytest.raises(NotApplicable):
        altered("block ids reversed", GENUINE | {"remote_block_ids": [[4], [9]]}, random.Random(0), 80)
