"""On a CPU a compiled graph calls torch's own attention where that is the same function: it is what our ops call there.

Inductor calls it without the Python of an op: 0.1 ms less a site. So an SDPA site stays as it is but where ours is much
faster, and attention that is written out becomes SDPA where its mask is none or causal. All else becomes our ops, as
on a GPU. NaN and infinities in q and k are torch's then: its kernel gives 0 for a row of nothing else.
"""

from __future__ import annotations

import torch

from torch_fdattn.compile_backend.choose import OpCall
from torch_fdattn.compile_backend.graph.nodes import statically_true, tensor, value
from torch_fdattn.compile_backend.match import sdpa
from torch_fdattn.compile_backend.match.attention import MatchedAttention
from torch_fdattn.compile_backend.match.operands import D, H, S
from torch_fdattn.ops.attention import cpu

#: What a report calls it.
OP = sdpa.FORM
#: Keys from which on a window is worth our op, which reads the window's band alone.
WINDOW_KEYS = 1024
#: And a decode in half precision, which torch's kernel computes in it, ours in float32.
DECODE_KEYS = 512


def applies(lower: str) -> bool:
    """Whether graphs that are lowered so call it: without Inductor our ops stay, for who looks at them."""
    return lower == "inductor" and not cpu.REFERENCE_ALONE


def takes(attention: MatchedAttention, call: OpCall) -> bool:
    if tensor(attention.result).device.type != "cpu" or _is_slow(attention, call):
        return False
    return attention.form == sdpa.FORM or _is_plain(attention, call)


def _is_slow(attention: MatchedAttention, call: OpCall) -> bool:
    """Where torch's kernel takes several times as long as ours (docs/notes/cpu.md)."""
    if call.op == "decode":
        many = statically_true(attention.k.size(S) >= DECODE_KEYS)
        return many and call.dtype in (torch.bfloat16, torch.float16)
    return call.structure.left >= 0 and statically_true(attention.k.size(S) >= WINDOW_KEYS)


def arguments(attention: MatchedAttention, call: OpCall) -> dict:
    """Keywords of SDPA."""
    grouped = attention.q.size(H) != attention.k.size(H)
    return dict(is_causal=call.structure.right == 0, scale=call.scale, enable_gqa=grouped)


def _is_plain(attention: MatchedAttention, call: OpCall) -> bool:
    """Whether no query is without keys, and SDPA has a word for the mask."""
    mask, structure = attention.mask, call.structure
    sizes = [value(x.node).shape for x in (attention.q, attention.k, attention.v)]
    return (
        call.op in ("attention", "decode")
        and all(isinstance(size, int) for shape in sizes for size in shape)
        and attention.q.size(D) == attention.v.size(D)
        and structure.left < 0
        and structure.lengths is None
        and not structure.rest
        and (structure.right < 0 or _is_square(attention, call))
        and not (mask.kept or mask.levels or mask.empty != "zero" or mask.slopes is not None)
        and not (attention.softcap or attention.sinks)
    )


def _is_square(attention: MatchedAttention, call: OpCall) -> bool:
    equal = attention.q.size(S) == attention.k.size(S)
    return call.structure.right == 0 and call.structure.start is None and equal
