"""Linear layers whose chunks travel through symmetric memory: raw ops, and their derivatives.

A file for each strategy or method has the work. The backward of all-gather → matmul is matmul → reduce-scatter by the
same strategy, and the other way round; that of matmul → all-reduce needs no communication. What the backward of the
weights needs of other ranks' rows is kept by the forward, which has it anyway, or gathered on the way.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fdattn.dist.groups import is_traced
from torch_fdattn.dist.symm.availability import unsupported_reason
from torch_fdattn.launch.device import on_device
from torch_fdattn.ops import library, swiglu
from torch_fdattn.ops.gemm import float8

STRATEGIES = ("copy_engine", "fused", "low_latency")
METHODS = ("low_latency", "gemm_all_reduce")
#: Rows up to which a residual and a norm are part of the all-reduce: on two H200, 5120 columns, they cost it 2 µs or
#: less everywhere, and 10 to 26 in launches of their own.
NORM_ROWS = 2048
#: Of what the kernels sum and round.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_HERE = "dist.tensor_parallel"
_GATHERS = {"copy_engine": "copy_engine", "fused": "fused_gather", "low_latency": "low_latency"}
_SCATTERS = {**_GATHERS, "fused": "fused_scatter"}


def check(what: str, group_name: str, x: Tensor, dtype: torch.dtype) -> None:
    """Refuses what one-sided strategies cannot do: `what` names who asked, e.g. "strategy 'fused'".

    Raises:
        TypeError: dtype, which x is computed in, is none of theirs.
        NotImplementedError: the ranks cannot share symmetric memory, or the interpreter cannot compute in dtype.
    """
    if dtype not in DTYPES:
        raise TypeError(f"{what} needs bfloat16, float16 or float32, got {dtype}")
    if dtype == torch.bfloat16 and x.device.type == "cpu":
        raise NotImplementedError(
            f"{what} needs float16 or float32 on CPUs, got bfloat16, which is wrong in Triton's interpreter"
        )
    if is_traced(x):
        return
    why_not = unsupported_reason(group_name, x.device)
    if why_not is not None:
        raise NotImplementedError(
            f"{what} needs ranks that share symmetric memory: {why_not}; strategy 'collective' runs everywhere"
        )


@functools.cache
def _module(name: str):
    return importlib.import_module(f"torch_fdattn.{name}")


def gather(x, weights, group_name, strategy, rows, keep, **options):
    run = _module(f"{_HERE}.{_GATHERS[strategy]}").all_gather_matmul
    with on_device(x.device):
        return run(x.contiguous(), weights, group_name, list(rows), keep, **options)


def _gather_fake(x, weights, group_name, strategy, rows, keep):
    total = sum(rows)
    return [
        *(x.new_empty(total, weight.shape[0]) for weight in weights),
        *([x.new_empty(total, x.shape[1])] if keep else []),
    ]


def gather_swiglu(x, weights, group_name, strategy, rows):
    return gather(x, weights, group_name, strategy, rows, False, gated=True)


def _gather_swiglu_fake(x, weights, group_name, strategy, rows):
    return [x.new_empty(sum(rows), weight.shape[0] // 2) for weight in weights]


def scatter(x, weight, group_name, strategy, rows, rank, bias=None):
    """bias (N,): this rank's own, which all ranks' are summed with."""
    run = _module(f"{_HERE}.{_SCATTERS[strategy]}").matmul_reduce_scatter
    with on_device(x.device):
        return run(x.contiguous(), weight, group_name, list(rows), _contiguous(bias))


def _scatter_fake(x, weight, group_name, strategy, rows, rank):
    return x.new_empty(rows[rank], weight.shape[0])


def all_reduce(x, weight, group_name, method, bias=None, scale=None):
    """bias as `scatter`'s; scale: of a weight in float8."""
    run, scaled = _module(f"{_HERE}.{method}").matmul_all_reduce, ()
    reads = scale is not None and method == "gemm_all_reduce"
    if reads and not _module("ops.gemm.dequantise").as_bytes(weight):
        scaled = (float8.columns_of(scale, weight),)
    else:
        weight = float8.dequantised(weight, scale, x.dtype)
    with on_device(x.device):
        return run(x.contiguous(), weight, group_name, _contiguous(bias), *scaled)


