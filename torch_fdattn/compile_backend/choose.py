"""An attention that was recognised, whatever it was written as, and which op computes the same.

`choose` is where our ops' limits stand. It looks at metadata alone, and takes nothing for granted that is
not known for every size the graph may be called with: it adds no guards.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from torch_fdattn.compile_backend.graph.mutations import written_after
from torch_fdattn.compile_backend.graph.nodes import (
    described,
    is_tensor,
    statically_true,
    tensor,
    value,
)
from torch_fdattn.compile_backend.masks.expressions import Lookup, Poly, atoms_of
from torch_fdattn.compile_backend.masks.hidden_rows import check as check_hidden_rows
from torch_fdattn.compile_backend.masks.structure import Sizes, Structure
from torch_fdattn.compile_backend.masks.terms import RecoveredMask
from torch_fdattn.compile_backend.match.operands import B, D, H, Operand, S, trace_operand
from torch_fdattn.compile_backend.report import REASONS, Unsupported
from torch_fdattn.ops.decode.inputs import MAX_QUERY_TOKENS

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_CUT_OFF = REASONS["gradient"]


@dataclass
class Attention:
    form: str
    result: Node  #: what is to be replaced
    q: Operand
    k: Operand
    v: Operand
    out_dims: tuple[int, ...] = (0, 1, 2, 3)  #: which of (B, H, S, D) each dim of the result is
    scale: float | None = None
    softcap: float = 0.0
    sinks: tuple[Poly, Node] | None = None  #: and the scores with them beside
    mask: RecoveredMask = field(default_factory=RecoveredMask)
    masked: bool = False  #: whether the graph holds a mask, whatever became of it
    between: list[Node] = field(default_factory=list)  #: recognised, and no more needed for this
    notes: list[str] = field(default_factory=list)

    @property
    def sizes(self) -> Sizes:
        return sizes(self.q, self.k)


def sizes(q: Operand, k: Operand) -> Sizes:
    """Of the scores."""
    return Sizes(q.size(B), q.size(H), q.size(S), k.size(S))


@dataclass(frozen=True)
class OpCall:
    """A call of ours."""

    op: str
    dtype: torch.dtype  #: to which autocast, or nothing, converts q, k and v
    structure: Structure  #: where queries stand, and what they see
    scale: float | None
    operands: tuple = ()  #: behind q, k, v and what of lengths and starts there is
    options: dict = field(default_factory=dict)  #: beside those of the mask
    contiguous: bool = False  #: whether its output is, whatever the layout of q


def choose(found: Attention) -> OpCall:
    """The call of ours that is the same function; raises `Unsupported` where there is none."""
    dtype = _dtype(found)
    _check_writes(found)
    _check_shapes(found)
    if found.scale is not None and not 1e-37 <= found.scale <= 1e37:
        raise Unsupported("scale", f"the scale is {found.scale:g}, not a positive number")
    check_hidden_rows(found)
    structure = found.mask.structure
    if structure.chunk:
        return OpCall("varlen_attention", dtype, structure, found.scale)
    if not _is_decode(found):
        return OpCall("attention", dtype, structure, found.scale)
    start = structure.start
    if structure.right == 0 and structure.lengths is None and _is_from_data(start):
        # What follows from it, and keeps decode from the rest of a cache.
        structure = replace(structure, lengths=start + found.sizes.poly("queries"))
        found.mask.roots[structure.lengths] = found.mask.roots[start]
    return OpCall("decode", dtype, structure, found.scale)


def _is_from_data(start: Poly | None) -> bool:
    return start is not None and any(isinstance(atom, Lookup) for atom in atoms_of(start))


def unrepeated(found: Operand, attention: Attention) -> Operand:
    """K or V without copies of its heads; as it was where there are none."""
    path: list[Node] = []
    source = trace_operand(found, path, scalings=False)
    if not source.repeats:
        return found
    attention.between += path
    note = "heads of K and V not repeated"
    if note not in attention.notes:
        attention.notes.append(note)
    return source


def _is_decode(found: Attention) -> bool:
    q_len, kv_len = found.q.size(S), found.k.size(S)
    few = statically_true(q_len >= 1) and statically_true(q_len <= MAX_QUERY_TOKENS)
    wanted = tensor(found.result).requires_grad
    return few and not wanted and not statically_true(kv_len <= q_len)


def _dtype(found: Attention) -> torch.dtype:
    """The result's dtype, which is q's, k's and v's, or what autocast makes of them."""
    inputs = [tensor(x.node) for x in (found.q, found.k, found.v)]
    result = tensor(found.result)
    device = result.device
    if device.type not in ("cpu", "cuda") or any(x.device != device for x in inputs):
        raise Unsupported("device")
    dtypes = {x.dtype for x in (*inputs, result)}
    if not dtypes <= set(_DTYPES):
        raise Unsupported("dtype", f"the dtypes are {sorted(map(str, dtypes))}")
    if torch.float64 in dtypes and (len(dtypes) > 1 or device.type != "cpu"):
        raise Unsupported("float64")
    masks = (tensor(x.term.node).dtype for x in found.mask.kept if x.condition is None)
    if torch.float64 in masks and device.type != "cpu":
        raise Unsupported("float64")
    return result.dtype


def _check_writes(found: Attention) -> None:
    """What was read step by step is now read at the end: nothing may have written to it by then.

    What is read after a write may be read later still: a cache that is updated behind a transposed q.
    """
    writer = written_after(found.between, found.result)
    if writer is not None:
        raise Unsupported("in-place", f"{described(writer)} may write in place between its parts")


def check_gradients(found: Attention) -> None:
    """Gradients flow as they did: nothing in between was cut off by torch.no_grad()."""
    if not tensor(found.result).requires_grad:
        # Grad mode is off where the result stands, or else nothing that goes into it wants a gradient.
        sources = [tensor(x.node) for x in (found.q, found.k, found.v)]
        sources += [tensor(kept.term.node) for kept in found.mask.kept]
        sources += [tensor(found.sinks[1])] if found.sinks is not None else []
        last = [x for x in found.result.all_input_nodes if tensor(x).requires_grad]
        _unsupported_if(not last and any(x.requires_grad for x in sources), "gradient", _CUT_OFF)
        return
    for node in found.between:
        wanted = any(is_tensor(x) and value(x).requires_grad for x in node.all_input_nodes)
        # (A maximum with its index is a pair, whose first half comes next.)
        cut_off = is_tensor(node) and not tensor(node).requires_grad
        _unsupported_if(wanted and cut_off, "gradient", _CUT_OFF)


def _unsupported_if(condition: bool, code: str, detail: str) -> None:
    if condition:
        raise Unsupported(code, detail)


def _check_shapes(found: Attention) -> None:
    q, k, v = found.q, found.k, found.v
    for dim in (q.size(D), v.size(D)):
        if not (
            statically_true(dim % 8 == 0)
            and statically_true(dim >= 16)
            and statically_true(dim <= 256)
        ):
            raise Unsupported(
                "head-dim", f"a head dim is {dim}, not known as a multiple of 8 from 16 to 256"
            )
    # The original ran: where sizes are symbols, it needs what ours needs, but that batches of one are broadcast.
    for a, b in ((q, k), (k, v)):
        if not statically_true(a.size(B) == b.size(B)):
            broadcast = not (statically_true(a.size(B) > 1) and statically_true(b.size(B) > 1))
            _unsupported_if(broadcast, "batch-broadcast", f"batches of {a.size(B)} and {b.size(B)}")
    for what, a, b in (("q and k", q.size(D), k.size(D)), ("k and v", k.size(S), v.size(S))):
        _unsupported_if(statically_true(a != b), "shape", f"{what} have sizes {a} and {b}")
    if not (
        statically_true(k.size(H) == v.size(H))
        and statically_true(k.size(H) >= 1)
        and statically_true(q.size(H) % k.size(H) == 0)
    ):
        raise Unsupported("heads", f"{q.size(H)} heads of q, {k.size(H)} of k and {v.size(H)} of v")
