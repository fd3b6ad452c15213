"""What a pass found: a `Site` for each attention, with the op that took its place or why none did."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch.fx import Node

#: Why attention is left as it was. Codes are stable: programs may compare them.
REASONS = {
    "batch-broadcast": "q, k and v have different batch sizes",
    "context-parallel": 'it is no attention that goes over the ranks of options["context_parallel"]',
    "device": "the tensors are not all on one CPU or CUDA device",
    "dropout": "dropout is active",
    "dtype": "the dtypes are not supported, or differ",
    "float64": "float64 is supported on the CPU alone",
    "functorch": "the graph holds a functorch transform or forward-mode AD",
    "gradient": "a part of it is under torch.no_grad()",
    "head-dim": "the head dim is not known to be a multiple of 8 from 16 to 256",
    "heads": "the heads of q are not known to be a multiple of those of k and v",
    "in-place": "something is written in place between its parts",
    "layout": "a tensor is not strided, or the result's strides cannot be kept",
    "mask": "a mask that is no tensor of ours: its dtype, or how it is given",
    "mask-value": "a number fills scores in that may not hide them, or not as a bias does",
    "metadata": "the graph does not say what a tensor is",
    "nested": "a nested tensor",
    "opaque": "one call that holds an attention inside, and is not opened",
    "product": "a matrix product that is not attention's",
    "rank": "tensors of other than 3 or 4 dimensions, or 5 with groups of heads",
    "scale": "the scale is not a known positive number",
    "scores-unknown": "an operation on the scores that attention does not have",
    "scores-used": "scores or weights are used elsewhere, for example returned",
    "shape": "q, k and v have sizes that do not fit",
    "softmax-dim": "the softmax is not over the keys",
    "tensor-subclass": "a tensor subclass",
    "token-mixing": "it is no attention, and mixes or counts the tokens of one rank",
    "unexpected": "a call in a form that is not known",
    "unknown-op": "a softmax between two products, and an operation beside it that no form of attention has",
    "weights-unknown": "an operation on the weights that attention does not have",
}

#: Why a mask, or a part of it, stays a tensor that the op is given. Stable too.
MASK_REASONS = {
    "mask-chunked": "queries see their own chunk of keys, beside padding, over a cache, or with a bias",
    "mask-data": "which keys it hides follows from data",
    "mask-form": "it is neither causal nor a window, chunks, lengths or ALiBi",
    "mask-gradient": "its gradient is wanted, or was cut off",
    "mask-symbol": "where queries stand, or how many keys are valid, is a size, or a number the call is given",
    "mask-rows": "finite numbers hide scores, which matters where they hide all of a query's",
}

#: Why matmuls next to a collective are left as they are. Stable too.
MATMUL_REASONS = {
    "batched": "a product of batches of matrices",
    "bias": "what is added to a product is no bias of one number a column",
    "device": "the tensors are on no CPU or CUDA device",
    "dtype": "the dtypes are not bfloat16, float16 or float32, or differ",
    "not-faster": "nothing was measured to be faster than the collective for these sizes, ranks and device",
    "product-used": "a product is used elsewhere than in the reduction",
    "reduce-op": "the reduction is no sum",
    "scaled": "the product or what is added to it is scaled",
    "strategy": "the strategy that was asked for gathers and scatters, and reduces nothing on all ranks",
    "unexpected": "a form that is not known",
    "weight-later": "a weight comes from a collective that is awaited later",
}


#: `Site.op` of a call of torch's SDPA that stays, because our op would call the same kernel (`torch_sdpa.py`).
KEPT = "scaled_dot_product_attention"


class UnsupportedAttention(RuntimeError):
    """Attention that was left as it was, with ``require_all`` or ``context_parallel`` among the options."""


class Unsupported(Exception):
    """Raised while an attention, or a matmul next to a collective, is examined: it stays as it is, for this reason."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail or {**REASONS, **MATMUL_REASONS}[code]


