"""How many splits `fdattn tune` measured to be the fastest on this machine, in the place of `schedule.target_splits`.

Of the entries of a call's padded head dim, dtype and kind of cache the nearest speaks, by the sum of squared logarithms of
work tiles and keys, if it is within an octave in both: nothing is said of what is far from all that was measured.
"""

from __future__ import annotations

import math

from torch import Tensor

from torch_fdattn import tables
from torch_fdattn.ops.launch import padded

#: A dtype that takes as long as another one, which was measured.
TIMED_AS = {"float16": "bfloat16"}
#: Octaves that a call may be away from what was measured.
REACH = 1.0


def tuned_target_splits(
    q: Tensor, k: Tensor, v: Tensor, paged: bool, work_tiles: int, kv_capacity: int, num_sms: int
) -> int | None:
    """The splits of an even batch of so many work tiles; None: nothing near was measured on this machine.

    Caches of another dtype than q's were not measured.
    """
    entries = tables.entries("decode_splits", tables.Device.of(q.device))
    if not entries or k.dtype != q.dtype:
        return None
    dtype = str(q.dtype).removeprefix("torch.")
    kind = padded(max(q.shape[3], v.shape[3])), paged
    best, share = math.inf, None
    for entry in entries:
        if (entry["head_dim"], entry["paged"]) != kind:
            continue
        if entry["dtype"] not in (dtype, TIMED_AS.get(dtype)):
            continue
        tiles = abs(math.log2(entry["work_tiles"] / max(work_tiles, 1)))
        keys = abs(math.log2(entry["kv_len"] / max(kv_capacity, 1)))
        distance = tiles**2 + keys**2
        if max(tiles, keys) <= REACH and distance < best:
            best, share = distance, entry["splits_per_sm"]
    return None if share is None else max(1, round(share * num_sms))
