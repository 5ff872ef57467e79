"""Fails if the source of a private symbol changes on which `connectors/vllm_hma/upstream`
depends.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from connectors.vllm_hma import upstream
from testing.source_digests import digest, source_of

GUARDS: dict[str, dict[str, str]] = {
    "vllm_cpu_attention": {
        "vllm/v1/attention/backends/cpu_attn.py:_get_attn_isa": "8f1cbc670bcd",
    },
    "vllm_request_prompt": {
        "vllm/v1/core/sched/output.py:NewRequestData": "f0fa549ca8c7",
        "vllm/v1/core/sched/scheduler.py:Scheduler._update_after_schedule": "51bdf1970b18",
        "vllm/v1/request.py:Request.__init__": "b7b816b65290",
    },
}
"""For each file of `connectors/vllm_hma/upstream`: `file:symbol` in an installed package, and
its digest.
"""


@pytest.mark.parametrize("part", sorted(GUARDS))
def test_upstream_code_is_what_the_connector_was_written_for(part: str) -> None:
    """After an upgrade: read the change, adapt the file or delete it, then update the digest
    here.
    """
    found = {place: digest(source_of(place.split(":")[0]), place.split(":")[1]) for place in GUARDS[part]}
    assert found == GUARDS[part], f"upstream has changed under connectors/vllm_hma/upstream/{part}.py"


def test_every_private_part_has_a_guard() -> None:
    files = {path.stem for path in Path(upstream.__path__[0]).glob("*.py")} - {"__init__"}
    assert files == set(GUARDS)
