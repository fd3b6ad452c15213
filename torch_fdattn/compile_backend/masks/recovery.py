"""Masks: what is added to scores or fills them. The one place where a mask becomes keywords of ours.

What is proven of a mask (`reader.py` reads it, `structure.py` understands it) becomes a start, a window,
lengths or slopes. What is left over stays a tensor: of a few dimensions where it depends on few, as padding does,
or else the mask itself. So no mask keeps an attention from being rewritten, but for those whose meaning our ops
lack: scores that a number replaces which may not hide them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from torch_fdattn.compile_backend.graph.constants import constant
from torch_fdattn.compile_backend.graph.mutations import written_between
from torch_fdattn.compile_backend.graph.nodes import value
from torch_fdattn.compile_backend.masks import floors
from torch_fdattn.compile_backend.masks.chunks import is_chunked
from torch_fdattn.compile_backend.masks.entries import Entry, Index, axis, index_of
from torch_fdattn.compile_backend.masks.expressible import is_expressible
from torch_fdattn.compile_backend.masks.expressions import (
    FALSE,
    TRUE,
    Condition,
    Holds,
    Lookup,
    Poly,
    as_number,
    atoms_of,
    axes_of,
    both,
    conjuncts,
    negation,
    non_negative,
    number,
)
from torch_fdattn.compile_backend.masks.hidden_rows import HiddenRows
from torch_fdattn.compile_backend.masks.reader import Reader
from torch_fdattn.compile_backend.masks.structure import (
    MaskSizes,
    Structure,
    is_for_all_keys,
    slopes,
    split,
    structured,
)
from torch_fdattn.compile_backend.masks.terms import (
    ExplicitMask,
    Floor,
    KeepAsTensors,
    MaskTerm,
    ParsedTerm,
    RecoveredMask,
)
from torch_fdattn.compile_backend.masks.values import SWALLOWS, constants, hides, lowest
from torch_fdattn.compile_backend.report import Unsupported
from torch_fdattn.ops.scores import MASK_LIMIT


def top_left(sizes: MaskSizes) -> RecoveredMask:
    """SDPA's is_causal."""
    return RecoveredMask(Structure(number(0), -1, 0).aligned(sizes, distances=False))


def sinks_of(node: Node, sizes: MaskSizes) -> Poly:
    """The sinks that are concatenated to the scores: a number of each head, or else raises `Unsupported`."""
    index = tuple(map(axis, ("b", "h", "q", "k")))
    found = Reader().read(node, index) if value(node).dim() == 4 else None
    if not isinstance(found, Poly) or axes_of(found) - {"h"} or not is_expressible(found, sizes):
        raise Unsupported(
            "scores-unknown", "a column beside the scores that is no sink of each head"
        )
    return found


