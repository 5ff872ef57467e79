"""Packing of one head's tokens in a block by CPU attention, read from bytes that vLLM's op writes.

A head's page is K, then V. Each half has ``head_size / dims`` stripes, one per run of ``dims`` head
dimensions. A stripe has all tokens of the block in order, ``dims`` elements each, and can be cut at
multiples of ``tokens``. So the half, as (stripes, block_size, dims), can be cut and joined along
its middle axis, for any block size.
"""

from __future__ import annotations

import math

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

from connectors.vllm_hma.upstream.cpu_build.vllm_cpu_attention import CPU_PACKING

HEADS, HEAD = 2, 1
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KINDS = [
    *[("vec", dtype, "auto", (32, 96, 128)) for dtype in (FP32, BF16, FP16)],
    *[("vec", BF16, kind, (64,)) for kind in FP8],
    *[("vec16", dtype, "auto", (64, 80)) for dtype in (FP32, BF16, FP16)],
    *[("amx", BF16, kind, (32, 96, 128)) for kind in ("auto", *FP8)],
]


def write(
    isa: str, kind: str, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor
) -> None:
    """Write like ``CPUAttentionBackendImpl.do_kv_cache_update``; ``cache`` is (blocks, heads,
    tokens, K and V).
    """
    blocks, heads, tokens, content = cache.shape
    halves = cache.view(blocks, heads, 2 * tokens, content // 2).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, *halves, slots, isa, kv_cache_dtype=kind)


def empty(dtype: torch.dtype, kind: str, blocks: int, tokens: int, size: int) -> torch.Tensor:
    """Return a cache of zeros as vLLM allocates it: fp8 is stored as bytes."""
    return torch.zeros(blocks, HEADS, tokens, 2 * size, dtype=torch.uint8 if kind in FP8 else dtype)


def built(isa: str, dtype: torch.dtype, kind: str, size: int) -> bool:
    """Return whether vLLM's build for this machine has the kernels; missing ones cannot be
    tested.
    """
    key = torch.zeros(1, HEADS, size, dtype=dtype)
    try:
        write(isa, kind, key, key, torch.zeros(1, dtype=torch.int64), empty(dtype, kind, 1, 32, size))
    except RuntimeError as error:
        if "Unsupported CPU attention configuration" not in str(error):
            raise
        return False
    return True


CASES = [(isa, dtype, kind, size) for isa, dtype, kind, sizes in KINDS for size in sizes]
CASES = [case for case in CASES if built(*case)]
packings = pytest.mark.parametrize(("isa", "dtype", "kind", "size"), CASES)
HAS_AMX_MLA = hasattr(torch.ops._C, "concat_and_cache_mla_cpu")  # noqa: SLF001 - vLLM registers its kernels there
MLA = [CPUMLAImpl, *([AMXMLAImpl] if HAS_AMX_MLA else [])]


def test_what_this_machine_chooses_is_tested() -> None:
    """Cases without kernels in this build are omitted; vLLM would choose none of them here."""
    chosen = {(_get_attn_isa(dtype, 32, size), dtype) for dtype in (FP32, BF16, FP16) for size in (64, 80)}
    assert chosen <= {(isa, dtype) for isa, dtype, *_ in CASES}


def origins(isa: str, dtype: torch.dtype, kind: str, size: int, tokens: int) -> torch.Tensor:
    """Return (2, tokens * size): the source (token, dim), as token * size + dim, of each K and V
    element.
    """
    source = torch.arange(2 * tokens * size)
    found = torch.zeros_like(source)
    for digit in range(math.ceil(math.log(len(source), 8))):  # Powers of two: exact in every dtype.
        written = (2.0 ** (source // 8**digit % 8 - 3)).to(dtype).view(2, tokens, 1, size).expand(-1, -1, HEADS, -1)
        cache = empty(dtype, kind, 1, tokens, size)
        write(isa, kind, written[0].contiguous(), written[1].contiguous(), torch.arange(tokens), cache)
        page = cache[0, HEAD].flatten()
        found += ((page.view(FP8.get(kind, dtype)).float().log2() + 3).long()) * 8**digit
    return found.view(2, -1) - torch.tensor([[0], [tokens * size]])


@packings
def test_where_each_token_lies(isa: str, dtype: torch.dtype, kind: str, size: int) -> None:
    """Each granule has its own tokens, in one order for all granules, stripes and block sizes.

    Half of a granule has all of its tokens; a token has elements in every stripe, so with several
    stripes no tile is one contiguous run.
    """
    orders: list[list[torch.Tensor]] = [[], []]
    for tokens in (32, 64, 96, 128):
        for half, found in enumerate(origins(isa, dtype, kind, size, tokens)):
            dims, granule = CPU_PACKING[isa][half].dims or size, CPU_PACKING[isa][half].tokens
            assert granule is not None
            cut = found.view(size // dims, tokens // granule, granule * dims)
            token = cut // size - torch.arange(tokens // granule)[:, None] * granule
            dim = cut % size - torch.arange(size // dims)[:, None, None] * dims
            within = token * dims + dim
            assert torch.equal(within.sort().values, torch.arange(granule * dims).expand_as(within))
            assert granule == 1 or len(token[0, 0, : granule // 2 * dims].unique()) == granule
            orders[half].append(within.flatten(0, 1))
    assert [len(torch.cat(order).unique(dim=0)) for order in orders] == [1, 1]


@pytest.mark.parametrize("backend", MLA)
@pytest.mark.parametrize("tokens", [16, 32, 64])
def test_mla_keeps_plain_rows(backend: type[CPUMLAImpl | AMXMLAImpl], tokens: int) -> None:
    """Rows (block, token, latent then rope) can be cut at any token."""
    latent, rope = torch.randn(tokens + 5, 512, dtype=BF16), torch.randn(tokens + 5, 1, 64, dtype=BF16)
    cache = torch.full((3, tokens, 576), 7.0, dtype=BF16)
    expected = cache.clone().view(-1, 576)
    slots = torch.arange(tokens + 5) + tokens // 2
    expected[slots] = torch.cat([latent, rope[:, 0]], dim=1)
    backend.do_kv_cache_update(None, latent, rope, cache, slots, "auto", None)
    assert torch.equal(cache.view(-1, 576), expected)
