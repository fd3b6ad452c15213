"""The tuned table where it decides which collective runs: only what all ranks of a group have alike."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from torch_fdattn import tables
from torch_fdattn.dist.consensus import consensus
from torch_fdattn.ops.library import INTERPRET

#: The digest of a file that is none.
_BROKEN = "broken"
_log = logging.getLogger("torch_fdattn")


def entries_on_all_ranks(section: str, group_name: str, like: Tensor) -> tuple[dict, ...]:
    """This machine's entries of a section where all ranks of the group have the same ones, else none.

    A small collective at a group's first question, which all ranks ask; later what is remembered. While a CUDA graph is
    captured a group that was never asked has none. CPU tensors ask only where kernels are interpreted.

    Raises:
        ValueError: on all ranks, where the file of one of them is broken; on that one it names path and field.
    """
    if not (like.is_cuda or INTERPRET):
        return ()
    device, question = tables.Device.of(like.device), f"the tuned table's {section}"
    try:
        own = tables.entries(section, device)
        digest = tables.digest(section, device)
    except ValueError:
        if consensus(group_name, like, question, None, _BROKEN) is None:
            consensus(group_name, like, _readable(question), None, "no")
        raise
    common = consensus(group_name, like, question, None, digest)
    if common == digest:
        return own
    readable = consensus(group_name, like, _readable(question), None, "yes")
    if readable is None and not (like.is_cuda and torch.cuda.is_current_stream_capturing()):
        raise ValueError(
            f"{question} must be one that can be read on all ranks, got a broken file on another rank, whose error names it"
        )
    if own:
        _log.info(
            "%s: not the same on all ranks, or not compared before a capture: the shipped table is used",
            question,
        )
    return ()


def _readable(question: str) -> str:
    """What ranks ask each other whose answers differ: all of them then know it, and ask."""
    return f"whether {question} can be read"
