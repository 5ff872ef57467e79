"""Ranks of one engine: pipeline stages, context-parallel shards and tensor-parallel ranks.

vLLM numbers an engine's workers as (PP, PCP, TP), TP fastest (vllm/distributed/parallel_state.py):

    rank = (pp_rank * pcp_size + pcp_rank) * tp_size + tp_rank

PP divides the layers and TP the heads. Decode context parallelism (DCP) divides the tokens of each
block of full attention; it adds no ranks, but reuses those of prefill context parallelism (PCP) and
TP. PCP without DCP stores the same KV on every PCP rank. Plans support all axes; the connector
serves engines with TP only (``vllm_hma/model/translate.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from connectors.errors import PlanError

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Shard:
    """The tokens of a request that one DCP rank stores: ``rank`` of ``size``.

    Token t lies on rank ``t // interleave_tokens % size``. Example: rank 1 of 2 with
    ``interleave_tokens`` 2 stores tokens 2, 3, 6, 7, 10, 11, ... (vllm/v1/worker/block_table.py).
    A size of 1 means all tokens. Raises PlanError for values out of range.
    """

    rank: int = 0
    size: int = 1
    interleave_tokens: int = 1

    def __post_init__(self) -> None:
        divides = self.interleave_tokens > 0 if self.size > 1 else self.interleave_tokens == 1
        if not (0 <= self.rank < self.size and divides):
            raise PlanError(
                f"invalid DCP shard: rank {self.rank} of {self.size}, {self.interleave_tokens} tokens at a time"
            )

    @property
    def period(self) -> int:
        """Number of tokens after which the assignment to ranks repeats."""
        return self.size * self.interleave_tokens

    def stores(self, tokens: Tokens) -> npt.NDArray[np.bool_]:
        """Return a mask of the tokens that this rank stores."""
        stored: npt.NDArray[np.bool_] = tokens // self.interleave_tokens % self.size == self.rank
        return stored

    def local(self, tokens: Tokens) -> Tokens:
        """Return the index of each token among this rank's tokens; valid if the rank stores it."""
        return tokens // self.period * self.interleave_tokens + tokens % self.interleave_tokens

    def divides_like(self, other: Shard) -> bool:
        """Return whether ``other`` divides tokens by the same rule: equal size and interleave."""
        return self.size == other.size and self.period == other.period

    def meets(self, other: Shard) -> bool:
        """Return whether any token lies on both ranks.

        Each rank stores one range of tokens per period. The distances between ranges of the two
        ranks differ by multiples of the greatest common divisor of their periods.
        """
        first, theirs = self.rank * self.interleave_tokens, other.rank * other.interleave_tokens
        drift = math.gcd(self.period, other.period)
        nearest = ((theirs - first - self.interleave_tokens) // drift + 1) * drift
        return nearest < theirs + other.interleave_tokens - first


EVERY_TOKEN = Shard()


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes of one engine's parallel axes, with vLLM's names.

    ``interleave_tokens``  vLLM's ``cp_kv_cache_interleave_size``

    Raises PlanError for sizes that vLLM does not allow.
    """

    tp_size: int
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    interleave_tokens: int = 1

    def __post_init__(self) -> None:
        if min(self.tp_size, self.pp_size, self.pcp_size, self.dcp_size, self.interleave_tokens) <= 0:
            raise PlanError(f"parallel sizes must be positive: {self}")
        if self.pcp_size == 1 and self.tp_size % self.dcp_size:
            raise PlanError(f"tp_size {self.tp_size} must be a multiple of dcp_size {self.dcp_size}")
        if self.pcp_size > 1 and self.dcp_size not in (1, self.pcp_size, self.pcp_size * self.tp_size):
            raise PlanError(f"dcp_size {self.dcp_size} must be 1, pcp_size or pcp_size * tp_size in {self}")

    @property
    def size(self) -> int:
        """Number of ranks of the engine."""
        return self.pp_size * self.stage_size

    @property
    def stage_size(self) -> int:
        """Number of ranks of one pipeline stage."""
        return self.pcp_size * self.tp_size

    def shard(self, pcp_rank: int, tp_rank: int) -> Shard:
        """Return the shard of a rank. DCP ranks are consecutive along PCP, then along TP."""
        if self.dcp_size == 1:
            return EVERY_TOKEN
        return Shard((tp_rank * self.pcp_size + pcp_rank) % self.dcp_size, self.dcp_size, self.interleave_tokens)
