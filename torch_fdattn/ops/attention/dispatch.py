"""Which kernels run a call of attention: the first row of TABLE that fits its hardware, dtype, dims and features.

A kernel that can do less than all, or wants some generation, is a row above the portable ones, with what it can
do as `features`; `op.py` knows how to launch each `kernel`. Tiles within a kernel are `configs.py`'s. docs/attention.md
shows both (held by `tests/ops/attention/test_dispatch.py`).

What Hopper's rows leave to the portable ones beyond their columns; docs/attention.md has the list for users:

    hopper/launch.py `takes`            head dims up to 32, other than multiples of 8 or than V's; kv_block; scale, or softcap / scale,
                                        at or below 1e-30; a softcap above 1000; tensors that no descriptor takes: expanded, empty,
                                        strides of no whole 16 bytes; pages of other sizes than 16, 32, 64 or multiples of a block of
                                        keys; a dtype of results other than the inputs' and float32 (raw ops alone)
    hopper/backward/launch.py `takes`   packed sequences above head dim 128, or where (sequences + 2) · 128 > max(2 · tokens, 4096)
    hopper/backward/launch.py `gives`   slopes' gradient with a softcap or of packed sequences
    `derivative_op.backward_kernel`     dout that no descriptor takes, such as the expanded one of out.sum()
    here                                all calls while tiles are given by hand or by `autotune`
    `is_aligned`, at the launch         addresses of q, k, v or dout that are no multiple of 16: no part of a prepared call's key
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn.ops import library
from torch_fdattn.ops.attention import hopper, tuning
from torch_fdattn.ops.attention.configs import device_capability
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.packed import Packed

#: CUDA devices by the first number of their compute capability; all other GPUs count as sm_80.
GENERATIONS = {8: "sm_80", 9: "sm_90", 10: "sm_100", 12: "sm_100"}
GPUS = frozenset(("sm_80", "sm_90", "sm_100", "AMD"))
FEATURES = frozenset(
    (
        "causal",
        "window",
        "lengths",
        "positions",
        "softcap",
        "ALiBi",
        "sinks",
        "mask",
        "dropout",
        "packed",
        "pages",
    )
)
_HALF, _SINGLE, _DOUBLE = (torch.bfloat16, torch.float16), (torch.float32,), (torch.float64,)


class Row(NamedTuple):
    """kernel: also the end of the launch counter's name, as in ``launches["attention_forward/triton"]``."""

    kernel: str
    directions: tuple[str, ...]  # of forward, backward
    hardware: frozenset[str]
    dtypes: tuple[torch.dtype, ...]
    head_dim: int  # at most, the larger one of K and V
    features: frozenset[str]
    note: str
    #: What else it asks of (q, k, v, options, packed).
    fits: Callable[[Tensor, Tensor, Tensor, AttentionOptions, Packed | None], bool] | None = None


def _fits_hopper(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, packed: Packed | None
) -> bool:
    if not hopper.is_importable():
        return False
    from torch_fdattn.ops.attention.hopper.launch import takes

    return not tuning.state.active and takes(q, k, v, options, packed)


def _fits_hopper_backward(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, packed: Packed | None
) -> bool:
    if not hopper.is_importable():
        return False
    from torch_fdattn.ops.attention.hopper.backward.launch import takes

    return not tuning.state.active and takes(q, k, v, options, packed)


_BOTH = ("forward", "backward")
TABLE = (
    Row("hopper", ("forward",), frozenset(("sm_90",)), _HALF, 256, frozenset(("causal", "window", "lengths", "positions", "softcap", "ALiBi", "sinks", "packed", "pages")),
        "Gluon; head dims above 32, K's and V's equal, rows of whole 16 bytes; pages of 16, 32, 64 or multiples of 128 (64 above head dim 128)", _fits_hopper),
    Row("hopper", ("backward",), frozenset(("sm_90",)), _HALF, 256, frozenset(("causal", "window", "lengths", "positions", "softcap", "ALiBi", "sinks", "packed")),
        "Gluon; head dims above 32, K's and V's equal, rows of whole 16 bytes; packed sequences up to head dim 128; gradients of sinks, and of slopes where not packed, without a softcap", _fits_hopper_backward),
    Row("triton", _BOTH, GPUS, (*_HALF, *_SINGLE), 512, FEATURES, "portable kernels, tuned on sm_90 up to 256"),
    Row("triton", _BOTH, frozenset(("interpreter",)), (torch.float16, *_SINGLE), 512, FEATURES,
        "the same kernels, interpreted; bf16 is refused"),
    Row("cpu", _BOTH, frozenset(("CPU", "interpreter")), (*_HALF, *_SINGLE, *_DOUBLE), 512, FEATURES,
        "torch's flash kernel in fp32 (`cpu.py`), the reference for what it cannot; float64 on CUDA is refused"),
)  # fmt: skip


def choose(
    direction: str, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, packed: Packed | None = None
) -> str:  # fmt: skip
    """The kernel for checked inputs; packed ones by heads (1, H, T, D)."""
    compiled = library.use_triton(q)  # refuses what no row has, with its reason
    hardware = _gpu(q.device) if q.is_cuda else "interpreter" if compiled else "CPU"
    rows = _rows(direction, hardware, q.dtype, max(q.shape[3], v.shape[3]))
    if rows[0].features is FEATURES:
        return rows[0].kernel
    asked = features_of(options, packed)
    return next(
        row.kernel
        for row in rows
        if asked <= row.features and (row.fits is None or row.fits(q, k, v, options, packed))
    )


@functools.cache
def _gpu(device: torch.device) -> str:
    return "AMD" if torch.version.hip else GENERATIONS.get(device_capability(device)[0], "sm_80")


@functools.cache
def _rows(direction: str, hardware: str, dtype: torch.dtype, head_dim: int) -> tuple[Row, ...]:
    """The rows that may fit, the last of which does everything."""
    return tuple(
        row
        for row in TABLE
        if direction in row.directions and hardware in row.hardware and dtype in row.dtypes and head_dim <= row.head_dim
    )  # fmt: skip


def features_of(options: AttentionOptions, packed: Packed | None = None) -> frozenset[str]:
    """What a call asks of its kernel, of FEATURES."""
    mask, scores, dropout = options.mask, options.scores, options.dropout
    asked = {
        "causal": mask.window_right == 0,
        "window": mask.window_left >= 0 or mask.window_right > 0,
        "lengths": mask.kv_lens is not None,
        "positions": mask.q_start is not None or mask.kv_start is not None or mask.kv_block > 0,
        "softcap": scores.softcap > 0,
        "ALiBi": scores.alibi_slopes is not None,
        "sinks": scores.sinks is not None,
        "mask": scores.attn_mask is not None,
        "dropout": dropout.p > 0,
        "packed": packed is not None,
        "pages": packed is not None and packed.page_table is not None,
    }
    return frozenset(name for name, needed in asked.items() if needed)
