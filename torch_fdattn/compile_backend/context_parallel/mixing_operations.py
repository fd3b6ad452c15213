"""Operations that give a token something of other tokens: families, and where each says over which dim."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import Node

from torch_fdattn.compile_backend.context_parallel.token_dims import (
    MATMULS,
    TokenInfo,
    argument,
    einsum_labels,
    factors,
    first_input,
    from_right,
    joined,
    numbers,
    tensor_of,
)
from torch_fdattn.compile_backend.graph.nodes import statically_true

#: By the position of the dim that they run along, counted with the tensor.
_ALONG = {
    "cummax": 1, "cummin": 1, "cumprod": 1, "cumsum": 1, "diff": 2, "logcumsumexp": 1,
    "log_softmax": 1, "softmax": 1, "softmin": 1, "normalize": 2,
    "argsort": 1, "kthvalue": 2, "msort": 9, "sort": 1, "topk": 2,
    "flip": 1, "roll": 2, "unbind": 1, "unfold": 1,
}  # fmt: skip
#: Of a dim that is not given.
_DEFAULTS = {"argsort": -1, "diff": -1, "kthvalue": -1, "msort": 0, "normalize": 1, "sort": -1, "topk": -1, "unbind": 0}  # fmt: skip
_CONVOLUTIONS = {f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)}
#: Over all dims behind the channels.
_OVER_PLACES = re.compile(r"(avg|max|lp)_pool|interpolate|upsample|group_norm|instance_norm")
_LOOPS = {"associative_scan", "scan", "while_loop"}
_RECURRENT = {"gru", "lstm", "rnn_relu", "rnn_tanh"}
_OURS = ("aten", "prims", "fdattn", "_c10d_functional", "c10d_functional", "c10d")
#: What others' operators that mix tokens are called.
_MIXING_NAMES = re.compile(r"conv|scan|mamba|ssm|ssd|delta_rule|delta_net|retention|wkv|linear_att|lightning|gla_|hyena")  # fmt: skip


def mixes(node: Node, name: str, infos: dict[Node, TokenInfo], calls_graphs: bool) -> str:
    """What an operation does over the rank's tokens, as a message says it; "" if nothing."""
    if calls_graphs or isinstance(node.target, torch._ops.HigherOrderOperator):
        loop = getattr(node.target, "__name__", "")
        over = loop in _LOOPS and _any_tokens(node.all_input_nodes, infos)
        return f"a loop ({loop}) over tokens" if over else ""
    if _is_foreign(node):
        called = str(node.target)
        over = _MIXING_NAMES.search(called.lower()) and _any_tokens(node.all_input_nodes, infos)
        return f"the operator {called}, by its name no operation token by token," if over else ""
    if name in MATMULS:
        left, right = (from_right(x, infos) for x in factors(node, name))
        summed = -2 if tensor_of(factors(node, name)[1]).dim() > 1 else -1
        # A matrix among the inputs is a weight that happens to have as many rows.
        weight = factors(node, name)[1]
        is_weight = weight.op == "placeholder" and tensor_of(weight).dim() == 2
        summed_right = summed in right and not is_weight
        if name == "addbmm" and -3 in left | right:
            return "a product (addbmm) that sums over tokens"
        return "a product that sums over tokens" if -1 in left or summed_right else ""
    if name == "einsum":
        return _einsum(node, infos)
    if name in ("inner", "tensordot"):
        return _tensordot(node, name, infos)
    x = first_input(node)
    if name == "cat":
        return _cat(node, infos)
    if x is None or not infos[x].dims or infos[x].made is not None:
        return ""
    given = tensor_of(x)
    if not _is_float(given):
        return ""  # of ids and masks
    return _of_one(node, name, infos[x].dims, given.dim())


def shifts_labels(node: Node, name: str, infos: dict[Node, TokenInfo]) -> bool:
    """Whether integers over tokens are padded there by a negative number, which stands for no label: so does transformers' loss
    of causal models before it takes all but the first."""
    x = first_input(node)
    if name != "pad" or x is None or _is_float(tensor_of(x)):
        return False
    fill = argument(node, 3, "value", default=0)
    return isinstance(fill, int) and fill < 0 and bool(_padded(node, tensor_of(x).dim()) & infos[x].dims)  # fmt: skip


