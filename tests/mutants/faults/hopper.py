"""Faults of Hopper's kernels. None of them hangs: a barrier that nobody passes would end in a time-out, not in a failure."""

from __future__ import annotations

from tests.mutants.faults.fault import Fault
from tests.mutants.faults.runs import (
    HOPPER_BACKWARD,
    HOPPER_FEW_QUERIES_ON_GPU,
    HOPPER_FORWARD_ON_GPU,
    HOPPER_FORWARD_TILES,
    HOPPER_FP8_ON_GPU,
    HOPPER_ON_GPU,
    HOPPER_PACKED_ON_GPU,
    HOPPER_PAGES_ON_GPU,
    HOPPER_PAIRS,
    HOPPER_SLOPES_ON_GPU,
    HOPPER_TILES,
    HOPPER_WAITING_FOR_MEMORY,
)

_FORWARD = "torch_fdattn/ops/attention/hopper"
_BACKWARD = f"{_FORWARD}/backward"
_OF_FORWARD = (
    Fault(
        "products with values that have not landed", f"{_FORWARD}/kernel.py",
        "changes.BIAS_FIRST)\n    slots.wait_for_values(step)", "changes.BIAS_FIRST)", HOPPER_WAITING_FOR_MEMORY,
    ),
    Fault(
        "values beyond a length left as they are", f"{_FORWARD}/kernel.py",
        "if inside < KEYS:", "if inside < -KEYS:", HOPPER_FORWARD_ON_GPU,
    ),
    Fault(
        "each query's last key hidden from the forward", f"{_FORWARD}/rows.py",
        "gl.expand_dims(keys, 0) <= gl.expand_dims(last, 1)", "gl.expand_dims(keys, 0) < gl.expand_dims(last, 1)",
        HOPPER_FORWARD_ON_GPU,
    ),
    Fault(
        "values of the block of keys of the same step", f"{_FORWARD}/loading.py",
        "_load_values(slots, v_blocks, corners_of_values, COPIES, step, True)",
        "_load_values(slots, v_blocks, here, COPIES, step, True)", HOPPER_FORWARD_ON_GPU,
    ),
    Fault(
        "pages of the block of keys before", f"{_FORWARD}/loading.py",
        "tile.end - 2 - i", "tile.end - 1 - i", HOPPER_PAGES_ON_GPU,
    ),
    Fault(
        "bits of pages that are none, a page late", f"{_FORWARD}/loading.py",
        "gl.where(is_page | (lane >= COUNT), 0, 1 << lane)", "gl.where(is_page | (lane >= COUNT), 0, 2 << lane)",
        HOPPER_PAGES_ON_GPU,
    ),
    Fault(
        "pages of the first sequence", f"{_FORWARD}/loading.py",
        "table += tile.sequence.to(gl.int64) * table_stride", "table += tile.batch.to(gl.int64) * table_stride",
        HOPPER_PAGES_ON_GPU,
    ),
    Fault(
        "the scale of keys of another head", f"{_FORWARD}/scores.py",
        "gl.load(self.k_scales + head // call.group)", "gl.load(self.k_scales + head % call.group)", HOPPER_FP8_ON_GPU,
    ),
    Fault(
        "transposed values in the order of keys", f"{_FORWARD}/fp8.py",
        "place // 2 % 2 * 8 + place // 4 % 4 * 2", "place // 8 % 2 * 8 + place // 2 % 4 * 2", HOPPER_FP8_ON_GPU,
    ),
    Fault(
        "both warp groups of a pair's tile with its first head", f"{_FORWARD}/tiles.py",
        "self.head + GROUP * self.pair", "self.head", HOPPER_FORWARD_TILES,
    ),
    Fault(
        "tiles of their own for both heads of a pair", f"{_FORWARD}/tiles.py",
        "(block < 0) | (pair * (head % 2) > 0)", "block < 0", HOPPER_FORWARD_TILES,
    ),
    Fault(
        "queries of a pair's first head for both warp groups", f"{_FORWARD}/loading.py",
        "corners = (own.batch,), own.head,", "corners = (own.batch,), tile.head,", HOPPER_FEW_QUERIES_ON_GPU,
    ),
    Fault(
        "pairs of heads of two KV heads", f"{_FORWARD}/launch.py",
        "pairs = heads // kv_heads % 2 == 0", "pairs = heads % 2 == 0", HOPPER_PAIRS,
    ),
    Fault(
        "pairs of heads with more queries than they have rows", f"{_FORWARD}/launch.py",
        "q_len <= ROWS.value", "q_len <= 2 * ROWS.value", HOPPER_PAIRS,
    ),
    Fault(
        "blocks of no tokens counted as tiles of pairs", f"{_FORWARD}/launch.py",
        "max(tiles, sequences * heads) > num_sms",
        "(tiles if packed is None else packed.blocks(q_len, 128) * heads) > num_sms", HOPPER_PAIRS,
    ),
    Fault(
        "pairs of so few heads that each has an SM", f"{_FORWARD}/launch.py",
        " and max(tiles, sequences * heads) > num_sms(q.device)", "", HOPPER_PAIRS,
    ),
    Fault(
        "pairs where queries do not fit", f"{_FORWARD}/tiles.py",
        "queries.length <= ROWS)", "queries.length <= ROWS + 1)", HOPPER_FORWARD_TILES,
    ),
    Fault(
        "a tile's last keys that it leaves out", f"{_FORWARD}/tiles.py",
        "offset + last + call.right + 1", "offset + last + call.right", HOPPER_FORWARD_TILES,
    ),
    Fault(
        "a block unhidden that some row does not see", f"{_FORWARD}/kernel.py",
        "gl.maximum(tile.row + ROWS - 1 + tile.offset - call.left, 0)", "gl.maximum(tile.row + tile.offset - call.left, 0)",
        HOPPER_FORWARD_TILES,
    ),
)  # fmt: skip
FAULTS = (
    *_OF_FORWARD,
    Fault(
        "a ring of barriers that no warp uses", f"{_BACKWARD}/one_gradient_slots.py",
        "has_other_rows = has_rows", "has_other_rows = ring(1, GROUPS)", HOPPER_BACKWARD,
    ),
    Fault(
        "products of a step that wait for each other", f"{_BACKWARD}/kernel.py",
        "warpgroup_mma_wait(GROUPS * SUBS, deps=", "warpgroup_mma_wait(0, deps=", HOPPER_BACKWARD,
    ),
    Fault(
        "scores of the same queries once more", f"{_BACKWARD}/kernel.py",
        "slots.q, following.slot)\n        dq = ", "slots.q, place.slot)\n        dq = ", HOPPER_ON_GPU,
    ),
    Fault(
        "dQ of a step whose dS is not there", f"{_BACKWARD}/kernel.py",
        "dq = _dq(slots, following.slot, unknown, GROUP)", "dq = _dq(slots, place.slot, unknown, GROUP)", HOPPER_ON_GPU,
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
        "products in order that nobody waits for", f"{_BACKWARD}/kernel.py",
        "warpgroup_mma_wait(1, deps=waited)", "warpgroup_mma_wait(2, deps=waited)", HOPPER_BACKWARD,
    ),
    Fault(
        "a tile's first queries that it leaves out", f"{_BACKWARD}/tiles.py",
        "begin = gl.minimum(low, last) // QUERIES", "begin = gl.minimum(low + QUERIES - 1, last) // QUERIES", HOPPER_TILES,
    ),
    Fault(
        "dQ in order of the first sequence's terms", f"{_BACKWARD}/one_gradient.py",
        "head += tile.sequence * call.heads", "head += 0 * call.heads", HOPPER_ON_GPU,
    ),
    Fault(
        "dQ in order over rows of the next packed sequence", f"{_BACKWARD}/one_gradient.py",
        "first + ROWS > there)", "first + ROWS < 0 * there)", HOPPER_PACKED_ON_GPU,
    ),
    Fault(
        "dQ in order of keys of the next packed sequence", f"{_BACKWARD}/one_gradient.py",
        "if call.kv_lens is not None or tile.keys is not None:\n        inside", "if call.kv_lens is not None:\n        inside",
        HOPPER_PACKED_ON_GPU,
    ),
    Fault(
        "dQ in order of tokens of no sequence", f"{_BACKWARD}/one_gradient.py",
        "if tile.kv_len == 0:", "if tile.kv_len < 0:", HOPPER_PACKED_ON_GPU,
    ),
    Fault(
        "slopes' gradients by KV heads", f"{_BACKWARD}/kernel.py",
        "call.group + first_head + member)", "call.group + tile.kv_head)", HOPPER_SLOPES_ON_GPU,
    ),
)  # fmt: skip
