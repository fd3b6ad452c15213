"""The tuned table where it decides which collective runs: only what all ranks of a group have alike."""

from __future__ import annotations

import logging

from torch import Tensor

from torch_fdattn import tables
from torch_fdattn.dist.consensus import consensus
from torch_fdattn.ops.library import INTERPRET

_log = logging.getLogger("torch_fdattn")


def entries_on_all_ranks(section: str, group_name: str, like: Tensor) -> tuple[dict, ...]:
    """This machine's entries of a section where all ranks of the group have the same ones, else none.

    A small collective at a group's first question, which all ranks ask; later what is remembered. While a CUDA graph is
    captured a group that was never asked has none. CPU tensors ask only where kernels are interpreted.

    Raises:
        ValueError: this rank's file is broken; ranks whose file is not go on with what is shipped.
    """
    if not (like.is_cuda or INTERPRET):
        return ()
    device, question = tables.Device.of(like.device), f"the tuned table's {section}"
    try:
        own = tables.entries(section, device)
        digest = tables.digest(section, device)
    except ValueError:
        consensus(group_name, like, question, None, None)
        raise
    common = consensus(group_name, like, question, None, digest)
    if common != digest and own:
        _log.info(
            "%s: not the same on all ranks, or not compared before a capture: the shipped table is used",
            question,
        )
    return own if common == digest else ()
