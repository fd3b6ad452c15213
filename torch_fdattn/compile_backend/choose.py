"""Third stage: which op of ours computes the same function as a recognised attention.

The limits of our ops stand here. `choose` looks at metadata alone. It takes nothing for granted that does not hold
for every size that the graph may be called with: it adds no guards.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from torch_fdattn.compile_backend.graph.mutations import written_after
from torch_fdattn.compile_backend.graph.nodes import (
    described,
    guarding_hint,
    is_tensor,
    statically_true,
    tensor,
    value,
)
from torch_fdattn.compile_backend.masks.expressions import Lookup, Poly, atoms_of
from torch_fdattn.compile_backend.masks.hidden_rows import check as check_hidden_rows
from torch_fdattn.compile_backend.masks.structure import Structure
from torch_fdattn.compile_backend.match.attention import MatchedAttention
from torch_fdattn.compile_backend.match.operands import B, D, H, S
from torch_fdattn.compile_backend.report import Unsupported
from torch_fdattn.ops.decode.inputs import MAX_QUERY_TOKENS

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class OpCall:
    """The call of our op that replaces an attention."""

    op: str
    dtype: torch.dtype  #: to which autocast, or nothing, converts q, k and v
    structure: Structure  #: where queries stand, and what they see
    scale: float | None
    operands: tuple = ()  #: after q, k, v and what of lengths and starts there is
    options: dict = field(default_factory=dict)  #: besides those of the mask
    contiguous: bool = False  #: whether its output is, whatever the layout of q


def choose(attention: MatchedAttention) -> OpCall:
    """The call of ours that is the same function; raises `Unsupported` where there is none."""
    dtype = _dtype(attention)
    _check_writes(attention)
    _check_shapes(attention)
    scale = attention.scale
    if scale is not None and not 1e-37 <= scale <= 1e37:
        raise Unsupported("scale", f"the scale is {scale:g}, not a positive number")
    wide = [x.node for x in attention.temperatures if is_tensor(x.node)]
    if dtype == torch.float16 and any(tensor(x).dtype != dtype for x in wide):
        raise Unsupported("scale", "float16 queries times a wider temperature may overflow")
    check_hidden_rows(attention)
    _check_gradients(attention)
    # Kernels are made for a head dim, as are all graphs but those that were called with several.
    for operand in (attention.q, attention.v):
        int(operand.size(D))
    structure = attention.mask.structure
    if structure.chunk:
        return OpCall("varlen_attention", dtype, structure, scale)
    if not _is_decode(attention):
        return OpCall("attention", dtype, structure, scale)
    start = structure.start
    if structure.right == 0 and structure.lengths is None and _is_from_data(start):
        # What follows from it, and keeps decode from the rest of a cache.
        structure = replace(structure, lengths=start + attention.sizes.poly("queries"))
        attention.mask.roots[structure.lengths] = attention.mask.roots[start]
    return OpCall("decode", dtype, structure, scale)


def _is_from_data(start: Poly | None) -> bool:
    return start is not None and any(isinstance(atom, Lookup) for atom in atoms_of(start))


def _is_decode(attention: MatchedAttention) -> bool:
    q_len, kv_len = attention.q.size(S), attention.k.size(S)
    few = statically_true(q_len >= 1, q_len <= MAX_QUERY_TOKENS)
    needs_gradient = tensor(attention.result).requires_grad
    return few and not needs_gradient and not statically_true(kv_len <= q_len)


def _dtype(attention: MatchedAttention) -> torch.dtype:
    """The result's dtype, which is q's, k's and v's, or what autocast makes of them."""
    inputs = [tensor(x.node) for x in (attention.q, attention.k, attention.v)]
    result = tensor(attention.result)
    device = result.device
    if device.type not in ("cpu", "cuda") or any(x.device != device for x in inputs):
        raise Unsupported("device")
    dtypes = {x.dtype for x in (*inputs, result)}
    if not dtypes <= set(_DTYPES):
        raise Unsupported("dtype", f"the dtypes are {sorted(map(str, dtypes))}")
    if torch.float64 in dtypes and (len(dtypes) > 1 or device.type != "cpu"):
        raise Unsupported("float64")
    masks = (tensor(x.term.node).dtype for x in attention.mask.kept if x.condition is None)
    if torch.float64 in masks and device.type != "cpu":
        raise Unsupported("float64")
    return result.dtype


def _check_writes(attention: MatchedAttention) -> None:
    """What was read step by step is now read at the end: nothing may have written to it by then.

    What is read after a write may be read later still: a cache that is updated behind a transposed q.
    """
    writer = written_after(attention.between, attention.result)
    if writer is not None:
        raise Unsupported("in-place", f"{described(writer)} may write in place between its parts")


def _check_gradients(attention: MatchedAttention) -> None:
    """Gradients flow as they did: nothing in between was cut off by torch.no_grad()."""
    if not tensor(attention.result).requires_grad:
        # Grad mode is off where the result stands, or else nothing that goes into it wants a gradient.
        sources = [tensor(x.node) for x in (attention.q, attention.k, attention.v)]
        sources += [tensor(kept.term.node) for kept in attention.mask.kept]
        sources += [tensor(x.node) for x in attention.temperatures if is_tensor(x.node)]
        sources += [tensor(attention.sinks[1])] if attention.sinks is not None else []
        last = [x for x in attention.result.all_input_nodes if tensor(x).requires_grad]
        _unsupported_if(not last and any(x.requires_grad for x in sources), "gradient")
        return
    for node in attention.between:
        needed = any(is_tensor(x) and value(x).requires_grad for x in node.all_input_nodes)
        # (A maximum with its index is a pair, whose first half comes next.)
        cut_off = is_tensor(node) and not tensor(node).requires_grad
        _unsupported_if(needed and cut_off, "gradient")


def _unsupported_if(condition: bool, code: str, detail: str = "") -> None:
    if condition:
        raise Unsupported(code, detail)


def _check_shapes(attention: MatchedAttention) -> None:
    q, k, v = attention.q, attention.k, attention.v
    for dim in (q.size(D), v.size(D)):
        hint = guarding_hint(dim)
        if hint is None or hint % 8 or not 16 <= hint <= 256:
            raise Unsupported("head-dim", f"a head dim is {dim}, no multiple of 8 from 16 to 256")
    # The original ran: where sizes are symbols, it needs what ours needs, but that batches of one are broadcast.
    for a, b in ((q, k), (k, v)):
        if not statically_true(a.size(B) == b.size(B)):
            broadcast = not statically_true(a.size(B) > 1, b.size(B) > 1)
            _unsupported_if(broadcast, "batch-broadcast", f"batches of {a.size(B)} and {b.size(B)}")
    for what, a, b in (("q and k", q.size(D), k.size(D)), ("k and v", k.size(S), v.size(S))):
        _unsupported_if(statically_true(a != b), "shape", f"{what} have sizes {a} and {b}")
    equal = statically_true(k.size(H) == v.size(H), k.size(H) >= 1)
    if not (equal and statically_true(q.size(H) % k.size(H) == 0)):
        raise Unsupported("heads", f"{q.size(H)} heads of q, {k.size(H)} of k and {v.size(H)} of v")