class MaskRecovery:
    """Recovers the masks of one graph; remembers them, since all layers mostly share one."""

    def __init__(self, no_fully_masked_rows: bool = False) -> None:
        """no_fully_masked_rows: the caller's promise that every query sees a key."""
        self._promised = no_fully_masked_rows
        self._entries: dict[tuple, tuple[Entry, frozenset[Node]]] = {}
        #: Nodes made from masks, by (mask, what of it); `emit/mask_arguments.py` fills it.
        self.made: dict[tuple, Node] = {}

    def recover(
        self, terms: list[MaskTerm], sizes: MaskSizes, dtype: torch.dtype, until: Node, *, safe: bool,
        sinks: bool = False, groups: tuple[int, int] | None = None, floor: Floor | None = None,
    ) -> RecoveredMask:  # fmt: skip
        """What all masks together do; raises `Unsupported` where our ops cannot do it.

        dtype: of the scores; until: the node where attention happens; safe: whether it is SDPA, which gives
        zeros where -inf hides all keys; sinks: whether there are any, which no mask is added to; groups: of heads,
        and heads of a group; floor: below which no masked score is.
        """
        if not terms:
            return RecoveredMask()
        reads, makers = [], []
        for term in terms:
            index = index_of(term.dims, sizes, groups)
            read, nodes = self._parsed(term, index, sizes, dtype, until, sinks)
            reads.append(read)
            makers += nodes
        _check_writes(reads)
        rows = HiddenRows(safe, value(until).requires_grad, sinks, self._promised)
        if floor is not None and not self._promised:
            reads = [x.as_tensor() if floors.may_hide(x) else x for x in reads]
        if floor is not None and not self._promised and not floors.is_of_no_effect(reads, sizes):
            limited = floors.limited(reads, floor, rows.needs_gradient)
            reads = reads if limited is None else limited
            rows = replace(
                rows, filled=limited is not None and all(x.bias is not None for x in reads)
            )
        try:
            found = _taken_apart(reads, sizes, rows)
        except KeepAsTensors as why:
            found = rows.all_kept(reads, str(why))
        found.structure = found.structure.aligned(sizes, found.slopes is not None)
        positions = (found.structure.start, found.structure.lengths)
        if any(x is not None and isinstance(x.constant, sympy.Expr) for x in positions):
            found = rows.all_kept(reads, "mask-symbol")
        found.nodes, found.terms = makers, terms
        return found

    def condition(
        self, terms: list[MaskTerm], sizes: MaskSizes, dtype: torch.dtype, until: Node, *,
        sinks: bool = False, groups: tuple[int, int] | None = None,
    ) -> Condition | None:  # fmt: skip
        """Where scores are seen, if all masks together say that and nothing else of queries that see a key.

        Of a query that sees none they may say more (`hidden_rows.py`). None: they add something to what is seen, or may.
        """
        indices = (index_of(term.dims, sizes, groups) for term in terms)
        reads = [
            self._parsed(term, index, sizes, dtype, until, sinks)[0]
            for term, index in zip(terms, indices, strict=True)
        ]
        _check_writes(reads)
        if any(read.bias is None or read.bias.terms for read in reads):
            return None
        return both(*(read.condition for read in reads))

    def _parsed(
        self, term: MaskTerm, index: Index, sizes: MaskSizes, dtype: torch.dtype, until: Node,
        sinks: bool,
    ) -> tuple[ParsedTerm, list[Node]]:  # fmt: skip
        fake = value(term.node)
        if term.is_added and not fake.is_floating_point() and fake.dtype != torch.bool:
            raise Unsupported("mask", f"a mask of {fake.dtype} is added to the scores")
        if not term.is_added and fake.dtype != torch.bool:
            raise Unsupported("mask", f"a mask of {fake.dtype}, not bool")
        entry, visited = self._entry(term.node, index, sizes, until)
        makers = sorted(visited, key={n: i for i, n in enumerate(until.graph.nodes)}.__getitem__)
        if not term.is_added:
            seen = entry if term.kind == "visible" else negation(entry)
            fill = term.rounded(term.fill * term.factor)
            if seen == TRUE:
                return ParsedTerm(term, bias=number(0)), makers
            if not hides(fill, dtype):
                raise Unsupported(
                    "mask-value",
                    f"scores are hidden by {fill:g}, which does not hide them for certain; use -inf or "
                    "torch.finfo(dtype).min",
                )
            return ParsedTerm(term, seen, frozenset({fill}), number(0)), makers
        if fake.dtype == torch.bool:  # which adds ones
            entry = as_number(entry)
        added = entry * number(term.factor)
        numbers = [term.rounded(x) for x in constants(added)]
        if math.inf in numbers:
            raise Unsupported(
                "mask-value", "infinity is added to the scores, which makes rows of NaN"
            )
        limited = fake.dtype != torch.float16 and any(-math.inf < x < -MASK_LIMIT for x in numbers)
        limited = limited and not self._promised  # to such a query -inf is no other thing
        data = any(isinstance(x, Lookup) for x in atoms_of(entry))
        found = ParsedTerm(
            term, reason="mask-data" if data else "mask-form", limited=limited,
            infinite=-math.inf in numbers, floor=lowest(added),
            one_level=len({x for x in numbers if -math.inf < x <= SWALLOWS}) == 1,
            learned=fake.requires_grad,
        )  # fmt: skip
        # What a sum leaves of a score is a question of the dtype that it is made in.
        parts = split(added, lambda fill: hides(fill, term.dtype or dtype))
        bias = parts.bias
        if sinks and bias.terms:
            return found, makers  # what is the same for all keys changes their sum with a sink
        if is_for_all_keys(bias):
            bias = number(0)
        looked_up = (x.node for x in atoms_of(bias) if isinstance(x, Lookup))
        if fake.requires_grad != any(value(x).requires_grad for x in looked_up):
            return replace(found, reason="mask-gradient"), makers
        condition = both(*parts.conditions)
        fills = frozenset(map(term.rounded, parts.fills))
        summed = len(parts.conditions) > 1
        return replace(found, condition=condition, fills=fills, bias=bias, summed=summed), makers

    def _entry(
        self, node: Node, index: Index, sizes: MaskSizes, until: Node
    ) -> tuple[Entry, frozenset[Node]]:
        key = node, index
        if key not in self._entries:
            reader = Reader()
            entry = reader.read(node, index)
            visited = frozenset(reader.visited)
            looked_up = {x.node for x in atoms_of(entry) if isinstance(x, Lookup)}
            if looked_up:
                entry, visited = _from_entries(node, entry, visited, sizes)
            if not _is_as_read(node, visited, looked_up):
                entry, visited = _unread(node, index), frozenset()
            self._entries[key] = entry, visited
        entry, visited = self._entries[key]
        if visited and written_between(node, until, [node]) is not None:
            return _unread(node, index), frozenset()
        return entry, visited


def _check_writes(reads: list[ParsedTerm]) -> None:
    """What two masks are made of is one number for both, unless something writes it between them."""
    order = {node: i for i, node in enumerate(reads[0].term.node.graph.nodes)}
    roots = sorted((read.term.node for read in reads), key=order.__getitem__)
    looked_up = {
        atom.node for read in reads for part in (read.condition, read.bias or number(0))
        for atom in atoms_of(part) if isinstance(atom, Lookup)
    }  # fmt: skip
    if written_between(roots[0], roots[-1], looked_up) is not None:
        raise Unsupported("in-place", "what masks are made of may be written between them")


