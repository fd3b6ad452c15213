"""Validation shared by all ops: each error names the argument, what was expected and what came.

Only metadata is looked at, so the same checks run on real and on fake tensors and never wait for a
device. What only the device knows (lengths) is made safe in the kernels instead.
"""

from __future__ import annotations

import operator
import os

import torch
from torch import Tensor

HEAD_DIMS = "a multiple of 8 from 16 to 256"
#: Head dims of caches that are appended to or sharded, and of attention and decode.
MAX_HEAD_DIM = 512
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
CHECK_VALUES = os.environ.get("TORCH_FDATTN_CHECK", "0") == "1"


def check_qkv(
    q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str, str] = ("q", "k", "v"), float8: bool = False,
) -> None:  # fmt: skip
    """q (B, H, S, D), k (B, H_kv, S_kv, D), v (B, H_kv, S_kv, DV): ranks, shapes, head counts, dtypes, devices."""
    for name, tensor in zip(names, (q, k, v), strict=True):
        expect_4d(name, tensor)
    q_name, k_name, v_name = names
    if not float8:  # where the caller has checked dtypes
        expect_float(q_name, q)
    batch, heads, _, head_dim = q.shape
    expect_head_dim(q_name, head_dim)
    expect_head_dim(v_name, v.shape[3])
    kv_heads, kv_len = k.shape[1], k.shape[2]
    expect_shape(k_name, k, (batch, kv_heads, kv_len, head_dim), q_name)
    expect_shape(v_name, v, (batch, kv_heads, kv_len, v.shape[3]), k_name)
    expect_groups(heads, kv_heads, q_name, k_name)
    for name, tensor in ((k_name, k), (v_name, v)):
        expect_dtype(name, tensor, q.dtype, q_name)
        expect_device(name, tensor, q.device, q_name)


def expect_types(
    tensors: tuple[tuple[str, object], ...], lengths: tuple[object, ...] = (), scale: object = None,
    softcap: object = 0.0, dropout_p: object = 0.0, **optional: object,
) -> None:  # fmt: skip
    """The types that the dispatcher would refuse with a whole schema in place of an argument's name.

    optional: further tensors, or None.
    """
    for name, tensor in (*tensors, *((name, x) for name, x in optional.items() if x is not None)):
        expect_tensor(name, tensor)
    for name, tensor in zip(("kv_lens", "q_start", "kv_start"), lengths, strict=False):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name} must be an int32 (or int64) tensor of shape (batch,) or None, got {type(tensor).__name__}"
            )
    if scale is not None and type(scale) is not float:
        expect_convertible("scale", scale)
    if type(softcap) is not float:
        expect_convertible("softcap", softcap)
    if type(dropout_p) is not float:
        expect_convertible("dropout_p", dropout_p)


def expect_convertible(name: str, value: object) -> None:
    """A number that a float can hold; others end in the dispatcher's error, with a whole schema in it.

    A tensor would become one there, and lose its gradient.
    """
    expect_number(name, value)
    if torch.compiler.is_compiling():  # traced ints have no bits to count
        return
    if isinstance(value, int) and value.bit_length() > 1023:
        raise ValueError(f"{name} must be a finite number, got an int of {value.bit_length()} bits")


def check_lengths(
    name: str, lengths: Tensor | None, q: Tensor, bound: int | None = None, like: str = "q",
    batch: int | None = None,
) -> None:  # fmt: skip
    """A per-sequence integer tensor (B,) on the device of q (or what `like` names), or None.

    batch: of packed sequences, whose number is not q's first dimension.
    """
    if lengths is None:
        return
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 (or int64), got {lengths.dtype}")
    if batch is None:
        expect_shape(name, lengths, (q.shape[0],), f"{like}'s batch")
    else:
        expect_shape(name, lengths, (batch,), "the sequences of cu_seqlens_q")
    expect_device(name, lengths, q.device, like)
    if bound is not None and readable(lengths):
        low, high = (int(x) for x in torch.aminmax(lengths))
        if low < 0 or high > bound:
            raise ValueError(f"{name} must lie in [0, {bound}], got values from {low} to {high}")


