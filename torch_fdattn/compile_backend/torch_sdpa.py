"""On a CPU a compiled graph keeps torch's own SDPA where it has it: that is what our ops call there.

Inductor calls it without the Python of an op, 0.1 ms less a site. Ours are the sites where we are much faster, and all
attention that is written out: torch's kernel gives 0 for a query with NaN alone in its scores, the softmax gives NaN.
"""

from __future__ import annotations

import torch

from torch_fdattn.compile_backend.choose import OpCall
from torch_fdattn.compile_backend.graph.nodes import statically_true, tensor
from torch_fdattn.compile_backend.match import sdpa
from torch_fdattn.compile_backend.match.attention import MatchedAttention
from torch_fdattn.compile_backend.match.operands import S
from torch_fdattn.ops.attention import cpu

#: Keys from which on a window is worth our op, which reads the window's band alone.
WINDOW_KEYS = 1024
#: And a decode in half precision, which torch's kernel computes in it, ours in float32.
DECODE_KEYS = 512


def applies(lower: str) -> bool:
    """Whether graphs that are lowered so call it: without Inductor our ops stay, for who looks at them."""
    return lower == "inductor" and not cpu.REFERENCE_ALONE


def stays(attention: MatchedAttention, call: OpCall) -> bool:
    """Whether an SDPA site is left as it is."""
    on_cpu = tensor(attention.result).device.type == "cpu"
    return attention.form == sdpa.FORM and on_cpu and not _is_slow(attention, call)


def _is_slow(attention: MatchedAttention, call: OpCall) -> bool:
    """Where torch's kernel takes several times as long as ours (docs/notes/cpu.md)."""
    if call.op == "decode":
        many = statically_true(attention.k.size(S) >= DECODE_KEYS)
        return many and call.dtype in (torch.bfloat16, torch.float16)
    return call.structure.left >= 0 and statically_true(attention.k.size(S) >= WINDOW_KEYS)
