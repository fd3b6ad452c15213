"""What FlashAttention's arguments mean to our ops, and the errors of a wrong one.

FlashAttention raises RuntimeError (TORCH_CHECK) where our ops raise ValueError or TypeError: what is raised here is
both. Messages name the arguments as the caller wrote them: (batch, sequence, heads, head_dim), softmax_scale, window_size.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypedDict

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.ops.determinism import is_set, ordered


class ArgumentValueError(ValueError, RuntimeError):
    """A value that cannot be taken."""


class ArgumentTypeError(TypeError, RuntimeError):
    """A type or dtype that cannot be taken."""


def raises_runtime_errors(function: Callable) -> Callable:
    """`function`, whose ValueError and TypeError are RuntimeError too, as code that calls flash_attn catches them."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except RuntimeError:  # NotImplementedError is one
            raise
        except ValueError as error:
            raise ArgumentValueError(*error.args) from error
        except TypeError as error:
            raise ArgumentTypeError(*error.args) from error

    return call


class ScoreOptions(TypedDict):
    """Keywords of `attention`, `varlen_attention` and the decode ops."""

    scale: float
    causal: bool
    window: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None


def score_options(
    q: Tensor, batch: int, softmax_scale: float | None, causal: bool, window_size: Sequence[int], softcap: float,
    alibi_slopes: Tensor | None,
) -> ScoreOptions:  # fmt: skip
    """q: of the head dim that the default scale is of, before it is padded; its second last dim are the heads."""
    checks.expect_bool(causal=causal)
    return ScoreOptions(
        scale=_scale(softmax_scale, q.shape[-1]),
        causal=bool(causal),
        window=_window(window_size),
        softcap=_softcap(softcap),
        alibi_slopes=_slopes(alibi_slopes, batch, q),
    )


def _scale(softmax_scale: float | None, head_dim: int) -> float:
    if softmax_scale is None:
        return head_dim**-0.5
    softmax_scale = checks.number("softmax_scale", softmax_scale)
    checks.expect_convertible("softmax_scale", softmax_scale)
    if type(softmax_scale) is int:
        softmax_scale = float(softmax_scale)  # the dispatcher takes no more than 64 bits
    if not 1e-37 <= softmax_scale <= 1e37:  # as `checks.check_scale`
        raise ValueError(
            f"softmax_scale must be a positive finite number or None, got {softmax_scale}"
        )
    return softmax_scale


def _window(window_size: Sequence[int]) -> tuple[int, int]:
    """Any negative number is unbounded; the numbers may be tensors of no dimension, as FlashAttention's own tests give."""
    try:
        left, right = (operator.index(x) for x in window_size)
    except (TypeError, ValueError):
        raise TypeError(
            f"window_size must be two ints (left, right), -1 where unbounded, got {window_size!r}"
        ) from None
    return max(left, -1), max(right, -1)


def _softcap(softcap: float) -> float:
    checks.expect_convertible("softcap", softcap)
    if type(softcap) is int:
        softcap = float(softcap)
    if softcap != softcap:
        raise ValueError("softcap must be a positive number, or 0 or less for none, got nan")
    return softcap if softcap > 0 else 0.0


