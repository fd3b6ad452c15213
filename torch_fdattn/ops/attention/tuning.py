"""Tiles other than the table's (`configs.py`): `tiles` puts them in by hand, `autotune` by timing calls.

Both are read where a kernel is launched, by every thread of the process: autograd runs backwards on GPUs in
threads of its own, which see no context variable of the caller's. Nothing of it is in a schema, traced or
compiled into a graph; a plain call reads one flag.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fdattn.ops.attention import trials
from torch_fdattn.ops.attention.candidates import candidates
from torch_fdattn.ops.attention.configs import TileConfig, dot_precision, is_short_window
from torch_fdattn.ops.attention.remembered import Memory
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.packed import Packed, key_capacity
from torch_fdattn.ops.row_ranges import has_ranges
from torch_fdattn.sources import hash_of

#: What `tiles` can speak of: the forward, and the backward's sweeps for dK and dV, for dQ, and for a mask's gradient.
KERNELS = ("forward", "dkdv", "dq", "dmask")


class _TilesState:
    """What is in force; `active` tells launches apart that have nothing to look up."""

    def __init__(self) -> None:
        self.forced: tuple[tuple[str | None, dict[str, int]], ...] = ()
        self.memory: Memory | None = None
        self.active = False

    def set(self, **values: object) -> None:
        vars(self).update(values)
        self.active = bool(self.forced) or self.memory is not None


state = _TilesState()
_memories: dict[Path | None, Memory] = {}
_searching = threading.RLock()


@contextlib.contextmanager
def tiles(
    kernel: str | None = None, *, block_m: int | None = None, block_n: int | None = None,
    num_warps: int | None = None, num_stages: int | None = None,
) -> Iterator[None]:  # fmt: skip
    """Other tile sizes for `attention` and `varlen_attention`, forward and backward, while it is open: for experiments.

    Args:
        kernel: "forward", "dkdv", "dq" or "dmask" (the backward's sweeps for dK and dV, for dQ, for a mask's
            gradient); None: all of them. Where several are open, the innermost decides each size.
        block_m: queries a tile: a power of two from 16 to 128.
        block_n: keys a tile: a power of two from 16 to 128.
        num_warps: a power of two up to 16.
        num_stages: depth of the software pipeline, 1 to 8.

    What is None stays as the table or `autotune` has it. Tiles that do not fit the device raise what Triton raises
    (out of resource: shared memory). They apply to every launch of the process meanwhile, compiled graphs'
    included; a captured CUDA graph keeps the tiles it was captured with. On a CPU only the interpreter has tiles.

    Raises:
        ValueError: a size that no kernel can have, naming it. RuntimeError: inside of a function that
            torch.compile traces; open it around the call.

    Examples:
        >>> q = torch.randn(1, 2, 16, 16)
        >>> with torch_fdattn.tiles("forward", block_m=64, num_warps=4):
        ...     out, lse = torch_fdattn.attention(q, q, q)
        >>> with torch_fdattn.tiles(block_n=48):
        ...     pass
        Traceback (most recent call last):
            ...
        ValueError: block_n must be a power of two from 16 to 128, got 48
    """
    _refuse_tracing("tiles")
    if kernel is not None and kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)} or None, got {kernel!r}")
    sizes = dict(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)
    sizes = {name: x for name, x in sizes.items() if x is not None}
    dataclasses.replace(TileConfig(16, 16, 1, 1), **sizes).checked()
    entry = kernel, sizes
    state.set(forced=(*state.forced, entry))
    try:
        yield
    finally:
        state.set(forced=tuple(x for x in state.forced if x is not entry))


class autotune:
    """Searches tiles for `attention` and `varlen_attention` by timing, on each new kind of call; off by default.

    From the call on, or as a context manager for its block, as `torch.set_grad_enabled`. A kind of call is its
    dtype, head dims, masks, options and lengths (in powers of two; of packed sequences their number, and the tokens
    of all, since the lengths of each are on the device) on a device; its first launch tries the
    candidates (`ops/attention/candidates.py`) on its own inputs, which takes up to a minute of compiling, and writes
    its results with the fastest, which all later launches take. A tile whose results differ from the table's by
    more than rounding is never taken. Other tiles add up in another order: results differ from those without
    `autotune`, and between processes that found different tiles, by rounding.

    While a CUDA graph is captured nothing is searched: what is known is taken, else the table's tile; call once
    before the capture. Tracing searches nothing, running the compiled graph does. Under `tiles` nothing is searched.

    `decode` and `paged_decode` are not searched: their launches are plans that are kept from the first call on, with
    tiles and a cut of the work that belong together (`ops/decode/schedule.py`).

    Args:
        enabled: False switches it off; what was found is kept for later.
        path: a JSON file that found tiles are read from and written to, by device name, version of triton and
            hash of our sources; others' entries in it are kept. None: this process alone remembers.

    Raises:
        ValueError: path is another kind of file, or in no directory.

    Examples:
        >>> q = torch.randn(1, 2, 16, 16)
        >>> with torch_fdattn.autotune():  # path="tiles.json" remembers beyond this process
        ...     out, lse = torch_fdattn.attention(q, q, q)
    """

    def __init__(self, enabled: bool = True, *, path: str | os.PathLike | None = None) -> None:
        _refuse_tracing("autotune")
        if not isinstance(enabled, bool):
            raise TypeError(f"enabled must be a bool, got {enabled!r}")
        if not isinstance(path, (str, os.PathLike, type(None))):
            raise TypeError(f"path must be a str, a path or None, got {path!r}")
        key = None if path is None else Path(path).absolute()
        if enabled and key not in _memories:
            _memories[key] = Memory(key)
        self._before = state.memory
        state.set(memory=_memories[key] if enabled else None)

    def __enter__(self) -> autotune:
        return self

    def __exit__(self, *_: object) -> None:
        state.set(memory=self._before)


class TuningCase(NamedTuple):
    """What a launch has that its best tiles depend on."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: AttentionOptions
    packed: Packed | None = None

    def __str__(self) -> str:
        mask, scores, dropout = self.options.mask, self.options.scores, self.options.dropout
        precision = dot_precision(self.q.dtype) if self.q.dtype == torch.float32 else ""
        right = {-1: "", 0: "causal"}.get(mask.window_right, "right")
        parts = [
            str(self.q.dtype).removeprefix("torch."), precision, f"D{self.q.shape[3]}/{self.v.shape[3]}", right,
            "left" * (mask.window_left >= 0), "short" * is_short_window(mask, key_capacity(self.k, self.packed)), "lens" * (mask.kv_lens is not None), "striped" * (mask.kv_block > 0),
            "softcap" * (scores.softcap > 0), "alibi" * (scores.alibi_slopes is not None),
            "sinks" * (scores.sinks is not None), "dropout" * (dropout.p > 0),
            "" if scores.attn_mask is None else f"mask:{str(scores.attn_mask.dtype).removeprefix('torch.')}",
            "row" * (self.packed is None and has_ranges(scores.attn_mask, self.q, self.k)),
            *self._sizes(),
        ]  # fmt: skip
        return " ".join(word for word in parts if word)

    def _sizes(self) -> Iterator[str]:
        """Lengths, in powers of two; of packed sequences all tokens, beside how many sequences they are."""
        packed = self.packed
        lengths = dict(q=self.q.shape[2], k=key_capacity(self.k, packed))
        if packed is not None:
            lengths["packed"] = packed.sequences
            if packed.page_table is not None:
                yield f"pages of {self.k.shape[2]}"
        for name, length in lengths.items():
            yield f"{name}{1 << (length - 1).bit_length()}"


