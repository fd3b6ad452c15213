"""`torch.compile(model, backend="fdattn")`: attention becomes ours wherever it is provably the same function.

    fdattn    the backend, which torch finds by the entry point `torch_dynamo_backends`
    explain   what the backend does to a function's attention, site by site

Importing this loads nothing of torch.compile: that happens at the first compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from torch_fdattn.compile_backend.report import Report


def fdattn(gm: GraphModule, inputs: list, *, mode: str | None = None, options: dict | None = None):
    """Rewrites a Dynamo graph's attention, then compiles it with Inductor.

    Args:
        mode, options: as `torch.compile(backend="inductor")` takes them. Of our own, in options:
            ``dryrun`` (report alone, rewrite nothing), ``require_all`` (raise `AttentionLeft` where any
            attention is left as it was), ``lower`` ("inductor", "aot_eager" or "eager").
    """
    from torch_fdattn.compile_backend.backend import compile_graph

    return compile_graph(gm, inputs, mode, options)


def explain(fn: Callable[..., Any]) -> Callable[..., Report]:
    """``explain(fn)(*args)`` runs fn once, rewritten, and returns a `Report` of its attention.

    It prints as a table: where each attention stands in the source, its form, and the op that took its
    place or why none did. As with `torch._dynamo.explain`, what was compiled before is forgotten, and fn
    really runs. What Dynamo does not capture (it falls back to Python) is not seen.
    """
    from torch_fdattn.compile_backend.explain import explain_call

    return lambda *args, **kwargs: explain_call(fn, args, kwargs)


__all__ = ["explain", "fdattn"]