def _slopes(alibi_slopes: Tensor | None, batch: int, q: Tensor) -> Tensor | None:
    if alibi_slopes is None:
        return None
    checks.expect_tensor("alibi_slopes", alibi_slopes)
    if alibi_slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes must be float32, got {alibi_slopes.dtype}")
    heads = q.shape[-2]
    if tuple(alibi_slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(
            f"alibi_slopes must have shape ({heads},) or ({batch}, {heads}), got {tuple(alibi_slopes.shape)}"
        )
    checks.expect_device("alibi_slopes", alibi_slopes, q.device, "q")
    return alibi_slopes


def check_qkv(
    q: Tensor, k: Tensor, v: Tensor, kv_rank: int | None = None, names: Sequence[str] = ("q", "k", "v")
) -> None:  # fmt: skip
    """Ranks, heads, head dims, dtypes and devices; the dims before the heads are the caller's to check.

    kv_rank: dimensions of k and v where they are not q's.
    """
    q_name, k_name, v_name = names
    rank = q.dim() if isinstance(q, Tensor) else 0
    expect_rank(k_name, k, kv_rank or rank)
    expect_rank(v_name, v, kv_rank or rank)
    checks.expect_float(q_name, q)
    checks.expect_groups(q.shape[-2], k.shape[-2], q_name, k_name)
    checks.expect_shape(k_name, k, (*k.shape[:-1], q.shape[-1]), q_name)
    checks.expect_shape(v_name, v, (*k.shape[:-1], v.shape[-1]), k_name)
    for name, x in ((k_name, k), (v_name, v)):
        checks.expect_dtype(name, x, q.dtype, q_name)
        checks.expect_device(name, x, q.device, q_name)
    for name, x in ((q_name, q), (v_name, v)):
        if not 1 <= x.shape[-1] <= checks.MAX_HEAD_DIM:
            raise ValueError(
                f"{name}'s head_dim must be from 1 to {checks.MAX_HEAD_DIM}, got {x.shape[-1]}"
            )


_DIMS = {
    3: "(tokens, heads, head_dim)",
    4: "(batch, sequence, heads, head_dim)",
}


def expect_rank(name: str, x: object, rank: int, dims: str | None = None) -> None:
    checks.expect_tensor(name, x)
    if x.dim() != rank:
        raise ValueError(
            f"{name} must have {rank} dimensions {dims or _DIMS[rank]}, got shape {tuple(x.shape)}"
        )


def expect_int32(
    name: str, x: object, shape: tuple[int, ...], like: str, q: Tensor, q_name: str = "q"
) -> None:
    """An int32 tensor of this shape on q's device."""
    checks.expect_tensor(name, x)
    if x.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {x.dtype}")
    checks.expect_shape(name, x, shape, like)
    checks.expect_device(name, x, q.device, q_name)


def host_values(x: Tensor) -> list[int] | None:
    """What an index tensor holds, where a look waits for no device or TORCH_FDATTN_CHECK=1 asks for one."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or not x.numel():
        return None
    return x.tolist() if x.is_cpu or checks.readable(x) else None


def expect_pages(name: str, table: object, batch: int | None, k: Tensor, q: Tensor) -> None:
    """A page table int32 (batch, pages a sequence) over k (pages, page, heads, head_dim); None: of any batch."""
    checks.expect_tensor(name, table)
    if table.dim() != 2:
        rows = "batch" if batch is None else batch
        raise ValueError(
            f"{name} must have shape ({rows}, pages a sequence), got {tuple(table.shape)}"
        )
    rows = table.shape[0] if batch is None else batch
    expect_int32(name, table, (rows, table.shape[1]), "the sequences of q", q)
    if k.shape[1] < 1:
        raise ValueError(
            f"the pages behind {name} must hold at least one token (dimension 1 of k), got 0"
        )


def expect_used_pages(name: str, table: Tensor, lens: Tensor, k: Tensor) -> None:
    """Where values can be read: pages that are there, as far as each sequence's keys reach. Kernels read no others."""
    rows, lens = host_values(table), host_values(lens)
    if rows is None or lens is None:
        return
    pages, page = k.shape[:2]
    used = [row[: -(-n // page)] for row, n in zip(rows, lens, strict=True)]
    if not all(0 <= x < pages for row in used for x in row):
        raise ValueError(
            f"{name} must hold numbers in [0, {pages}), the pages of k, where a sequence has keys, got {used}"
        )


def dense_rows(q: Tensor) -> Tensor:
    """q, or a copy where its last dimension has strides, as theirs makes one: out has its memory, which callers view."""
    return q if q.stride(-1) == 1 else q.contiguous()


def backward_order(deterministic: bool) -> AbstractContextManager[None]:
    """Where a forward runs whose backward is to have one order of sums, if asked for."""
    checks.expect_bool(deterministic=deterministic)
    if not deterministic or is_set():
        return nullcontext()
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "deterministic must be False in a compiled graph, got True: "
            "call torch_fdattn.set_deterministic(True) outside of it, which graphs follow"
        )
    return ordered()


def expect_longest(**named: object) -> None:
    """The longest lengths: ints, or tensors of no dimension, such as cu_seqlens.diff().max(), which are not read."""
    for name, value in named.items():
        if isinstance(value, Tensor):
            if value.dim() or value.dtype not in (torch.int32, torch.int64):
                raise TypeError(
                    f"{name} must be an int, or a tensor of one, got {value.dtype} of shape {tuple(value.shape)}"
                )
            continue
        checks.expect_int64(**{name: value})
        if not torch.compiler.is_compiling() and value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")


def refuse(where: str, **named: object) -> None:
    """Of arguments that only one value of is taken: name=(value, that value, why)."""
    for name, (value, neutral, why) in named.items():
        if value is not neutral and (isinstance(value, Tensor) or value != neutral):
            raise NotImplementedError(
                f"{where} takes {name}={neutral!r} only, got "
                f"{type(value).__name__ if isinstance(value, Tensor) else repr(value)}: {why}"
            )