def all_reduce_norm(x, weight, group_name, method, residual, norm_weight, eps, bias=None):
    """(normed, added): the norm in the launch that sums BLAS' products (`row_norm.py`), or in one behind the product
    that sums; bias the same on all ranks."""
    sum_norm = _module(f"{_HERE}.row_norm").sum_norm
    if method == "gemm_all_reduce":
        y = _module(f"{_HERE}.{method}").matmul_all_reduce(x.contiguous(), weight, group_name)
        return sum_norm(y, bias, residual, norm_weight, eps, None)
    part = F.linear(x, weight)
    return sum_norm(part, bias, residual, norm_weight, eps, group_name)


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def _all_reduce_fake(x, weight, group_name, method, scale=None):
    return x.new_empty(x.shape[0], weight.shape[0])


def _all_reduce_norm_fake(x, weight, group_name, method, residual, norm_weight, eps, bias=None):
    return x.new_empty(residual.shape), x.new_empty(residual.shape)


library.define_raw(
    "tp_all_gather_matmul(Tensor x, Tensor[] weights, str group_name, str strategy, SymInt[] rows, bool keep) "
    "-> Tensor[]",
    gather,
    _gather_fake,
)
library.define_raw(
    "tp_all_gather_swiglu(Tensor x, Tensor[] weights, str group_name, str strategy, SymInt[] rows) -> Tensor[]",
    gather_swiglu,
    _gather_swiglu_fake,
)
library.define_raw(
    "tp_matmul_reduce_scatter(Tensor x, Tensor weight, str group_name, str strategy, SymInt[] rows, int rank) "
    "-> Tensor",
    scatter,
    _scatter_fake,
)
library.define_raw(
    "tp_matmul_all_reduce(Tensor x, Tensor weight, str group_name, str method, *, Tensor? scale=None) -> Tensor",
    all_reduce,
    _all_reduce_fake,
)


library.define_raw(
    "tp_matmul_all_reduce_rms_norm(Tensor x, Tensor weight, str group_name, str method, Tensor residual, "
    "Tensor norm_weight, float eps, Tensor? bias=None) -> (Tensor, Tensor)",
    all_reduce_norm,
    _all_reduce_norm_fake,
)


class _AllGatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group_name, strategy, rows, rank, x, *weights):
        keep = any(weight.requires_grad for weight in weights)
        found = torch.ops.fdattn.tp_all_gather_matmul(x, weights, group_name, strategy, rows, keep)
        ctx.how = group_name, strategy, rows, rank
        ctx.save_for_backward(*weights, *found[len(weights) :])
        return tuple(found[: len(weights)])

    @staticmethod
    def backward(ctx, *dys):
        library.refuse_double_backward("all_gather_matmul")
        group_name, strategy, rows, rank = ctx.how
        saved = ctx.saved_tensors  # once: checkpoints give them once
        weights, gathered = saved[: len(dys)], saved[len(dys) :]
        dx = None
        if ctx.needs_input_grad[4]:
            # One product over the columns of all weights.
            dy = dys[0] if len(dys) == 1 else torch.cat(dys, 1)
            weight = weights[0] if len(weights) == 1 else torch.cat(weights)
            dx = torch.ops.fdattn.tp_matmul_reduce_scatter(
                dy, weight.t(), group_name, strategy, rows, rank
            )
        needed = ctx.needs_input_grad[5:]
        dws = (dy.t() @ gathered[0] if want else None for dy, want in zip(dys, needed, strict=True))
        return None, None, None, None, dx, *dws


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group_name, strategy, rows, rank, x, weight):
        ctx.how = group_name, strategy, rows, rank
        ctx.save_for_backward(x, weight)
        return torch.ops.fdattn.tp_matmul_reduce_scatter(
            x, weight, group_name, strategy, rows, rank
        )

    @staticmethod
    def backward(ctx, dy):
        library.refuse_double_backward("matmul_reduce_scatter")
        group_name, strategy, rows, _ = ctx.how
        x, weight = ctx.saved_tensors
        keep = ctx.needs_input_grad[5]
        dx, *gathered = torch.ops.fdattn.tp_all_gather_matmul(
            dy, [weight.t()], group_name, strategy, rows, keep
        )
        dw = gathered[0].t() @ x if keep else None
        return None, None, None, None, dx, dw


class _MatmulAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group_name, method, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.ops.fdattn.tp_matmul_all_reduce(x, weight, group_name, method)

    @staticmethod
    def backward(ctx, dy):
        library.refuse_double_backward("matmul_all_reduce")
        x, weight = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad[2:]
        return None, None, dy @ weight if wants_x else None, dy.t() @ x if wants_weight else None


def _forward(x: Tensor, kernel: Callable, op: Callable) -> Callable:
    """The kernel itself where nobody would see the op."""
    return kernel if library.can_bypass_dispatcher(x) else op


