"""Reading nodes of a Dynamo graph: which torch operation a node is, its arguments, what it yields.

Functions are known by identity, never by name: a user's own function named `softmax` is not torch's.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torch_fdattn.compile_backend.report import Unsupported

#: One name for each operation, however it is spelled.
_ALIASES = {
    "truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub",
    "swapaxes": "transpose", "swapdims": "transpose", "and_": "bitwise_and", "or_": "bitwise_or",
    "xor": "bitwise_xor", "inv": "bitwise_not", "invert": "bitwise_not", "negative": "neg",
    "concat": "cat", "floor_divide": "floordiv", "less": "lt", "less_equal": "le", "greater": "gt",
    "greater_equal": "ge", "not_equal": "ne",
    "__matmul__": "matmul", "__rmatmul__": "rmatmul",
    "__eq__": "eq",  # as Dynamo of torch 2.11, and of later ones inside of vmap, writes a == b
    "__and__": "bitwise_and", "__or__": "bitwise_or",
}  # fmt: skip
_NAMES = (
    "_log_softmax", "_masked_softmax", "_softmax", "abs", "add", "addbmm", "addmm", "amax", "and_", "arange",
    "baddbmm", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "bmm", "broadcast_to",
    "cat", "chain_matmul", "clamp", "clamp_min", "clone", "concat", "conv1d", "conv2d", "conv3d",
    "cos", "cumsum", "diff", "div", "divide", "dropout", "einsum", "embedding", "eq", "exp", "exp2", "exp2_", "exp_", "eye",
    "flatten", "floor_divide", "floordiv", "full", "full_like", "gather", "ge", "getitem",
    "greater", "greater_equal", "gt", "gumbel_softmax", "iadd", "imatmul", "imul", "index_select",
    "inner", "inv", "invert", "isub", "itruediv", "le", "less", "less_equal", "linear", "log_softmax",
    "logical_and", "logical_not", "logical_or", "logical_xor", "logsumexp", "lt", "masked_fill",
    "matmul", "max", "maximum", "mm", "mul", "multi_head_attention_forward", "multiply", "mv", "ne",
    "neg", "negative", "norm", "normalize", "not_equal", "ones", "ones_like", "or_", "outer", "permute", "pow",
    "reciprocal", "repeat_interleave", "reshape", "rsqrt", "scaled_dot_product_attention",
    "sigmoid", "sin", "softmax", "softmin", "sqrt", "squeeze", "sub", "subtract", "sum", "swapaxes",
    "swapdims", "tanh", "tensor", "tensordot", "transpose", "tril", "triu", "true_divide",
    "truediv", "unflatten", "unsqueeze", "where", "xor", "zeros", "zeros_like",
)  # fmt: skip
_FUNCTIONS: dict[object, str] = {
    getattr(module, name): _ALIASES.get(name, name)
    for name in _NAMES
    for module in (torch, F, operator)
    if hasattr(module, name)
}
_FUNCTIONS[torch.special.softmax] = "softmax"
_FUNCTIONS[torch.special.log_softmax] = "log_softmax"
_FUNCTIONS[torch.special.exp2] = "exp2"
_FUNCTIONS[torch.linalg.vector_norm] = "vector_norm"
_FUNCTIONS[torch.sparse.mm] = "sparse_mm"
_FUNCTIONS[torch.linalg.matmul] = "matmul"
_FUNCTIONS[torch.linalg.multi_dot] = "multi_dot"
for _name in ("log_softmax", "softmax", "softmin"):
    _FUNCTIONS[getattr(torch.masked, _name)] = f"masked_{_name}"
for _name in (
    "scaled_dot_product_attention", "_safe_softmax", "_softmax", "_log_softmax",
    "addbmm", "addmm", "baddbmm", "bmm", "einsum", "matmul", "mm", "mv",
):  # fmt: skip
    _aten = getattr(torch.ops.aten, _name)
    _FUNCTIONS[_aten] = _FUNCTIONS[_aten.default] = _name
# As Dynamo writes x[i, j] inside of vmap.
_FUNCTIONS[torch.ops.aten.index] = _FUNCTIONS[torch.ops.aten.index.Tensor] = "index"
for _name in ("softmax", "log_softmax"):
    # Another order of arguments than torch's: named as what no form knows.
    _aten = getattr(torch.ops.aten, _name)
    _FUNCTIONS[_aten] = _FUNCTIONS[_aten.int] = f"_{_name}"


def op_name(node: object) -> str:
    """The operation's one name; "" for what is none, or is not known."""
    if not isinstance(node, Node):
        return ""
    if node.op == "call_method":
        return _ALIASES.get(node.target, node.target)
    if node.op == "call_function":
        if (
            node.target is getattr
            and len(node.args) == 2
            and node.args[1] in ("mT", "mH", "T", "H")
        ):
            return node.args[1]
        return _FUNCTIONS.get(node.target, "")
    return ""


def described(node: object) -> str:
    """How a message calls a node's operation."""
    if not isinstance(node, Node):
        return repr(node)
    if node.op in ("placeholder", "get_attr"):
        return "an input"
    return op_name(node) or getattr(node.target, "__name__", str(node.target))


def arguments(node: Node, **defaults: Any) -> list[Any]:
    """A call's arguments in the order of `defaults`, by position or by keyword."""
    given = dict(zip(defaults, node.args, strict=False)) | dict(node.kwargs)
    unknown = set(given) - set(defaults)
    if unknown or len(node.args) > len(defaults):
        raise Unsupported(
            "unexpected", f"{described(node)} was called with arguments that are not known"
        )
    return [given.get(name, default) for name, default in defaults.items()]


def where_arguments(node: Node) -> list[Any]:
    """[condition, input, other] of a function's or a method's call."""
    if node.op == "call_function":
        return arguments(node, condition=None, input=None, other=None)
    source, condition, other = arguments(node, input=None, condition=None, other=None)
    return [condition, source, other]


def value(node: Node) -> Any:
    """What Dynamo found that a node yields: a fake tensor, a number, or None where it does not say."""
    return node.meta.get("example_value")


def tensor(node: object) -> Tensor:
    """The fake tensor of a node, which is one of plain torch."""
    fake = value(node) if isinstance(node, Node) else None
    if not isinstance(fake, Tensor):
        raise Unsupported("metadata")
    if fake.is_nested:
        raise Unsupported("nested")
    if fake.layout != torch.strided:
        raise Unsupported("layout", f"a tensor is not strided, but {fake.layout}")
    if type(fake) is not FakeTensor:
        raise Unsupported("tensor-subclass", f"a tensor is a {type(fake).__name__}")
    return fake


def is_tensor(node: object) -> bool:
    return isinstance(node, Node) and isinstance(value(node), Tensor)


def statically_true(*conditions: Any) -> bool:
    """Whether conditions over sizes certainly hold. Never adds a guard."""
    return all(map(statically_known_true, conditions))


def guarding_hint(size: int | torch.SymInt) -> int | None:
    """What a size is in this call, to which `int(size)` would bind the graph; None where it is not known yet."""
    if isinstance(size, int):
        return size
    return size.node.hint if size.node.has_hint() else None


def equal_sizes(a: Sequence, b: Sequence) -> bool:
    """Whether two lists of sizes, shapes for example, are certainly the same."""
    return len(a) == len(b) and statically_true(*(x == y for x, y in zip(a, b, strict=True)))


def asks_for_shape(user: Node, node: Node) -> bool:
    """Whether all that a consumer takes from a node is its shape."""
    return op_name(user) == "expand_as" and user.args[1:] == (node,) and user.args[0] is not node
