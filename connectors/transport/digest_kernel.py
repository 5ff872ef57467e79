"""Triton kernel of the sums of ``device_digest.py``: all segments of a write in one launch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def segment_sums(
    order,
    table,
    keys,
    sums,
    SEGMENT: tl.constexpr,
    LONGEST: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Store the sum of every segment of the jobs. ``batched_digest.py`` describes order and table.

    The grid is (tiles of ROWS segments of the largest job, jobs). ``SEGMENT`` bytes make a whole
    segment; the longest has ``LONGEST`` words. An iteration reads ROWS segments by WORDS words.
    """
    job = order + tl.program_id(1) * 6
    first, pieces, units = tl.load(job), tl.load(job + 1), tl.load(job + 2)
    ids, length, out = order + tl.load(job + 3), tl.load(job + 4), tl.load(job + 5)
    segments = tl.cdiv(length, SEGMENT)
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = at < units * pieces * segments
    segment, unit = at % segments, at // segments // pieces
    piece = table + (first + at // segments % pieces) * 3
    block = tl.load(ids + unit, mask=live, other=0)
    part = tl.load(ids + units + unit, mask=live, other=0)
    address = tl.load(piece, mask=live, other=0) + tl.load(piece + 1, mask=live, other=0) * block
    address += tl.load(table + tl.load(piece + 2, mask=live, other=0) + part, mask=live, other=0) + segment * SEGMENT
    size = tl.where(live, tl.minimum(length - segment * SEGMENT, SEGMENT), 0)
    total = tl.zeros((ROWS, WORDS), tl.int64)
    for start in range(0, LONGEST, WORDS):
        word = start + tl.arange(0, WORDS)
        key = tl.load(keys + word, mask=word < SEGMENT // 4, other=0)
        byte = word[None, :] * 4
        if ALIGNED:
            # An addition to pointers, not to addresses: Triton then knows that words are adjacent.
            at_word = address.to(tl.pointer_type(tl.int32))[:, None] + word[None, :]
            value = tl.load(at_word, mask=byte < size[:, None], other=0)
        else:
            bits = tl.zeros((ROWS, WORDS), tl.uint32)
            for k in tl.static_range(4):
                at_byte = (address[:, None] + byte + k).to(tl.pointer_type(tl.uint8))
                bits |= tl.load(at_byte, mask=byte + k < size[:, None], other=0).to(tl.uint32) << (8 * k)
            value = bits.to(tl.int32, bitcast=True)
        total += value.to(tl.int64) * key[None, :]
    tl.store(sums + out + at, tl.sum(total, 1), mask=live)
