"""Which dims of both products are batch, heads, queries, keys and head dim: from the names of their dims.

Softmax is over the keys. The queries are what of the scores the keys' tensor does not have; what is left is a batch
and heads, or a batch, groups of heads and heads of a group ("b", "g", "n"). A dim may hold several of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.fx import Node

from torch_fdattn.compile_backend.graph.nodes import (
    equal_sizes,
    is_tensor,
    op_name,
    statically_true,
    tensor,
    value,
)
from torch_fdattn.compile_backend.match.attention import MatchedAttention, Temperature
from torch_fdattn.compile_backend.match.frame import OF_NO_SCORE, RESHAPES, Frame, Labels
from torch_fdattn.compile_backend.match.operands import (
    BOTH,
    INNER,
    B,
    D,
    H,
    Operand,
    S,
    trace_operand,
)
from torch_fdattn.compile_backend.match.products import Product
from torch_fdattn.compile_backend.match.scores import MatchedScores
from torch_fdattn.compile_backend.match.weights import MatchedWeights
from torch_fdattn.compile_backend.report import Unsupported

#: What is left of the scores beside queries and keys, by how much it is.
_BATCH_AND_HEADS = {1: "b", 2: "bh", 3: "bgn"}


def attention_of(
    form: str, scores: MatchedScores, weights: MatchedWeights, frame: Frame
) -> MatchedAttention:
    """q, k and v with where their dims lie, from the names of the dims of both products."""
    roles = _Roles(scores, frame)
    q, k = (roles.operand(*x) for x in roles.queries_and_keys)
    v, (result, labels) = roles.values(weights, frame)
    between: list[Node] = []
    q = trace_operand(q, between, scalings=True)
    k = trace_operand(k, between, scalings=True)
    attention = MatchedAttention(
        form, result, q, k, v, out_dims=tuple(map(roles.role, labels)), groups=roles.groups,
        softmax_dims=roles.names(frame.softmax), scale=scores.factor * q.scale * k.scale, softcap=scores.softcap, between=between,
        temperatures=[Temperature(x.node, x.how, roles.names(x.dims)) for x in scores.temperatures],
    )  # fmt: skip
    if k.repeats:
        attention.note_repeated_heads()
    attention.v = attention.unrepeated(v)
    scores.masks = [replace(x, dims=roles.names(x.dims)) for x in scores.masks]
    return attention


@dataclass
class _Named:
    """A factor of a product, with the names of its dims."""

    node: Node
    dims: Labels

    @property
    def letters(self) -> set[str]:
        """Of the scores."""
        return {*"".join(x for x in self.dims if not x.startswith(OF_NO_SCORE))}


class _Roles:
    def __init__(self, scores: MatchedScores, frame: Frame) -> None:
        self.frame = frame
        out, factors = _named(scores.product, tuple(map(frame.expanded, scores.labels)))
        keys = frame.keys
        q, k = factors if keys in factors[1].dims else factors[::-1]
        found = [x for x in out if x in q.dims and len(x) == 1 and x not in k.letters]
        contracted = {*q.dims} & {*k.dims} - {*out}
        if keys not in k.dims or keys in q.letters or not found or len(contracted) != 1:
            raise Unsupported(
                "product", "the product before the softmax is not one of queries and keys"
            )
        queries = max(found, key=frame.others.index)
        rest = [x for x in frame.others if x != queries]
        if len(rest) not in _BATCH_AND_HEADS:
            raise Unsupported("rank", "scores of other than 3 to 5 dimensions")
        (depth,) = contracted
        letters = _BATCH_AND_HEADS[len(rest)]
        self.name_of = {
            **dict(zip(rest, letters, strict=True)),
            queries: "q",
            keys: "k",
            depth: "d",
        }
        self.sizes = {name: frame.sizes.get(x) for x, name in self.name_of.items()}
        self.groups = (self.sizes["g"], self.sizes["n"]) if letters == "bgn" else None
        if self.groups and not all(isinstance(x, int) for x in self.groups):
            raise Unsupported("rank", "groups of heads of symbolic sizes")
        if self.groups:
            self.sizes["h"] = self.groups[0] * self.groups[1]
        if {*"".join(self.names(q.dims))} != {*letters, "q", "d"}:
            raise Unsupported("product", "q lacks a dimension of the scores")
        _check_sizes(q.node, self.names(q.dims), self.sizes)
        self.queries_and_keys = (q, "q"), (k, "k")

    def names(self, dims: Labels) -> Labels:
        """The names of dims by their roles: "b", "h" or "g" and "n", "q", "k", "d", and "bh" of what is merged."""
        found = []
        for label in map(self.frame.expanded, dims):
            parts = [label] if label.startswith(OF_NO_SCORE) else label
            name = "".join(self.name_of.get(x, "?") for x in parts)
            found.append({"gn": "h", "bgn": "bh"}.get(name, name))
        return tuple(found)

    def role(self, name: str) -> int:
        try:
            return {"b": B, "h": H, "g": H, "n": INNER, "q": S, "d": D, "bh": BOTH}[name]
        except KeyError:
            raise Unsupported("product", "the product of the weights is not one with v") from None

    def operand(self, factor: _Named, sequence: str) -> Operand:
        """A factor whose dims are named by the scores; K and V may lack heads, or those of a group."""
        names, shape = self.names(factor.dims), tensor(factor.node).shape
        at = {name: i for i, name in enumerate(names)}
        if not {sequence, "d"} <= {*at} or not {*at} <= {*"bhgn", "bh", sequence, "d"}:
            raise Unsupported("product", "a product's factor has other dimensions than attention's")
        if "b" not in at and "bh" not in at:
            raise Unsupported("batch-broadcast", "k or v is the same for the whole batch")
        if "n" in at and ("g" not in at or not self._fit(shape, at)):
            raise Unsupported("heads", "heads of k or v are broadcast over groups alone")
        both = None
        if "bh" in at:
            both = self.sizes["b"], self.sizes["h"]
            if not statically_true(shape[at["bh"]] == both[0] * both[1]):
                raise Unsupported("batch-broadcast", "k or v is broadcast over merged heads")
        head = at.get("h", at.get("g"))
        dims = at.get("b", at.get("bh")), head, at[sequence], at["d"]
        return Operand(factor.node, dims, inner=at.get("n"), both=both)

    def _fit(self, shape: tuple, at: dict[str, int]) -> bool:
        """Whether groups of one head each, all heads, or one head."""
        found = shape[at["g"]], shape[at["n"]]
        groups, inner = self.groups
        return any(equal_sizes(found, x) for x in ((groups, inner), (groups, 1), (1, 1)))

    def values(self, weights: MatchedWeights, frame: Frame) -> tuple[Operand, tuple[Node, Labels]]:
        """V, and (the result, the names of its dims)."""
        product, labels = weights.product, tuple(map(frame.expanded, weights.labels))
        own = product.labels[0 if weights.is_left else 1]
        of_v = product.labels[1 if weights.is_left else 0]
        node = product.right if weights.is_left else product.left
        name = dict(zip(own, labels, strict=True))
        new = {x for x in of_v if x not in name}
        keys = next(x for x in own if frame.keys in name[x])
        if frame.dim < len(frame.softmax) - 1 and keys not in of_v:
            raise Unsupported(
                "softmax-dim", f"the softmax is over dimension {frame.given} of {len(own)}"
            )
        if len(new) != 1 or keys not in of_v or name[keys] != frame.keys:
            raise Unsupported("product", "the product of the weights is not one with v")
        (depth,) = new
        name[depth] = OF_NO_SCORE + "v"
        self.name_of[name[depth]] = "d"
        out = product.labels[2]
        if {*out} != {*own, depth} - {keys}:
            raise Unsupported("product", "the product of the weights is not one with v")
        v = self.operand(_Named(node, tuple(name[x] for x in of_v)), "k")
        _check_sizes(product.node, self.names(tuple(name[x] for x in out)), self.sizes)
        result, names = product.node, tuple(name[x] for x in out)
        if len(result.users) == 1 and {"bh", "n"} & {*self.names(names)}:
            (user,) = result.users  # which may give merged heads dims of their own, or merge groups
            moved = frame.below(user, result, names) if is_tensor(user) else None
            if moved is not None and len(moved) == 4 and op_name(user) in RESHAPES:
                result, names = user, moved
        return v, (result, self.names(names))


def _named(product: Product, out: Labels) -> tuple[Labels, tuple[_Named, _Named]]:
    """(the names of a product's dims, its factors)"""
    left, right, labels = product.labels
    name = dict(zip(labels, out, strict=True))
    name |= {x: OF_NO_SCORE + x for x in left + right if x not in name}
    return out, tuple(
        _Named(node, tuple(name[x] for x in part))
        for node, part in ((product.left, left), (product.right, right))
    )


def _check_sizes(node: Node, names: Labels, sizes: dict) -> None:
    """q's batch and heads are the scores': not broadcast from one."""
    for name, size in zip(names, value(node).shape, strict=True):
        expected = sizes.get(name)
        if name in ("b", "h", "g", "n") and not (
            expected is not None and statically_true(size == expected)
        ):
            raise Unsupported("batch-broadcast", "q is broadcast over batches or heads")
