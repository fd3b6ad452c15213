"""A device as tables name it."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


class Device(NamedTuple):
    """What was measured on, or is asked for: a GPU's name and its architecture, "sm_90"; both "cpu" on a CPU."""

    gpu: str
    architecture: str

    @classmethod
    @functools.cache
    def of(cls, device: torch.device) -> Device:
        if device.type != "cuda":
            return cls(device.type, device.type)
        major, minor = torch.cuda.get_device_capability(device)
        return cls(torch.cuda.get_device_name(device), f"sm_{major}{minor}")
