"""How many splits a decode launch uses: from shapes alone, never from lengths on the device."""

from __future__ import annotations

import functools

import torch

# Two programs a processor keep memory requests in flight while the other one merges or starts.
PROGRAMS_PER_PROCESSOR = 2
MAX_SPLITS = 128


def num_splits(programs: int, kv_capacity: int, block_n: int, processors: int) -> int:
    """Splits of each sequence, so that `programs` (batch × KV heads × row tiles) fill the device.

    A split covers at least two key tiles: below that its prologue and the merge cost more than they
    hide. Each split takes an equal share of the sequence's true length, which the kernel reads.
    """
    wanted = -(-PROGRAMS_PER_PROCESSOR * processors // max(programs, 1))
    possible = max(kv_capacity // (2 * block_n), 1)
    return max(1, min(wanted, possible, MAX_SPLITS))


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; a small number for the interpreter."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
