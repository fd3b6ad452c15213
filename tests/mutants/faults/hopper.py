"""Faults of Hopper's backward. None of them hangs: a barrier that nobody passes would end in a time-out, not in a failure."""

from __future__ import annotations

from tests.mutants.faults.fault import Fault
from tests.mutants.faults.runs import (
    HOPPER_BACKWARD,
    HOPPER_ON_GPU,
    HOPPER_ORDER,
    HOPPER_PACKED_ON_GPU,
)

_BACKWARD = "torch_fdattn/ops/attention/hopper/backward"
FAULTS = (
    Fault(
        "a ring of barriers that no warp uses", f"{_BACKWARD}/one_gradient_slots.py",
        "has_other_rows = has_rows", "has_other_rows = ring(1, GROUPS)", HOPPER_BACKWARD,
    ),
    Fault(
        "products of a step that wait for each other", f"{_BACKWARD}/kernel.py",
        "warpgroup_mma_wait(GROUPS * SUBS, deps=", "warpgroup_mma_wait(0, deps=", HOPPER_BACKWARD,
    ),
    Fault(
        "turns read without a fence before the sums", f"{_BACKWARD}/storing.py",
        '"fence.proxy.async.global; mov.b32 $0, $1;"', '"mov.b32 $0, $1;"', HOPPER_BACKWARD,
    ),
    Fault(
        "tiles of the ordered form from the first keys on", f"{_BACKWARD}/tiles.py",
        "block = blocks - 1 - block", "block = block + 0 * blocks", HOPPER_ORDER,
    ),
    Fault(
        "a turn for a tile that adds zeros", f"{_BACKWARD}/tiles.py",
        "gl.where(distance < 0, -1,", "gl.where(distance < 0, 0,", HOPPER_ORDER,
    ),
    Fault(
        "turns that nobody waits for", f"{_BACKWARD}/storing.py",
        'gl.atomic_add(turn, 0, sem="acquire") < rank', 'gl.atomic_add(turn, 0, sem="acquire") < -1', HOPPER_ON_GPU,
    ),
    Fault(
        "scores of the same queries once more", f"{_BACKWARD}/kernel.py",
        "product(slots.k, GROUP * SUBS + unknown, slots.q, previous.slot)",
        "product(slots.k, GROUP * SUBS + unknown, slots.q, place.slot)", HOPPER_ON_GPU,
    ),
    Fault(
        "dQ of a step whose dS is not there", f"{_BACKWARD}/kernel.py",
        "dq = _dq(slots, previous.slot, unknown, GROUP)", "dq = _dq(slots, place.slot, unknown, GROUP)", HOPPER_ON_GPU,
    ),
    Fault(
        "sums of dQ read a phase early", f"{_BACKWARD}/slots.py",
        "Place(gl.to_tensor(GROUP), step & 1)", "Place(gl.to_tensor(GROUP), (step + 1) & 1)", HOPPER_ON_GPU,
    ),
    Fault(
        "rows of dQ's sums in another order", f"{_BACKWARD}/sums.py",
        "sums = parts.permute((2, 5, 3, 0, 1, 4, 6))", "sums = parts.permute((2, 3, 5, 0, 1, 4, 6))", HOPPER_ON_GPU,
    ),
    Fault(
        "dK without the scale", f"{_BACKWARD}/kernel.py",
        "(dk[sub] * changes.scale,)", "(dk[sub],)", HOPPER_ON_GPU,
    ),
    Fault(
        "dQ of wide heads without the scale", f"{_BACKWARD}/one_gradient.py",
        'if GRADIENT != "dv":\n            acc *=', 'if GRADIENT == "dk":\n            acc *=', HOPPER_ON_GPU,
    ),
    Fault(
        "dK and dV of other groups' queries", f"{_BACKWARD}/loading.py",
        "head = tile.kv_head * call.group + i // count", "head = tile.kv_head + i // count * call.heads", HOPPER_ON_GPU,
    ),
    Fault(
        "each query's last key hidden", f"{_BACKWARD}/scores.py",
        "seen = seen & (keys <= positions + call.right)", "seen = seen & (keys < positions + call.right)", HOPPER_ON_GPU,
    ),
    Fault(
        "rows of the next packed sequence left as they are", f"{_BACKWARD}/kernel.py",
        "if inside < QUERIES:", "if inside < 0:", HOPPER_PACKED_ON_GPU,
    ),
    Fault(
        "slopes' gradients by KV heads", f"{_BACKWARD}/kernel.py",
        "(tile.sequence * heads + head)", "(tile.sequence * heads + tile.kv_head)", HOPPER_ON_GPU,
    ),
)  # fmt: skip