def check_positions(
    q_start: Tensor | None, kv_start: Tensor | None, kv_block: int, kv_stride: int, q: Tensor,
    kv_len: int, masked: bool, batch: int | None = None,
) -> None:  # fmt: skip
    """The position map of DESIGN.md: both of kv_block and kv_stride or neither; batch as in `check_lengths`."""
    check_lengths("q_start", q_start, q, batch=batch)
    check_lengths("kv_start", kv_start, q, batch=batch)
    if kv_block == 0 and kv_stride == 0:
        return
    if kv_block < 1 or kv_stride < kv_block:
        raise ValueError(
            "kv_block and kv_stride must both be 0 or satisfy 1 <= kv_block <= kv_stride, "
            f"got kv_block={kv_block}, kv_stride={kv_stride}"
        )
    far = 2**29  # `positions.FAR`. (A symbolic length is checked when the compiled op runs.)
    if isinstance(kv_len, int) and (
        kv_stride > far or (kv_len - 1) // kv_block * kv_stride + kv_block > far
    ):
        raise ValueError(
            "kv_stride and the last key's position must be at most 2**29, got "
            f"{kv_len} keys with kv_block={kv_block}, kv_stride={kv_stride}"
        )
    if masked and q_start is None:
        raise ValueError(
            "q_start must be given when kv_block is and the mask depends on positions: the position "
            "of the last key does not follow from a strided shard, got q_start=None"
        )


def check_scale(scale: float | None) -> None:
    # Kernels hold it in fp32, times log2(e).
    if scale is not None and not 1e-37 <= scale <= 1e37:
        raise ValueError(f"scale must be a positive finite number, got {scale}")


def check_scores(
    softcap: float, slopes: Tensor | None, sinks: Tensor | None, q: Tensor, batch: int | None = None
) -> None:
    """What happens to the scores of q (B, H, S, D), or of a packed q (T, H, D) of `batch` sequences."""
    expect_number("softcap", softcap)
    for name, tensor in (("alibi_slopes", slopes), ("sinks", sinks)):
        if tensor is not None:
            expect_tensor(name, tensor)
    if softcap != 0 and not 1e-37 <= softcap <= 1e37:  # as scale: kernels divide by it in fp32
        raise ValueError(f"softcap must be positive, or 0 for none, got {softcap}")
    batch, heads = q.shape[0] if batch is None else batch, q.shape[1]
    if slopes is not None:
        shape = (heads,) if slopes.dim() == 1 else (batch, heads)
        expect_shape("alibi_slopes", slopes, shape, "q's heads")
        expect_float("alibi_slopes", slopes)
        expect_device("alibi_slopes", slopes, q.device, "q")
    if sinks is not None:
        expect_shape("sinks", sinks, (heads,), "q's heads")
        expect_float("sinks", sinks)
        expect_device("sinks", sinks, q.device, "q")


def check_attn_mask(attn_mask: Tensor | None, q: Tensor, full: tuple[int | None, ...]) -> None:
    """An explicit mask of q's device for scores of this shape; None: of any size."""
    if attn_mask is None:
        return
    expect_tensor("attn_mask", attn_mask)
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in DTYPES:
        raise TypeError(
            "attn_mask must be boolean, or bfloat16, float16, float32 (or float64 on CPU), "
            f"got {attn_mask.dtype}{_padding_hint(attn_mask, full)}"
        )
    if attn_mask.dtype == torch.float64 and q.is_cuda:
        raise TypeError("attn_mask must not be float64 on CUDA, got torch.float64")
    pairs = zip(reversed(attn_mask.shape), reversed(full), strict=False)
    fits = all(
        size in ((1, whole) if isinstance(size, int) else (whole, 1))  # an unbacked one may be no 1
        or (whole is None and size)
        for size, whole in pairs
    )
    if attn_mask.dim() > 4 or not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in full)
        raise ValueError(
            f"attn_mask must be broadcastable to ({sizes}) (batch, heads, queries, keys), "
            f"got shape {_shape(attn_mask)}{_padding_hint(attn_mask, full)}"
        )
    expect_device("attn_mask", attn_mask, q.device, "q")


