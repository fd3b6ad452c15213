"""Matrix products of attention, however written, as labels: `xymc,xycn->xymn` is `q @ k.transpose(-1, -2)`."""

from __future__ import annotations

from typing import NamedTuple

from torch.fx import Node

from torch_fdattn.compile_backend.graph.dims import einsum_labels
from torch_fdattn.compile_backend.graph.nodes import arguments, is_tensor, op_name, tensor
from torch_fdattn.compile_backend.report import Unsupported

#: Batch dims of a product of 3, 4 and 5 dimensions.
_BATCH = {3: "x", 4: "xy", 5: "xyz"}


class Product(NamedTuple):
    node: Node
    left: Node
    right: Node
    labels: tuple[str, str, str]  #: of left, right and the result
    factor: float = 1.0
    added: tuple[Node, float] | None = None  #: what baddbmm adds, and its factor

    @property
    def is_plain(self) -> bool:
        return self.factor == 1 and self.added is None


def product(node: object) -> Product | None:
    """The product of two tensors that a node is; None for all that is none."""
    name = op_name(node)
    if name in ("matmul", "bmm"):
        return _labelled(node, *arguments(node, input=None, other=None))
    if name == "baddbmm":
        added, left, right, beta, alpha = arguments(
            node, input=None, batch1=None, batch2=None, beta=1, alpha=1
        )
        if not isinstance(alpha, (int, float)) or not isinstance(beta, (int, float)):
            raise Unsupported("scale", "baddbmm's alpha or beta is not known before the call")
        found = _labelled(node, left, right)
        if found is None:
            return None
        return found._replace(factor=float(alpha), added=(added, float(beta)) if beta else None)
    return _einsum(node) if name == "einsum" else None


def _labelled(node: Node, left: object, right: object) -> Product | None:
    if not is_tensor(left) or not is_tensor(right):
        return None
    rank = tensor(left).dim()
    if rank != tensor(right).dim() or rank not in _BATCH:
        return None
    batch = _BATCH[rank]
    return Product(node, left, right, (f"{batch}mc", f"{batch}cn", f"{batch}mn"))


def _einsum(node: Node) -> Product | None:
    parsed = einsum_labels(node)
    if parsed is None or not all(len({*x}) == len(x) for x in parsed[1]):
        return None
    return Product(node, *parsed[0], parsed[1])
