"""What the benchmark prints, and the JSON that it writes."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from torch_fdattn.version import __version__


def figure_lines(
    name: str, figures: dict[str, Any], limit_seconds: float | None = None
) -> list[str]:
    """A run in a few lines of text."""
    head = (
        f"{name}: {figures['new_tokens']:,} new tokens of {figures['requests']} requests in "
        f"{figures['seconds']:.2f} s, {figures['tokens_per_s']:,.0f} tokens/s"
    )
    if limit_seconds is not None:
        head += f", {percent_of_limit(figures, limit_seconds):.1f} % of what the memory allows"
    lines = [head]
    for label, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms")):
        if summary := figures.get(key):
            values = ", ".join(f"{name} {value:,.2f}" for name, value in summary.items())
            lines.append(f"  {label} ms: {values}")
    return lines


def percent_of_limit(figures: dict[str, Any], limit_seconds: float) -> float:
    return 100 * limit_seconds / figures["seconds"]


def write_record(path: Path, record: dict[str, Any], device: torch.device | None = None) -> None:
    """The figures with what they were measured on; device: of an engine in this process."""
    if device is not None and device.type != "cuda":
        name = device.type
    else:
        name = (
            torch.cuda.get_device_name(device)
            if torch.cuda.is_available()
            else platform.processor()
        )
    head = {
        "version": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": shlex.join(["fdattn", *sys.argv[1:]]),
        "device": name or platform.machine(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**head, **record}, indent=1) + "\n", encoding="utf-8")
