"""One training: the same weights, text, order and schedule for every way to attend."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

import torch

from .models import MODELS, Size
from .text import Text, batch
from .ways import NUDGED, way

RATE, WARM_UP = 1e-3, 20


@dataclass(frozen=True)
class Setup:
    """What all runs of a comparison share."""

    model: str
    size: Size
    steps: int
    dtype: torch.dtype
    seed: int
    device: torch.device


@dataclass(frozen=True)
class Curve:
    """losses: of every step, before its update; validation: after the last one."""

    losses: list[float]
    validation: float
    step_ms: float
    parameters: int


def train(setup: Setup, attention: str, text: Text) -> Curve:
    """Trains with one way to attend; nothing but it (and a rounding of NUDGED weights) differs between two calls."""
    size, device = setup.size, setup.device
    torch.manual_seed(setup.seed)
    model = MODELS[setup.model](size, way(attention)).to(device)
    if attention in NUDGED:
        nudge(model, NUDGED.index(attention))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, setup.steps))
    order = torch.Generator().manual_seed(setup.seed)
    mixed = torch.autocast(device.type, setup.dtype, enabled=setup.dtype != torch.float32)
    training, times, losses = text.training.to(device), [], []
    for _ in range(setup.steps):
        begin = time.perf_counter()
        with mixed:
            loss = model(batch(training, size.batch, size.length + 1, order))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())  # waits for the step
        times.append(time.perf_counter() - begin)
    order, seen = torch.Generator().manual_seed(setup.seed + 1), text.validation.to(device)
    with torch.no_grad(), mixed:
        found = [model(batch(seen, size.batch, size.length + 1, order)).item() for _ in range(4)]
    parameters = sum(x.numel() for x in model.parameters())
    # The first steps compile kernels and choose algorithms.
    steady = times[min(10, len(times) // 2) :]
    return Curve(losses, statistics.fmean(found), 1e3 * statistics.median(steady), parameters)


def nudge(model: torch.nn.Module, draw: int) -> None:
    """Moves each weight to the number above or below, or leaves it."""
    draws = torch.Generator().manual_seed(draw)
    with torch.no_grad():
        for x in model.parameters():
            x.copy_(torch.nextafter(x, x + torch.randint(-1, 2, x.shape, generator=draws).to(x)))


def _rate(step: int, steps: int) -> float:
    """Linear to 1, then a cosine down to a tenth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


def gap(a: Curve, b: Curve) -> float:
    """How far two curves are apart: the mean over steps of |loss - loss|."""
    return statistics.fmean(abs(x - y) for x, y in zip(a.losses, b.losses, strict=True))
