"""`torch_fdattn.explain`: one call of a function, and what the backend made of its attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from torch_fdattn.compile_backend.context_parallel import parse
from torch_fdattn.compile_backend.report import Report, joined
from torch_fdattn.compile_backend.rewrite import rewrite


def explain_call(
    fn: Callable, args: tuple, kwargs: dict[str, Any], context_parallel: object = None
) -> Report:
    reports: list[Report] = []
    context = parse(context_parallel)

    def backend(gm: GraphModule, inputs: list) -> Callable:
        reports.append(rewrite(gm, context=context))
        return gm.forward

    torch._dynamo.reset()
    try:
        torch.compile(fn, backend=backend)(*args, **kwargs)
    finally:
        torch._dynamo.reset()
    return joined(reports)