def _padding_hint(attn_mask: Tensor, full: tuple[int | None, ...]) -> str:
    """What turns a mask (batch, keys) or (batch, queries, keys), as tokenizers and models have them, into ours."""
    cast = "" if attn_mask.dtype == torch.bool or attn_mask.is_floating_point() else ".bool()"
    for shape, index in (
        ((full[0], full[3]), "[:, None, None]"),
        ((full[0], *full[2:]), "[:, None]"),
    ):
        if None not in shape and tuple(attn_mask.shape) == shape:
            names = "(batch, keys)" if len(shape) == 2 else "(batch, queries, keys)"
            return f"; a mask {names} is given as attn_mask{cast}{index}"
    return ""


def check_dropout(p: float, seed: Tensor | None, q: Tensor) -> None:
    expect_number("dropout_p", p)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout_p must be from 0 to 1, got {p}")
    if seed is None:
        if p:
            raise ValueError("dropout_seed must be given to a raw op where dropout_p is, got None")
        return
    expect_tensor("dropout_seed", seed)
    if seed.dtype != torch.int64:
        raise TypeError(f"dropout_seed must be int64, got {seed.dtype}")
    if seed.shape != (3,):
        expected = "a seed and an offset, or (3,), with the number of q's first head"
        expect_shape("dropout_seed", seed, (2,), expected)
    expect_device("dropout_seed", seed, q.device, "q")


def check_window(window_left: int, window_right: int) -> None:
    if window_left < -1 or window_right < -1:
        raise ValueError(
            "window must be (left, right) with each at least 0, or -1 for unbounded, "
            f"got ({window_left}, {window_right})"
        )


def readable(tensor: Tensor) -> bool:
    """Whether TORCH_FDATTN_CHECK=1 asks for a look at values that can be read: not on meta, under capture or tracing."""
    if not CHECK_VALUES or type(tensor) is not Tensor or tensor.is_meta or not tensor.numel():
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def expect_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"{name} must be a strided tensor, got {kind}")


