"""A form: calls of our own ops, which the user wrote; they are rewritten under context parallelism alone."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from torch.fx import Node

from torch_fdattn.compile_backend import report
from torch_fdattn.compile_backend.context_parallel import ring, sharded_cache
from torch_fdattn.compile_backend.context_parallel.options import ContextParallel
from torch_fdattn.compile_backend.graph.adder import Adder
from torch_fdattn.compile_backend.graph.nodes import arguments, described, value
from torch_fdattn.compile_backend.report import Unsupported

FORM = "torch_fdattn"
_PACKAGE = str(Path(__file__).parents[2]) + os.sep
#: Our ops over a sequence or a cache, which they take to be complete.
_OPS = {
    overload: name
    for name in (
        "attention", "varlen_attention", "decode", "paged_decode", "decode_out", "paged_decode_out"
    )
    for op in [getattr(torch.ops.fdattn, name)]
    for overload in (op, op.default)
}  # fmt: skip


def matches(node: Node) -> bool:
    return node.op == "call_function" and node.target in _OPS


def stack_trace(node: Node) -> str:
    """Down to the user's call: where in our functions the op is called tells nobody anything."""
    ours = rf'^  File "{re.escape(_PACKAGE)}'
    return re.split(ours, report.stack_trace(node), flags=re.MULTILINE)[0]


def replace(node: Node, context: ContextParallel, *, dryrun: bool) -> str:
    """A call of ours by one over the ranks, (out, lse) by (out, lse).

    Returns its name; raises `Unsupported` where there is none.
    """
    name = _OPS[node.target]
    schema = getattr(torch.ops.fdattn, name).default._schema.arguments
    defaults = {x.name: x.default_value if x.has_default_value() else None for x in schema}
    given = dict(zip(defaults, arguments(node, **defaults), strict=True))
    if given.pop("layout", "bhsd") != "bhsd":
        raise Unsupported(
            "context-parallel", f'{described(node)} has layout="{node.kwargs["layout"]}"'
        )
    defaults.pop("layout", None)
    if name == "attention":
        new, args, options = ring.of_attention(given, defaults, context)
    elif name in ("decode", "paged_decode") and context.cache is not None:
        new, args, options = sharded_cache.of_decode(given, defaults, context)
    else:
        raise Unsupported(
            "context-parallel", f"{described(node)} would see this rank's tokens alone"
        )
    if not dryrun:
        op = getattr(torch.ops.fdattn, new).default
        added = Adder(node, like=args[0]).new(op, args, yields=value(node), **options)
        added.meta = dict(node.meta)
        node.replace_all_uses_with(added)
        node.graph.erase_node(node)
    return new