def _padded(node: Node, rank: int) -> set[int]:
    """Dims that a pad makes longer or shorter."""
    amounts = argument(node, 1, "pad")
    return {rank - 1 - i // 2 for i, x in enumerate(amounts) if x != 0}


def _is_float(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _of_one(node: Node, name: str, dims: frozenset[int], rank: int) -> str:
    """Of operations over dims of their first input."""
    behind_channels = any(x >= 2 for x in dims)
    module = getattr(node.target, "__module__", None) or ""
    if name == "linear":
        return "a projection of tokens (linear over their dim)" if rank - 1 in dims else ""
    if name in _CONVOLUTIONS:
        kernel = tensor_of(argument(node, 1, "weight")).shape[2:]
        first = rank - len(kernel)
        wide = any(x >= first and kernel[x - first] != 1 for x in dims)
        return f"a convolution ({name}) over tokens" if wide else ""
    if name in _ALONG:
        given = argument(node, _ALONG[name], "dim", "dims", "dimension", default=_DEFAULTS.get(name))  # fmt: skip
        if name == "flip" and len(node.args) > 2:
            given = node.args[1:]
        return f"{name} along tokens" if numbers(given, rank) & dims else ""
    if name == "renorm":
        kept = numbers(argument(node, 2, "dim"), rank)
        return "renorm over tokens" if dims - kept else ""
    if name == "pad":
        return "a pad of tokens" if _padded(node, rank) & dims else ""
    if module.startswith("torch._C._fft") or name.startswith("fft_"):
        return f"{name} over tokens"
    if name in ("layer_norm", "rms_norm"):
        count = len(argument(node, 1, "normalized_shape"))
        return f"{name} over tokens" if any(x >= rank - count for x in dims) else ""
    if name == "batch_norm":
        training = argument(node, 5, "training", default=False)
        return "batch_norm in training, over tokens" if training else ""
    if name in _RECURRENT:
        return f"a recurrence ({name}) over tokens"
    return f"{name} over tokens" if _OVER_PLACES.search(name) and behind_channels else ""


def _cat(node: Node, infos: dict[Node, TokenInfo]) -> str:
    """Tokens behind or before what holds none: a pad by another name. What is empty (a new cache) adds nothing."""
    parts = [x for x in joined(node) if isinstance(x, Node) and not _is_empty(x)]
    if not parts or not tensor_of(parts[0]).is_floating_point():
        return ""
    along = argument(node, 1, "dim", default=0) % tensor_of(node).dim()
    held = {along in infos[x].dims for x in parts}
    return "a concatenation of tokens and others" if held == {True, False} else ""


def _is_empty(node: Node) -> bool:
    """Certainly so: sizes that only the data decides are compared with nothing."""
    return any(statically_true(size == 0) for size in tensor_of(node).shape)


def _einsum(node: Node, infos: dict[Node, TokenInfo]) -> str:
    operands, out = einsum_labels(node)
    summed = {own[dim] for x, own in operands for dim in infos[x].dims if own[dim] not in out}
    return "a product (einsum) that sums over tokens" if summed else ""


def _tensordot(node: Node, name: str, infos: dict[Node, TokenInfo]) -> str:
    """Of the last dims of the left factor and the first of the right one, or of those named; `inner`: of both last ones."""
    left, right = factors(node, name)
    dims = argument(node, 2, "dims", default=2) if name == "tensordot" else ([-1], [-1])
    if isinstance(dims, int):
        dims = range(-dims, 0), range(dims)
    over = any(
        numbers(list(own), tensor_of(x).dim()) & infos[x].dims
        for x, own in zip((left, right), dims, strict=True)
    )
    return f"a product ({name}) that sums over tokens" if over else ""


def _any_tokens(nodes: Iterable[Node], infos: dict[Node, TokenInfo]) -> bool:
    return any(infos[x].dims for x in nodes)


def _is_foreign(node: Node) -> bool:
    """Whether a node calls an operator of neither torch's nor ours."""
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(node.target).partition(".")[0] not in _OURS
    module = getattr(node.target, "__module__", None) or "torch"
    return node.op == "call_function" and module.partition(".")[0] not in (
        "torch",
        "_operator",
        "builtins",
        "math",
    )
