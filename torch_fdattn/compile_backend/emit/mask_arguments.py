"""A recovered mask as arguments of our ops: nodes for what tensors it takes, keywords for the rest."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from functools import cached_property, reduce

import torch
from torch._functorch.predispatch import _vmap_decrement_nesting
from torch.fx import Node

from torch_fdattn.compile_backend.emit.mask_operands import Operands
from torch_fdattn.compile_backend.graph.adder import Adder
from torch_fdattn.compile_backend.graph.mutations import written_between
from torch_fdattn.compile_backend.graph.nodes import described, equal_sizes, statically_true, value
from torch_fdattn.compile_backend.masks.expressions import Poly
from torch_fdattn.compile_backend.masks.hidden_rows import SWALLOWS
from torch_fdattn.compile_backend.masks.structure import Structure
from torch_fdattn.compile_backend.masks.terms import ExplicitMask, RowLevels
from torch_fdattn.compile_backend.match.attention import Attention
from torch_fdattn.compile_backend.match.operands import B
from torch_fdattn.compile_backend.report import Unsupported
from torch_fdattn.ops.scores import MASK_LIMIT


class MaskArguments:
    """Makes the nodes of one attention; what depends on a mask alone is made once for all layers."""

    def __init__(self, add: Adder, found: Attention, made: dict[tuple, Node]) -> None:
        self.add, self.found, self.made = add, found, made
        self.new: dict[tuple, Node] = {}
        self.adders: list[Adder] = []

    def keep(self) -> None:
        """The nodes stay: other attentions may use them."""
        self.made.update(self.new)

    def undo(self) -> None:
        for adder in reversed(self.adders):
            adder.undo()

    def positions(self, structure: Structure, q: Node) -> tuple[Node | None, Node | None]:
        """(kv_lens, q_start); q (B, H, S, D)."""
        return self._of_each(structure.lengths, q), self._of_each(structure.start, q)

    def options(self, structure: Structure, scale: float | None) -> dict:
        """Keywords; none of masks that says what is so by default."""
        found: dict = {"causal": structure.right == 0, "scale": scale}
        if structure.left >= 0:
            found["window_left"] = structure.left
        if structure.right > 0:
            found["window_right"] = structure.right
        if self.found.softcap:
            found["softcap"] = self.found.softcap
        if self.found.mask.slopes is not None:
            found["alibi_slopes"] = self._slopes(self.found.mask.slopes)
        if self.found.sinks is not None:
            found["sinks"] = self._sinks(*self.found.sinks)
        mask = self._explicit()
        if mask is not None:
            found["attn_mask"] = mask
        return found

    def _of_each(self, poly: Poly | None, q: Node) -> Node | None:
        """An int32 for each sequence."""
        if poly is None:
            return None
        size = self.found.q.size(B)
        if not isinstance(size, int):
            size = self.add.call("size", q, 0)
        constant, device = poly.constant, value(q).device
        if constant == 0:
            return self.add.call(torch.zeros, size, dtype=torch.int32, device=device)
        if isinstance(constant, int):
            return self.add.call(torch.full, (size,), constant, dtype=torch.int32, device=device)
        if constant is not None:
            raise Unsupported("mask", f"queries begin at {constant}, a symbolic number")
        root = self.found.mask.roots[poly]
        node = self._made(
            root, poly, lambda at: Operands(at, self.found.sizes, ("b",)).positions(poly)
        )
        return (
            node
            if statically_true(value(node).shape == (size,))
            else self.add.call("expand", node, size)
        )

    def _sinks(self, poly: Poly, joined: Node) -> Node:
        """(H,)."""
        made = _floating(self.add, Operands(self.add, self.found.sizes, ("h",)).number(poly))
        made = self.add.call("expand", made, self.found.sizes.heads)
        # Under torch.no_grad() a parameter and its views want a gradient, but what is computed from them does not.
        return made if value(joined).requires_grad else self.add.call("detach", made)

    def _slopes(self, poly: Poly) -> Node:
        """(B, H) or (H,)."""
        root = self.found.mask.roots[poly]
        axes, sizes = ("b", "h"), self.found.sizes
        node = self._made(
            root, poly, lambda at: _floating(at, Operands(at, sizes, axes).number(poly))
        )
        shape = sizes.batch, sizes.heads
        if statically_true(value(node).shape[0] == 1):
            node, shape = self.add.call("select", node, 0, 0), shape[1:]
        return (
            node if equal_sizes(value(node).shape, shape) else self.add.call("expand", node, *shape)
        )

    def _explicit(self) -> Node | None:
        """The one operand that all kept masks are together, boolean if none is added."""
        mask = self._together(self.found.mask.kept)
        if self.found.mask.levels is None:
            return mask
        found = self._below_highest(mask)
        return (
            self._among(found, self.filled(self.levels.fills), False)
            if self.levels.fills_apart
            else found
        )

    @property
    def levels(self) -> RowLevels:
        return self.found.mask.levels

    def of_fills(self) -> Node:
        """The mask of the attention to keys that fills hide, beside that to all others."""
        mask = self._below_highest(self._together(self.levels.terms))
        return self._among(mask, self.filled(self.levels.fills), True)

    def _below_highest(self, mask: Node) -> Node:
        highest = self._highest
        # What nothing hides below: where -inf hides all it stays.
        base = self.add.call("masked_fill", highest, self._is_infinite(highest), 0.0)
        return self.add.call(operator.sub, self._wide(mask), base)

    def of(self, kept: ExplicitMask) -> Node:
        return self._four_dims(self._of_term(kept), kept)

    def filled(self, fills: Iterable[ExplicitMask]) -> Node:
        """Whether a fill hides a key."""
        seen = [self.of(kept) for kept in fills]
        both = reduce(lambda a, b: self.add.call(operator.and_, a, b), seen)
        return self.add.call(torch.logical_not, both)

    def _among(self, mask: Node, filled: Node, wanted: bool) -> Node:
        """A mask of the keys that are filled or that are not, less those that weigh nothing in their row."""
        call = self.add.call
        others = call(torch.logical_not, filled) if wanted else filled
        nothing = call(operator.lt, mask, SWALLOWS)
        return call("masked_fill", mask, call(operator.or_, others, nothing), -math.inf)

    def _together(self, terms: Iterable[ExplicitMask]) -> Node | None:
        """Masks in the order in which they are written, over scores of zero; boolean if none holds a number."""
        found: Node | None = None
        for kept in terms:
            found = self._over(found, self.of(kept), kept)
            if kept.scale != 1 and value(found).dtype != torch.bool:
                found = self.add.call(operator.mul, found, kept.scale)
        return found

    def _over(self, found: Node | None, node: Node, kept: ExplicitMask) -> Node:
        join, is_number = self.add.call, found is not None and value(found).dtype != torch.bool
        if value(node).dtype != torch.bool:
            if found is None or is_number:
                return node if found is None else join(operator.add, found, self._wide(node, kept))
            return join("masked_fill", node, join(torch.logical_not, found), -math.inf)
        if not is_number and math.isinf(kept.fill):
            return node if found is None else join(operator.and_, found, node)
        if not is_number:
            zeros = join(torch.zeros, (), dtype=kept.term.dtype, device=value(node).device)
            if found is None:
                return join(torch.where, node, zeros, kept.fill)
            found = join(torch.where, found, zeros, -math.inf)
        found = self._wide(found, kept)  # which may not hold the number before
        return join("masked_fill", found, join(torch.logical_not, node), kept.fill)

    @cached_property
    def _highest(self) -> Node:
        """Of each row of all masks, also of those that are structure: (…, 1)."""
        made = self._wide(self._together(self.levels.terms))
        made = self.add.call("amax", made, -1, keepdim=True)
        return self.add.call("detach", made) if value(made).requires_grad else made

    def _wide(self, node: Node, kept: ExplicitMask | None = None) -> Node:
        """A mask in the dtype that it meets scores in, or at least in fp32."""
        dtype = value(node).dtype
        wanted = torch.promote_types(dtype, kept.term.dtype or dtype if kept else torch.float32)
        return node if value(node).dtype == wanted else self.add.call("to", node, wanted)

    def _is_infinite(self, highest: Node) -> Node:
        return self.add.call(operator.eq, highest, -math.inf)

    def without_swallowed(self, q: Node, k: Node) -> tuple[Node, Node]:
        """q and k that give scores of zero in rows of whose scores nothing is left.

        Where gradients reach these all the same, q less itself brings the gradient of q, and beside it q itself
        brings that of k, by k less itself.
        """
        levels, call = self.levels, self.add.call
        if levels is None or levels.limit is None:
            return q, k
        highest = self._highest
        rows = call(operator.le, highest, levels.limit)
        if not levels.flows:
            return call("masked_fill", q, rows, 0.0), k
        constant, keys = call("detach", q), call("detach", k)
        first = call(torch.where, rows, call(operator.sub, q, constant), q)
        second = call(torch.where, rows, constant, call(torch.zeros_like, constant))
        q = call(torch.cat, [first, second], -1)
        return q, call(torch.cat, [k, call(operator.sub, k, keys)], -1)

    def _of_term(self, kept: ExplicitMask) -> Node:
        if kept.condition is not None:
            condition, sizes = kept.condition, self.found.sizes
            return self._made(
                kept.term.node, condition, lambda at: Operands(at, sizes).condition(condition)
            )
        root = kept.term.node
        written = written_between(_after(root), self.found.result, [root]) is not None
        if written or value(root).requires_grad:
            return _as_operand(self.add, kept)  # where attention is, as it is there
        return self._made(root, kept, lambda at: _as_operand(at, kept))

    def _made(self, root: Node, what: object, make) -> Node:
        """A node beside the mask, where what it is made from holds what it held for the mask."""
        key = root, what
        node = self.made.get(key) or self.new.get(key)
        if node is None:
            adder = Adder(_after(root), like=root)
            self.adders.append(adder)
            node = self.new[key] = make(adder)
        writer = written_between(_after(root), self.found.result, [node])
        if writer is not None:
            raise Unsupported(
                "in-place", f"{described(writer)} may write into what a mask is made of"
            )
        return node

    def _four_dims(self, node: Node, kept: ExplicitMask) -> Node:
        """Of scores with 3 dimensions there are no heads."""
        rank = len([dim for dim in self.found.q.dims if dim is not None])
        if kept.condition is None and rank == 3 and value(node).dim() == 3:
            return self.add.call("unsqueeze", node, 1)
        return node


def _floating(add: Adder, node: Node) -> Node:
    """Slopes and sinks, which may be counted, as our ops take them."""
    return node if value(node).is_floating_point() else add.call("to", node, torch.float32)


def _after(node: Node) -> Node:
    """The first place behind a node where others may stand: outside of the vmap whose result it is."""
    node = node.next
    while node.op == "placeholder" or node.target is _vmap_decrement_nesting:
        node = node.next
    return node


def _as_operand(add: Adder, kept: ExplicitMask) -> Node:
    """A mask itself, as our ops take it."""
    node, term = kept.term.node, kept.term
    if not term.is_added:
        return add.call(torch.logical_not, node) if term.kind == "hidden" else node
    if term.factor != 1:
        node = add.call(operator.mul, node, term.factor)
    if kept.limited:
        # Finite numbers that our ops would take for -inf, which to a softmax is another thing.
        infinite = add.call(operator.eq, node, -math.inf)
        node = add.call(torch.where, infinite, node, add.call("clamp", node, -MASK_LIMIT))
    return node
