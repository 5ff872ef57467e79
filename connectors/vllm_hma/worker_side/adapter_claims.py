"""Add the identities of LoRA adapters to prompt digests, and check them while prompts run.

Each rank adds the identity of the content that it has loaded (``model/adapters.py``): both requests
of a transfer must use the same. A producer rank also checks before, during and after each forward
pass that it has not changed: vLLM may load an adapter in place, or again from changed files.
"""

from __future__ import annotations

import uuid
from dataclasses import replace

from connectors.protocol.params import prompt_digest
from connectors.vllm_hma.model.adapters import UNKNOWN, Adapter, AdapterLoads
from connectors.vllm_hma.orders import Expect, Receive


class AdapterClaims:
    def __init__(self, loads: AdapterLoads) -> None:
        self._loads = loads
        # Adapter and its identity in the prompt digest, by request id.
        self._claims: dict[str, tuple[Adapter, str]] = {}
        self._checked_loads = loads.loads

    def __len__(self) -> int:
        return len(self._claims)

    def expect(self, expect: Expect) -> Expect:
        """Add the adapter's identity to the digest, and check it until ``finished``."""
        if expect.adapter is None:
            return expect
        identity = self._loads.identity(expect.adapter)
        self._claims[expect.request_id] = expect.adapter, identity
        return replace(expect, prompt_digest=_digest(expect.prompt_digest, identity))

    def receive(self, receive: Receive) -> Receive:
        if receive.adapter is None:
            return receive
        return replace(receive, prompt_digest=_digest(receive.prompt_digest, self._loads.identity(receive.adapter)))

    def finished(self, request_id: str) -> None:
        self._claims.pop(request_id, None)

    def take_outdated(self) -> set[str]:
        if self._checked_loads == self._loads.loads:  # vLLM calls this for every layer
            return set()
        self._checked_loads = self._loads.loads
        found = {
            each for each, (adapter, identity) in self._claims.items() if identity != self._loads.identity(adapter)
        }
        for request_id in found:
            del self._claims[request_id]
        return found


def _digest(prompt: str, identity: str) -> str:
    """A prompt with an adapter of UNKNOWN content has a digest that differs from all others."""
    return prompt_digest((), [prompt, identity if identity != UNKNOWN else uuid.uuid4().hex])