def _taken_apart(
    reads: list[ParsedTerm], sizes: MaskSizes, rows: HiddenRows, chunks: bool = True
) -> RecoveredMask:
    """What is proven as structure, and the rest kept; raises `KeepAsTensors` where all is better kept.

    chunks: whether they may be structure, which they are alone or together with causal and a window.
    """
    mask = RecoveredMask(structured(both(*(read.condition for read in reads)), sizes, chunks))
    for i, read in enumerate(reads):
        if read.bias is None or not read.bias.terms:
            continue
        alibi = None if mask.slopes else slopes(read.bias, mask.structure, sizes)
        if alibi is None or not is_expressible(alibi[0], sizes):
            kept = read.as_tensor()
            return _taken_apart([*reads[:i], kept, *reads[i + 1 :]], sizes, rows, chunks)
        mask.slopes, mask.structure = alibi
        mask.roots[mask.slopes] = read.term.node
    for poly in (mask.structure.start, mask.structure.lengths):
        if poly is not None and poly.constant is None:
            mask.roots[poly] = _root(poly, reads, sizes)
    finite = any(math.isfinite(fill) for read in reads for fill in read.fills)
    for read in reads:
        mask.kept += _kept(read, mask, sizes, finite)
    if mask.kept and mask.structure.chunk:
        return _taken_apart(reads, sizes, rows, chunks=False)
    if mask.kept or not mask.structure.is_never_empty(sizes):
        rows.settle(mask, reads)
    return mask


def _kept(
    read: ParsedTerm, mask: RecoveredMask, sizes: MaskSizes, finite: bool
) -> list[ExplicitMask]:
    """What of a term the structure does not say."""
    if read.bias is None:
        mask.reason = read.reason
        return [ExplicitMask(read.term, limited=read.limited)]
    condition = both(*(x for x in conjuncts(read.condition) if x in mask.structure.rest))
    if condition == TRUE:
        return []
    data = any(isinstance(x, Lookup) for x in atoms_of(condition))
    mask.reason = "mask-data" if data else "mask-form"
    if is_chunked(condition):
        mask.reason = "mask-chunked"
    by_rows = {"q", "k"} <= axes_of(condition)
    if not by_rows and condition != FALSE and is_expressible(condition, sizes):
        return [ExplicitMask(read.term, condition)]
    if read.bias.terms:  # which the mask holds too
        raise KeepAsTensors(mask.reason)
    if read.term.is_added and finite:
        raise KeepAsTensors("mask-chunked" if is_chunked(condition) else "mask-rows")
    return [ExplicitMask(read.term)]


def _root(poly: Poly, reads: list[ParsedTerm], sizes: MaskSizes) -> Node:
    """A mask that holds all that a polynomial is made of: there it can be computed."""
    lookups = {atom for atom in atoms_of(poly) if isinstance(atom, Lookup)}
    for read in reads:
        if lookups <= set(atoms_of(read.condition)) and is_expressible(poly, sizes):
            return read.term.node
    raise KeepAsTensors("mask-data")


def _is_as_read(root: Node, visited: frozenset[Node], looked_up: set[Node]) -> bool:
    """Whether nothing is written to while the mask is made."""
    node = root
    if not visited:
        return True
    remaining = set(visited)
    while True:
        remaining.discard(node)
        if not remaining:
            break
        node = node.prev
    return written_between(node, root, {*visited, *looked_up}) is None


def _unread(node: Node, index: Index) -> Entry:
    found = Lookup(node, index[len(index) - value(node).dim() :])
    return Holds(found) if value(node).dtype == torch.bool else Poly.atom(found)


def _from_entries(
    node: Node, entry: Entry, visited: frozenset[Node], sizes: MaskSizes
) -> tuple[Entry, frozenset[Node]]:
    """A mask that the graph makes from nothing in some unknown way: a band, if its entries are one."""
    found = constant(node)
    if found is None or found[0].dtype != torch.bool or not all(isinstance(n, int) for n in sizes):
        return entry, visited
    band = _band(found[0], sizes)
    return (entry, visited) if band is None else (band, frozenset(found[1]))


def _band(mask: Tensor, sizes: MaskSizes) -> Condition | None:
    """The condition from the first to the last diagonal that is seen, where that is all of it."""
    shape = (sizes.queries, sizes.keys)
    try:
        mask = mask.expand(torch.broadcast_shapes(mask.shape, shape)).reshape(-1, *shape)
    except RuntimeError:
        return None
    if not mask.any() or not (mask == mask[:1]).all():
        return None
    diagonals = torch.arange(shape[1]) - torch.arange(shape[0])[:, None]
    seen = diagonals[mask[0]]
    first, last = int(seen.min()), int(seen.max())
    if not torch.equal(mask[0], (diagonals >= first) & (diagonals <= last)):
        return None
    offset = axis("k") - axis("q")
    above = non_negative(number(last) - offset) if last < shape[1] - 1 else TRUE
    below = non_negative(offset - number(first)) if first > 1 - shape[0] else TRUE
    return both(above, below)