@dataclass(frozen=True)
class Site:
    """One attention of a graph, or one collective with its matmuls."""

    form: str  #: what it was written as
    node: str  #: the name of its result in the graph
    #: "attention", "varlen_attention", "decode", "ring_attention" or "dist_decode", or of matmuls
    #: "all_gather_matmul", "matmul_reduce_scatter" or "matmul_all_reduce"; `KEPT`; None: it is left
    op: str | None
    reason: str | None = None  #: a key of `REASONS` or `MATMUL_REASONS`, where it is left
    detail: str = ""
    notes: tuple[str, ...] = ()  #: what else was recognised, for example "causal mask"
    stack_trace: str = ""
    module: str = ""  #: the child GraphModule it stands in; "" for the graph itself

    @property
    def where(self) -> str:
        """file:line of the innermost frame, or the node's name where the graph has no stack traces."""
        return _innermost(self.stack_trace, self.node)

    def __str__(self) -> str:
        if self.op is None:
            return f"{self.where}: {self.form}: left as it was, {self.reason}: {self.detail}"
        notes = f" ({', '.join(self.notes)})" if self.notes else ""
        op = "torch's own" if self.op == KEPT else f"fdattn.{self.op}"
        return f"{self.where}: {self.form} -> {op}{notes}"


@dataclass
class Report:
    """The sites of one or more graphs; all but `matmuls` is about attention."""

    sites: list[Site] = field(default_factory=list)
    graphs: int = 1
    matmuls: list[Site] = field(default_factory=list)  #: next to collectives
    #: calls of our own ops that the model made itself, and which stay: how many of each
    fdattn_calls: Counter[str] = field(default_factory=Counter)
    #: inputs of the graph that must hold the positions of a rank's tokens, by which its masks were understood
    positions: set[str] = field(default_factory=set)
    #: those whose chunks or prefixes are counted in each document, where there are documents
    document_positions: set[str] = field(default_factory=set)
    #: with context_parallel, what is no attention, and sees one rank's tokens alone
    local: list[Site] = field(default_factory=list)

    @property
    def rewritten(self) -> list[Site]:
        return [site for site in self.sites if site.op not in (None, KEPT)]

    @property
    def kept(self) -> list[Site]:
        """SDPA of CPU tensors that stays torch's own, which nothing holds against it: `check` accepts it."""
        return [site for site in self.sites if site.op == KEPT]

    @property
    def left(self) -> list[Site]:
        return [site for site in self.sites if site.op is None]

    @property
    def reasons(self) -> list[str]:
        """The reason code of each site that is left."""
        return [site.reason for site in self.left]

    def check(self, why: str) -> None:
        """Raises `UnsupportedAttention` where any attention is left, or other work on one rank's tokens."""
        if self.left or self.local:
            raise UnsupportedAttention(f"{why} {self}")

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    @property
    def head(self) -> str:
        """One line that counts the sites, and the calls of our own ops where there are some."""
        own = ""
        if self.fdattn_calls:
            counts = sorted(self.fdattn_calls.items())
            calls = ", ".join(f"{count} of fdattn.{name}" for name, count in counts)
            own = f"; it calls ops of torch_fdattn itself, which stay: {calls}"
        graphs = f"in {self.graphs} graph{'s' * (self.graphs != 1)}{own}"
        if not self.sites:
            return f"no attention found {graphs}"
        kept = f"{len(self.kept)} torch's own, " if self.kept else ""
        return (
            f"{len(self.rewritten)} of {len(self.sites)} attention sites rewritten, {kept}{graphs}"
        )

    def __str__(self) -> str:
        lines = [self.head, *(f"  {site}" for site in (*self.local, *self.sites))]
        if self.matmuls:
            done = sum(site.op is not None for site in self.matmuls)
            lines.append(f"{done} of {len(self.matmuls)} collectives with matmuls rewritten")
            lines += [f"  {site}" for site in self.matmuls]
        return "\n".join(lines)


def joined(reports: Iterable[Report]) -> Report:
    reports = list(reports)
    return Report(
        [site for report in reports for site in report],
        sum(report.graphs for report in reports),
        [site for report in reports for site in report.matmuls],
        sum((report.fdattn_calls for report in reports), Counter()),
        local=[site for report in reports for site in report.local],
    )


def stack_trace(node: Node) -> str:
    return node.meta.get("stack_trace") or ""


def where(node: Node) -> str:
    """Where a node stands in the source, as `Site.where` has it."""
    return _innermost(stack_trace(node), node.name)


def _innermost(trace: str, name: str) -> str:
    frames = re.findall(r'File "([^"]+)", line (\d+)', trace)
    return ":".join(frames[-1]) if frames else f"node {name}"
