"""Compiles a function through the pass, and compares what it then does with eager, gradients included."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._dynamo.backends import debugging

from torch_fdattn.compile_backend.report import Report, joined
from torch_fdattn.compile_backend.rewrite import rewrite


@dataclass
class Found:
    report: Report
    graph: str  #: the rewritten graphs
    frames: int  #: how often it was compiled


class Recorder:
    """A backend: the pass, then `lower`. Checks that the pass adds no guards and a graph stays whole."""

    def __init__(self, lower: str = "aot_eager", head_dims: int = 0, **options) -> None:
        """head_dims: how many symbols the pass may make numbers, which are head dims; options: of `rewrite`."""
        self.lower, self.options, self.reports, self.graphs = lower, options, [], []
        self.head_dims = head_dims
        self.kv_heads: list[int] = []  #: of the keys that each op of ours is given

    def __call__(self, gm, inputs):
        env = next((x.node.shape_env for x in inputs if isinstance(x, torch.SymInt)), None)
        before = len(env.guards) if env else 0
        self.reports.append(rewrite(gm, **self.options))
        added = len(env.guards) - before if env else 0
        assert added <= self.head_dims, "the pass added guards"
        for module in gm.modules():
            if isinstance(module, torch.fx.GraphModule):
                self.graphs.append(_code(module))
        for module in gm.modules():
            for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
                if node.op in ("call_function", "call_method") and "fdattn" in str(node.target):
                    assert "example_value" in node.meta
                    self.kv_heads.append(node.args[1].meta["example_value"].shape[1])
        return getattr(debugging, self.lower)(gm, inputs)

    @property
    def found(self) -> Found:
        return Found(joined(self.reports), "\n".join(self.graphs), len(self.reports))


def check(fn, *args, lower="aot_eager", rtol=1e-4, atol=1e-5, dynamic=None, exact=False) -> Found:
    """Runs fn compiled and eagerly on the same inputs; outputs and gradients must agree."""
    torch._dynamo.reset()
    backend = Recorder(lower, head_dims=2 if dynamic else 0)
    compiled = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)
    leaves = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
    torch.manual_seed(1)
    expected = fn(*args)
    torch.manual_seed(1)
    found = compiled(*args)
    close = {"rtol": 0, "atol": 0} if exact else {"rtol": rtol, "atol": atol}
    # NaN where all of a query's scores are -inf.
    torch.testing.assert_close(found, expected, equal_nan=True, **close)
    wanted = [[x.requires_grad for x in _outputs(out)] for out in (found, expected)]
    assert wanted[0] == wanted[1], "other outputs require gradients than in eager"
    if leaves and any(wanted[0]):
        grads = [
            torch.autograd.grad(_loss(out), leaves, allow_unused=True) for out in (found, expected)
        ]
        torch.testing.assert_close(*grads, **close)
    return backend.found


def _code(module) -> str:
    """The graph without what names this file."""
    lines = module.print_readable(print_output=False).splitlines()
    return "\n".join(x for x in lines if x.strip() and not x.strip().startswith("#"))


def _outputs(out):
    return out if isinstance(out, tuple) else (out,)


def _loss(out):
    outs = [x.float() if x.dtype.itemsize < 4 else x for x in _outputs(out) if x.requires_grad]
    return sum(x.sin().sum() for x in outs)


def qkv(q_len=8, kv_len=None, heads=4, kv_heads=None, dim=16, batch=2, grad=True, dtype=None):
    kv_len, kv_heads = kv_len or q_len, kv_heads or heads
    shapes = [(batch, heads, q_len, dim)] + [(batch, kv_heads, kv_len, dim)] * 2
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def mask_of(found: Found) -> str:
    """What the report says of the mask of the one site."""
    (site,) = found.report
    return next((x.removeprefix("mask: ") for x in site.notes if x.startswith("mask: ")), "none")


def ops(found: Found) -> list[str | None]:
    return [site.op for site in found.report]
