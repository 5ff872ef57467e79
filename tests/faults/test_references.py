"""Altered references differ from the genuine ones in the named property; the originals stay
unchanged.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Awaitable, Mapping
from typing import Any, cast

import pytest

from tests.campaigns.faults.references import NotApplicable, altered, send
from tests.campaigns.faults.schedule import REFERENCES
from tests.campaigns.faults.trials import Meanwhile, Question, Router, Trial

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
SINGLE = [variant for variant in REFERENCES if variant in KEY or variant.startswith("keys")]


@pytest.mark.parametrize("variant", SINGLE)
def test_only_what_is_named_changes(variant: str) -> None:
    """Other fields stay unchanged for any random draw."""
    before = copy.deepcopy(GENUINE)
    for seed in range(20):
        changed = altered(variant, GENUINE, random.Random(seed), 80)
        different = {key for key in GENUINE if key not in changed or changed[key] != GENUINE[key]}
        assert different == {KEY[variant]} if variant in KEY else 1 <= len(different) <= 2
        assert changed["do_remote_prefill"] is True
    assert before == GENUINE


def test_blocks_are_altered_group_by_group() -> None:
    """Groups have separate id spaces."""
    assert altered("block ids reversed", GENUINE, random.Random(0), 80)["remote_block_ids"] == [[6, 5, 4], [9]]
    assert altered("a block missing", GENUINE, random.Random(0), 80)["remote_block_ids"] == [[4, 5], []]


@pytest.mark.parametrize("variant", sorted(KEY))
def test_a_connector_without_the_key_is_left_alone(variant: str) -> None:
    """The report of such a connector states that the fault does not apply."""
    with pytest.raises(NotApplicable):
        altered(variant, {"do_remote_prefill": True}, random.Random(0), 80)


def test_what_would_change_nothing_does_not_apply() -> None:
    """The order of one block cannot be reversed, so the fault does not apply."""
    with pytest.raises(NotApplicable, match="short"):
        altered("block ids reversed", GENUINE | {"remote_block_ids": [[4], [9]]}, random.Random(0), 80)


class Recorder:
    """Replacement of the router: every prefill answers with a reference that names its request."""

    def __init__(self) -> None:
        self.used: list[tuple[str, str]] = []

    async def in_turn(self, trial: Trial, between: Meanwhile | None = None) -> None:
        trial.params = {"reference of": trial.request_id}
        if between is None:
            await self.decode(trial, trial.params)
        elif (params := await between(trial)) is not None:
            await self.decode(trial, params)

    async def decode(self, trial: Trial, params: Mapping[str, Any]) -> None:
        self.used.append((trial.request_id, params["reference of"]))


@pytest.mark.parametrize("variant", [variant for variant in REFERENCES if variant not in SINGLE])
async def test_a_reference_goes_with_its_request_s_id(variant: str) -> None:
    """A replay also replays the reference: for some connectors the id is the reference."""
    router = Recorder()

    def start(trial: Trial, work: Awaitable[None]) -> asyncio.Task[None]:
        return asyncio.ensure_future(work)

    async def restart() -> None:
        pass

    questions = [Question(f"{number}", 1, "") for number in range(4)]
    await send(variant, cast(Router, router), questions, random.Random(0), -1.5, restart, 80, start)
    assert router.used
    assert all(request == reference for request, reference in router.used)