def _trained(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def all_gather_matmul(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], group_name: str, strategy: str,
    rows: Sequence[int], rank: int,
) -> list[Tensor]:  # fmt: skip
    """As `collective.all_gather_matmul`."""
    weights = [_cast(weight, x) for weight in weights]
    if _trained(x, *weights):
        ys = _AllGatherMatmul.apply(group_name, strategy, rows, rank, x, *weights)
    else:
        run = _forward(x, gather, torch.ops.fdattn.tp_all_gather_matmul)
        ys = run(x, weights, group_name, strategy, rows, False)
    return [_plus(y, bias) for y, bias in zip(ys, biases, strict=True)]


def takes_swiglu(
    strategy: str, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], rows: Sequence[int]
) -> bool:  # fmt: skip
    """Whether products that are gathered for had better be `all_gather_swiglu`'s: of many rows, in chunks."""
    if strategy != "copy_engine" or any(bias is not None for bias in biases):
        return False
    if is_traced(x):  # where sizes would be guards
        return False
    sizes = [(rows, len(weight) // 2, x.shape[1]) for weight in weights]
    if not all(swiglu.is_better_by_tiles(*size) for size in sizes):
        return False
    # Own rows may be few, but every rank's are multiplied by tiles.
    fits, by_tiles = (
        _module("ops.gemm.swiglu_gemm").can_launch_directly,
        _module("ops.gemm.persistent_swiglu_gemm").fits,
    )
    whole = x.shape[1] * x.element_size() % 16 == 0  # rows as they are gathered
    return whole and all(fits(x, weight) and by_tiles(x, weight) for weight in weights)


def all_gather_swiglu(
    x: Tensor, weights: Sequence[Tensor], group_name: str, strategy: str, rows: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    """[silu(gate) * up (sum(rows), N_i / 2)] of the products' halves, where this `takes_swiglu`."""
    run = _forward(x, gather_swiglu, torch.ops.fdattn.tp_all_gather_swiglu)
    return run(x, weights, group_name, strategy, rows)


def matmul_reduce_scatter(
    x: Tensor, weight: Tensor, bias: Tensor | None, group_name: str, strategy: str, rows: Sequence[int], rank: int,
) -> Tensor:  # fmt: skip
    """As `collective.matmul_reduce_scatter`."""
    weight = _cast(weight, x)
    if _trained(x, weight):
        y = _MatmulReduceScatter.apply(group_name, strategy, rows, rank, x, weight)
    else:
        run = _forward(x, scatter, torch.ops.fdattn.tp_matmul_reduce_scatter)
        y = run(x, weight, group_name, strategy, rows, rank)
    return _plus(y, bias)


def matmul_all_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None, group_name: str, method: str, scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `collective.matmul_all_reduce`."""
    weight = _cast(weight, x) if scale is None else weight
    if _trained(x, weight):
        y = _MatmulAllReduce.apply(
            group_name, method, x, float8.dequantised(weight, scale, x.dtype)
        )
    else:
        run = _forward(x, all_reduce, torch.ops.fdattn.tp_matmul_all_reduce)
        y = run(x, weight, group_name, method, scale=scale)
    return _plus(y, bias)


def may_take_norm(x: Tensor, *others: Tensor | None) -> bool:
    """Whether `all_reduce_norm` is for such tensors: of one dtype, and nobody differentiates."""
    tensors = [x, *[t for t in others if t is not None]]
    return all(t.dtype == x.dtype for t in tensors) and not _trained(*tensors)


def takes_norm(method: str, world: int, x: Tensor, weight: Tensor) -> bool:
    """Whether it is for such sizes: rows are few and fit."""
    return (
        method in METHODS
        and len(x) <= NORM_ROWS
        and _module(f"{_HERE}.row_norm").takes(len(weight), x.dtype)
        and len(x) * len(weight) * x.element_size()
        <= _module(f"{_HERE}.low_latency").lamport_bytes(world)
    )


def matmul_all_reduce_rms_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, group_name: str, method: str, residual: Tensor, norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(normed, added), of what `may_take_norm` and `takes_norm` have said yes to."""
    given = x, weight, group_name, method, residual, norm_weight, eps, bias
    return _forward(x, all_reduce_norm, torch.ops.fdattn.tp_matmul_all_reduce_rms_norm)(*given)  # fmt: skip


def _cast(weight: Tensor, x: Tensor) -> Tensor:
    return weight if weight.dtype == x.dtype else weight.to(x.dtype)


def _plus(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.to(y.dtype)
