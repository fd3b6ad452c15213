"""Trying tiles on a call's own inputs: the fastest of some candidates whose results are those of the first."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_fdattn.ops.attention.configs import TileConfig

#: A candidate must win by this much: less is the clock's noise, and the table's tile was measured with care.
GAIN = 1.02


def parts_of(op: str, config: Any) -> dict[str, TileConfig]:
    """A config's tiles by kernel: the one of a TileConfig, the fields of any other."""
    if isinstance(config, TileConfig):
        return {op: config}
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: tile for name, tile in fields.items() if isinstance(tile, TileConfig)}


def with_parts(config: Any, parts: dict[str, TileConfig]) -> Any:
    """The config with these tiles."""
    if isinstance(config, TileConfig):
        return next(iter(parts.values()))
    return dataclasses.replace(config, **parts)


def search(
    op: str, config: Any, launch: Callable[[Any], None], outputs: Sequence[Tensor],
    candidates: Callable[[str], Iterable[TileConfig]],
    clock: Callable[[Callable[[], None], torch.device], float],
) -> Any:  # fmt: skip
    """The fastest config: each kernel's tile is varied in turn, the others staying at their best so far.

    launch(config) writes `outputs`, which hold the result of the last trial afterwards.
    """
    launch(config)
    expected = [x.clone() for x in outputs]
    device = outputs[0].device
    best = clock(lambda: launch(config), device)
    for name, tile in parts_of(op, config).items():
        for candidate in candidates(name):
            if candidate == tile:
                continue
            trial = with_parts(config, parts_of(op, config) | {name: candidate})
            try:
                launch(trial)
                if difference(outputs, expected) is not None:
                    continue
                taken = clock(lambda trial=trial: launch(trial), device)
            except Exception:
                # The compiler's and the driver's refusals (too many registers, too much shared memory) have no
                # class in common. A device that is lost says so at the launch that follows.
                continue
            if taken * GAIN < best:
                best, config = taken, trial
    return config


def difference(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    """Other tiles add up in another order; more than that is a wrong kernel (or a wrong ptxas)."""
    for output, reference in zip(outputs, expected, strict=True):
        eps = torch.finfo(output.dtype).eps
        output, reference = output.float(), reference.float()
        same = (output == reference) | (output.isnan() & reference.isnan())
        error = (
            (output - reference).abs().masked_fill(same, 0).max().item() if output.numel() else 0.0
        )
        finite = reference.abs().masked_fill(~reference.isfinite(), 0)
        limit = 4 * eps * max(1.0, finite.max().item() if finite.numel() else 0.0)
        if not error <= max(limit, 1e-5):
            return f"wrong result: differs from the default's by {error:.3g}, allowed {limit:.3g}"
    return None


def median_us(call: Callable[[], None], device: torch.device, budget_us: float = 10e3) -> float:
    """The median time of a call that has been made once before: by events on a GPU, else by the wall clock."""
    if device.type != "cuda":
        begin = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - begin)

    # Writing this takes longer than the host needs to issue a call, and leaves the L2 cold for each.
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)

    def timed() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        return start, end

    with torch.cuda.device(device):
        torch.cuda.synchronize()
        times: list[float] = []
        count = 3
        while len(times) < count:
            pairs = [timed() for _ in range(count - len(times))]
            torch.cuda.synchronize()
            times += [1e3 * start.elapsed_time(end) for start, end in pairs]
            count = max(3, min(40, round(budget_us / max(statistics.median(times), 1e-3))))
    return statistics.median(times)
