"""The text: Python's own standard library, which every machine has, byte by byte."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

VOCABULARY = 256


class Text(NamedTuple):
    """training and validation hold bytes as uint8; digest tells texts of two Python versions apart."""

    training: Tensor
    validation: Tensor
    digest: str


def standard_library(most: int, folder: Path | None = None) -> Text:
    """The modules of the standard library in the order of their names, up to so many bytes; the last 5 % validate."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    data = bytearray()
    for path in sorted(folder.glob("*.py"), key=lambda path: path.name):
        data += path.read_bytes()
        if len(data) >= most:
            break
    if len(data) < 1000:
        raise ValueError(f"folder must hold Python sources, got {len(data)} bytes in {folder}")
    data = data[:most]
    whole = torch.frombuffer(data, dtype=torch.uint8)
    split = len(whole) * 95 // 100
    return Text(whole[:split], whole[split:], hashlib.sha256(data).hexdigest()[:12])


def batch(text: Tensor, size: int, length: int, generator: torch.Generator) -> Tensor:
    """(size, length) int64 windows at random places, on the text's device; the draw is the CPU's."""
    starts = torch.randint(len(text) - length, (size, 1), generator=generator)
    return text[(starts + torch.arange(length)).to(text.device)].long()
