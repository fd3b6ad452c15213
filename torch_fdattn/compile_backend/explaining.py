"""`torch_fdattn.explain`: one call of a function, and what the backend made of its attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends import debugging
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from torch_fdattn.compile_backend.context_parallel.options import parse
from torch_fdattn.compile_backend.report import Report, joined
from torch_fdattn.compile_backend.rewrite import rewrite
from torch_fdattn.compile_backend.tensor_parallel import passes


def explain_call(
    fn: Callable, context_parallel: object, tensor_parallel: str, /, *args: Any, **kwargs: Any
) -> Report:
    """What the backend makes of ``fn(*args, **kwargs)``, which is called; the options are those of these names."""
    reports: list[Report] = []
    context = parse(context_parallel)
    choice = passes.parse(tensor_parallel)

    def backend(gm: GraphModule, inputs: list) -> Callable:
        reports.append(rewrite(gm, context=context))
        if not passes.applies(choice):
            return gm.forward
        return debugging.aot_eager(gm, inputs, **passes.compilers(choice, reports.append))

    torch._dynamo.reset()
    try:
        outputs = torch.compile(fn, backend=backend)(*args, **kwargs)
        if passes.applies(choice):
            _run_backward(outputs)  # which is compiled when it runs
    finally:
        torch._dynamo.reset()
    return joined(reports)


def _run_backward(outputs: object) -> None:
    """The gradients of the outputs' sum, which nobody gets."""
    given = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
    leaves, seen, waiting = [], set(), [x.grad_fn for x in given]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
            if hasattr(node, "variable"):
                leaves.append(node.variable)
    if leaves:
        torch.autograd.grad(given, leaves, [torch.ones_like(x) for x in given], allow_unused=True)
