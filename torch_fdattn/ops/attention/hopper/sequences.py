"""Which tokens of packed sequences a tile has: `ops/packed.py` says how blocks are numbered.

Nothing here trusts the device's numbers with an address: whatever cu_seqlens hold, first tokens and lengths stay within
the tensors. Tokens before the first and behind the last sequence are those of the sequences -1 and B, which have no keys.
"""
# Without `from __future__ import annotations`: aggregates ask for the types of their fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate


@aggregate
class Span:
    """Tokens next to each other."""

    first: gl.tensor
    length: gl.tensor

    @gluon.constexpr_function
    def __init__(self, first, length):
        self.first = first
        self.length = length


@gluon.jit
def begun_before(block, cu_seqlens, sequences, tokens, ROWS: gl.constexpr):
    """How many sequences begin in blocks before this one, and in it, by bisection; that one of them is the block's."""
    low = gl.to_tensor(0)
    high = sequences + 1
    while low < high:
        entry = (low + high) // 2
        if _begin(cu_seqlens, entry, tokens) // ROWS + entry < block:
            low = entry + 1
        else:
            high = entry
    return low


@gluon.jit
def span(cu_seqlens, sequence, sequences, tokens):
    """Of a sequence, of -1 and of `sequences`."""
    begin = gl.to_tensor(0)
    end = tokens
    if sequence >= 0:
        begin = _begin(cu_seqlens, sequence, tokens)
    if sequence < sequences:
        end = _begin(cu_seqlens, sequence + 1, tokens)
    return Span(begin, gl.maximum(end - begin, 0))


@gluon.jit
def _begin(cu_seqlens, sequence, tokens):
    begin = gl.load(cu_seqlens + sequence).to(gl.int64)
    return gl.minimum(gl.maximum(begin, 0), tokens).to(gl.int32)
