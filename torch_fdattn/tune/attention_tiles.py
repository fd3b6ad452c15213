"""Tiles of the portable attention kernels: the candidates of `ops/attention/candidates.py`, searched as `autotune` does.

Kinds of calls that another kernel takes on this device (Hopper's) are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from torch_fdattn.ops.attention import backward, dispatch, forward, trials
from torch_fdattn.ops.attention.candidates import candidates
from torch_fdattn.ops.attention.configs import (
    TileConfig,
    backward_config,
    device_capability,
    forward_config,
    has_borders,
    is_short_window,
)
from torch_fdattn.ops.attention.tuned_tiles import mask_class
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.positions import Mask
from torch_fdattn.tune.session import Measurement, Session, name_of

SECTION = "attention_tiles"
#: Queries and keys, keys of a short window, and heads.
LENGTH, WINDOW, HEADS = 4096, 1024, 16
QUICK_LENGTH, QUICK_WINDOW, QUICK_CANDIDATES = 128, 32, 2
#: Of the compiler, whose work is outside of Python.
THREADS = 8

Search = tuple[str, Any, Callable[[Any], None], tuple[Tensor, ...]]


def measure(session: Session) -> list[dict]:
    entries: list[dict] = []
    kinds = list(_kinds(session))
    for number, (dtype, dim, mask) in enumerate(kinds):
        if session.expired():
            session.note(f"{SECTION}: time is up after {number} of {len(kinds)} kinds of calls")
            break
        case = TileSearch(session, dtype, dim, mask)
        for search in case.searches():
            entries += case.entries(*search)
    return entries


def _kinds(session: Session) -> Iterable[tuple[torch.dtype, int, Mask]]:
    window = QUICK_WINDOW if session.quick else WINDOW
    masks = Mask(window_right=0), Mask(), Mask(window_left=window, window_right=0)
    dims = [(session.half, 128), (session.half, 64), (session.half, 256)]
    dims += [(torch.float32, 64), (torch.float32, 128)]
    for dtype, dim in [(session.half, 16)] if session.quick else dims:
        for mask in masks:
            yield dtype, dim, mask


class TileSearch:
    """A kind of call: its tensors, and the search of each direction."""

    def __init__(self, session: Session, dtype: torch.dtype, dim: int, mask: Mask) -> None:
        self._session, self._dim, self._mask = session, dim, mask
        self._length = QUICK_LENGTH if session.quick else LENGTH
        shape = 1, 1 if session.quick else HEADS, self._length, dim
        made = torch.Generator(session.device).manual_seed(0)
        self._q, self._k, self._v, self._dout = (
            torch.randn(shape, generator=made, device=session.device, dtype=dtype) for _ in range(4)
        )
        self._options = AttentionOptions(mask, dim**-0.5)

    def searches(self) -> Iterable[Search]:
        """(direction, the shipped config, a launch with a config, what it writes) where the portable kernels run."""
        q, k, v, options = self._q, self._k, self._v, self._options
        like = self._dim, q.dtype, device_capability(q.device)
        short = is_short_window(self._mask, self._length)
        shipped = forward_config(*like, has_borders(self._mask, self._length), short_window=short)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        grads = tuple(torch.zeros_like(x) for x in (q, k, v))

        def run_forward(config: TileConfig) -> None:
            forward.launch_forward(q, k, v, options, out, lse, config=config)

        def run_backward(config: Any) -> None:
            backward.launch_backward(
                self._dout, None, q, k, v, out, lse, options, *grads, config=config
            )

        both = backward_config(*like, short_window=short)
        searches = {
            "forward": (shipped, run_forward, (out, lse)),
            "backward": (both, run_backward, grads),
        }
        kernels = {name: dispatch.choose(name, q, k, v, options) for name in searches}
        for name, kernel in kernels.items():
            if kernel != "triton":
                self._session.note(
                    f"{SECTION}: {self._name(name)} runs the kernel {kernel}, whose tiles are fixed"
                )
        if kernels["backward"] == "triton":
            run_forward(shipped)  # whose results the backward takes
        for name, search in searches.items():
            if kernels[name] == "triton":
                yield name, *search

    def entries(
        self, direction: str, shipped: Any, run: Callable[[Any], None], outputs: tuple[Tensor, ...]
    ) -> list[dict]:
        if self._q.is_cuda:
            self._compile(direction, shipped, run)
        best = trials.search(direction, shipped, run, outputs, self._candidates, trials.median_us)
        before, after = (
            trials.median_us(lambda config=config: run(config), self._q.device)
            for config in (shipped, best)
        )
        old, new = (trials.parts_of(direction, config) for config in (shipped, best))
        texts = (" ".join(map(str, parts.values())) for parts in (old, new))
        self._session.report(
            Measurement(SECTION, self._name(direction), *texts, before, after),
        )
        about = dict(
            head_dim=self._dim,
            dtype=name_of(self._q.dtype),
            mask=mask_class(self._mask, self._length),
        )
        return [dict(kernel=name, **about, tile=str(tile)) for name, tile in new.items()]

    def _name(self, direction: str) -> str:
        mask = mask_class(self._mask, self._length)
        return f"{direction} {name_of(self._q.dtype)} D{self._dim} {mask}"

    def _candidates(self, kernel: str) -> Iterable[TileConfig]:
        """Those to try until the time is up."""
        given = candidates(kernel, self._dim, self._q.dtype)
        for tile in islice(given, QUICK_CANDIDATES if self._session.quick else None):
            if self._session.expired():
                return
            yield tile

    def _compile(self, direction: str, shipped: Any, run: Callable[[Any], None]) -> None:
        """All candidates in threads, by launching each once; what does not fit raises once more in the search."""
        parts = trials.parts_of(direction, shipped)
        with ThreadPoolExecutor(THREADS) as pool:
            for name in parts:
                for tile in self._candidates(name):
                    pool.submit(run, trials.with_parts(shipped, parts | {name: tile}))
        torch.cuda.synchronize(self._q.device)
