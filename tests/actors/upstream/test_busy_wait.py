"""Engines without a GPU block soon after a step instead of polling for a second."""

from __future__ import annotations

import inspect

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from actors.upstream.vllm_processes.busy_wait import shorten_busy_wait


def test_readers_block_after_the_shorter_time() -> None:
    before = SpinCondition.__init__.__defaults__
    try:
        shorten_busy_wait(0.25)
        assert inspect.signature(SpinCondition).parameters["busy_loop_s"].default == 0.25
        assert before == (1,), "vLLM's own default has changed"
    finally:
        SpinCondition.__init__.__defaults__ = before