def chosen(
    op: str, config: Any, case: TuningCase, outputs: Sequence[Tensor], launch: Callable[[Any], None]
) -> Any:  # fmt: skip
    """What takes the place of the table's config for this launch, which launch(config) makes into `outputs`."""
    parts = trials.parts_of(op, config)
    if state.forced:
        return trials.with_parts(config, {name: forced(name, x) for name, x in parts.items()})
    memory = state.memory
    if memory is None:
        return config
    where, name = _where(case.q.device), f"{op} {case}"

    def known() -> dict[str, TileConfig] | None:
        found = memory.get(where, name)
        return found if found is not None and set(found) == set(parts) else None

    if known() is None and not _may_search(case.q):
        return config
    with _searching:
        found = known()
        if found is None:
            given = [x for x in outputs if x.numel()]
            dims = max(case.q.shape[3], case.v.shape[3]), case.q.dtype
            best = config
            if given:
                choice = functools.partial(_candidates, dims)
                best = trials.search(op, config, launch, given, choice, trials.median_us)
            found = trials.parts_of(op, best)
            memory.put(where, name, found)
    return trials.with_parts(config, found)


def forced(kernel: str, config: TileConfig) -> TileConfig:
    """The config with the sizes that `tiles` gives this kernel."""
    for name, sizes in state.forced:
        if name in (None, kernel):
            config = dataclasses.replace(config, **sizes)
    return config


def _candidates(dims: tuple[int, torch.dtype], kernel: str) -> list[TileConfig]:
    return candidates(kernel, *dims)


def _may_search(tensor: Tensor) -> bool:
    if tensor.is_cuda:
        return not torch.cuda.is_current_stream_capturing()
    return tensor.is_cpu


@functools.cache
def _where(device: torch.device) -> str:
    """The device with its software, as the memory's key."""
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    return f"{name}, triton {triton.__version__}, sources {hash_of('ops')[:16]}"


def _refuse_tracing(name: str) -> None:
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{name} must be opened outside of what torch.compile traces")