def expect_number(name: str, value: object) -> None:
    # In this order: numbers that torch.compile traces cannot be asked for their attributes.
    if isinstance(value, (int, float)):
        return
    if isinstance(value, (Tensor, str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")


def number(name: str, value: object) -> object:
    """A 0-dim tensor as the number that it holds, which waits for its device; everything else as it is."""
    if type(value) is float or not isinstance(value, Tensor) or value.dim() or value.is_complex():
        return value
    if value.requires_grad and torch.is_grad_enabled():
        raise TypeError(
            f"{name} has no gradient and must not require one, got a tensor that does: multiply q by it, or detach it"
        )
    return _traced(name, value) if torch.compiler.is_compiling() else float(value)


def _traced(name: str, tensor: Tensor) -> float:
    """What a 0-dim tensor holds, where a graph is made; an error that names it where that is known at a call alone."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    told = f"{name} must be a number inside of a graph, got a 0-dim tensor: give float({name}), taken outside of it"
    if not torch.compiler.is_dynamo_compiling():  # torch.export, not strict
        try:
            return float(tensor)
        except RuntimeError as error:
            raise TypeError(told) from error
    found = float(tensor)  # unless fullgraph=True, between two graphs
    if not (statically_known_true(found == 0) or statically_known_true(found != 0)):
        # fullgraph=True raises it; an exception would not be shown.
        torch._dynamo.graph_break(msg=told)
    return found


def expect_int64(**named: object) -> None:
    for name, value in named.items():
        if isinstance(value, int):
            if not -(2**63) <= value < 2**63:
                raise ValueError(f"{name} must be an int64, got {value}")
        elif isinstance(value, Tensor) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")


def expect_bool(**named: object) -> None:
    """NumPy's and symbolic ones, ints and None are what the dispatcher takes them for."""
    for name, value in named.items():
        if isinstance(value, int):  # a bool is one
            continue
        if isinstance(value, Tensor) or not hasattr(value, "__bool__"):
            raise TypeError(f"{name} must be a bool, got {type(value).__name__}")


def expect_str(**named: object) -> None:
    """What the dispatcher would refuse with a whole schema in place of an argument's name."""
    for name, value in named.items():
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a str, got {type(value).__name__}")


def plain_float(name: str, value: object) -> float:
    """Of any number, NumPy's scalars included, which Triton and ctypes refuse."""
    expect_convertible(name, value)
    return float(value)


def plain_int(name: str, value: object) -> int:
    """As `plain_float`, of any integer."""
    try:
        return int(operator.index(value))  # of a bool too
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}") from None


def expect_writable(name: str, tensor: Tensor) -> None:
    """Elements that are written to have places of their own; what strides cannot show so counts as shared."""
    if not tensor.numel():
        return
    dims = [pair for pair in zip(tensor.stride(), tensor.shape, strict=True) if pair[1] > 1]
    overlaps = any(stride == 0 for stride, _ in dims)
    if all(
        isinstance(x, int) for pair in dims for x in pair
    ):  # others are checked when they are known
        reach = 0
        for stride, size in sorted(dims):
            overlaps |= stride <= reach
            reach += stride * (size - 1)
    if overlaps:
        raise ValueError(
            f"{name} is written to and must not overlap itself, got shape {_shape(tensor)} with strides "
            f"{tuple(tensor.stride())}"
        )


def expect_4d(name: str, tensor: object, dims: str = "(batch, heads, sequence, head_dim)") -> None:
    expect_tensor(name, tensor)
    if tensor.dim() != 4:
        raise ValueError(f"{name} must have 4 dimensions {dims}, got shape {_shape(tensor)}")


def expect_packed(name: str, tensor: object) -> None:
    expect_tensor(name, tensor)
    if tensor.dim() != 3:
        raise ValueError(
            f"{name} must have 3 dimensions (tokens, heads, head_dim), got shape {_shape(tensor)}"
        )


def expect_page_table(page_table: object, batch: int, like: str, device: torch.device) -> None:
    expect_tensor("page_table", page_table)
    if page_table.dim() != 2 or page_table.shape[0] != batch:
        raise ValueError(
            f"page_table must have shape ({batch}, pages a sequence) like {like}, "
            f"got {_shape(page_table)}"
        )
    if page_table.dtype != torch.int32:
        raise TypeError(f"page_table must be int32, got {page_table.dtype}")
    expect_device("page_table", page_table, device, "q")


def expect_pages(name: str, slots: int) -> None:
    if slots < 1:
        raise ValueError(f"{name}'s pages must hold at least one token (dimension 2), got {slots}")


def expect_float(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise TypeError(
            f"{name} must be bfloat16, float16, float32 (or float64 on CPU), got {tensor.dtype}"
        )


def expect_head_dim(name: str, head_dim: int) -> None:
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"{name}'s head_dim must be from 1 to {MAX_HEAD_DIM}, got {head_dim}")


def expect_groups(heads: int, kv_heads: int, q_name: str, k_name: str) -> None:
    if kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{q_name}'s head count must be a positive multiple of {k_name}'s, "
            f"got {heads} query heads and {kv_heads} key heads"
        )


def expect_dtype(name: str, tensor: Tensor, dtype: torch.dtype, like: str) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must have dtype {dtype} like {like}, got {tensor.dtype}")


def expect_device(name: str, tensor: Tensor, device: torch.device, like: str) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like {like}, got {tensor.device}")


def expect_shape(name: str, tensor: Tensor, shape: tuple[int, ...], like: str) -> None:
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {tuple(shape)} like {like}, got {_shape(tensor)}")


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
