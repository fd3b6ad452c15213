"""Where Hopper's forward keeps in shared memory what its warps hand to each other: tiles, and what is loaded.

A step multiplies the keys of one block and the values of the block before it, of whatever tile: QK is a block ahead of PV.
Where blocks are small, both lie in one slot of a ring: one barrier says that they have landed, and one that they are
read, since each costs the warps of a group a meeting. Where they are large, keys and values have a ring each: the next
keys are needed as soon as there is room for them.
"""
# Without `from __future__ import annotations`: aggregates ask for the types of their fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from torch_fdattn.ops.attention.hopper.pipeline import Place, Ring, blocks_of, place_of, ring
from torch_fdattn.ops.attention.hopper.tiles import FIELDS

SLOTS = gl.constexpr(2)  #: of keys and values, of tiles
GROUPS = gl.constexpr(2)  #: warp groups that multiply


@aggregate
class Slots:
    """Tiles, for the loading warp too; their queries, of each warp group its own; keys with values."""

    tiles: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    has_tile: Ring
    has_queries: Ring
    has_keys: Ring
    has_values: Ring  # where TOGETHER: has_keys
    missing: gl.shared_memory_descriptor  # of a block on pages: a bit for each that is no page
    PAGE: gl.constexpr  # keys that such a bit stands for; 0: not on pages
    Q_SLOTS: gl.constexpr
    PARTS: gl.constexpr  # of columns, each a buffer
    TOGETHER: gl.constexpr
    TRANSPOSED: gl.constexpr  # values, as products of 8 bits need them
    BYTES: gl.constexpr  # of a block of keys, and of one of values

    @gluon.constexpr_function
    def __init__(
        self, tiles, q, k, v, has_tile, has_queries, has_keys, has_values, missing, PAGE, Q_SLOTS, PARTS, TOGETHER,
        TRANSPOSED, BYTES,
    ):  # fmt: skip
        self.tiles = tiles
        self.q = q
        self.k = k
        self.v = v
        self.has_tile = has_tile
        self.has_queries = has_queries
        self.has_keys = has_keys
        self.has_values = has_values
        self.missing = missing
        self.PAGE = gl.constexpr(PAGE)
        self.Q_SLOTS = gl.constexpr(Q_SLOTS)
        self.PARTS = gl.constexpr(PARTS)
        self.TOGETHER = gl.constexpr(TOGETHER)
        self.TRANSPOSED = gl.constexpr(TRANSPOSED)
        self.BYTES = gl.constexpr(BYTES)

    @gluon.jit
    def place_of_values(self, step):
        """Of the values that a step multiplies, those of the block before its keys."""
        if self.TOGETHER:
            return place_of(step, SLOTS)
        else:
            return place_of(step - 1, SLOTS)

    @gluon.jit
    def missing_of(self, step, LAYOUT: gl.constexpr):
        """In a step whose keys have landed and are not released; 0 where they lie on no pages."""
        found = gl.to_tensor(0)
        if self.PAGE > 0:
            found = gl.max(self.missing.index(place_of(step, SLOTS).slot).load(LAYOUT), 0)
        return found

    @gluon.jit
    def keys_of(self, step, PART: gl.constexpr):
        """(keys, columns)"""
        KEYS: gl.constexpr = self.k.shape[3]
        D: gl.constexpr = self.k.shape[4]
        return self.k.index(place_of(step, SLOTS).slot * self.PARTS + PART).reshape([KEYS, D])

    @gluon.jit
    def values_of(self, step, PART: gl.constexpr):
        """(keys, columns)"""
        ROWS: gl.constexpr = self.v.shape[3]
        COLUMNS: gl.constexpr = self.v.shape[4]
        buffer = self.v.index(self.place_of_values(step).slot * self.PARTS + PART)
        buffer = buffer.reshape([ROWS, COLUMNS])
        if self.TRANSPOSED:
            return buffer.permute((1, 0))
        else:
            return buffer

    @gluon.jit
    def wait_for_values(self, step):
        """In a step that has its keys."""
        if not self.TOGETHER:
            self.has_values.wait_full(self.place_of_values(step))

    @gluon.jit
    def release_values(self, step):
        """In a step whose keys are not read yet."""
        if not self.TOGETHER:
            self.has_values.release(self.place_of_values(step))

    @gluon.jit
    def release_keys(self, step):
        """In a step whose values are not read yet."""
        if not self.TOGETHER:
            self.has_keys.release(place_of(step, SLOTS))


@gluon.jit
def slots_of(
    q_blocks,
    v_blocks,
    Q_SLOTS: gl.constexpr,
    KEYS: gl.constexpr,
    PARTS: gl.constexpr,
    PAGE: gl.constexpr,
):
    D: gl.constexpr = q_blocks.block_type.shape[3]
    BITS: gl.constexpr = q_blocks.dtype.primitive_bitwidth
    TRANSPOSED: gl.constexpr = BITS == 8
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tiles = gl.allocate_shared_memory(gl.int32, [SLOTS * FIELDS, 1], layout)
    q = blocks_of(q_blocks, Q_SLOTS * PARTS)
    # Keys lie as queries do, whatever their copies bring at a time.
    shape: gl.constexpr = [SLOTS * PARTS, 1, 1, KEYS, D]
    k = gl.allocate_shared_memory(q_blocks.dtype, shape, q_blocks.layout)
    if TRANSPOSED:
        v = blocks_of(v_blocks, SLOTS * PARTS)
    else:
        v = gl.allocate_shared_memory(q_blocks.dtype, shape, q_blocks.layout)
    has_keys = ring(SLOTS, GROUPS)
    BYTES: gl.constexpr = KEYS * D * PARTS * BITS // 8
    TOGETHER: gl.constexpr = BYTES <= 16384
    if TOGETHER:
        has_values = has_keys
    else:
        has_values = ring(SLOTS, GROUPS)
    missing = tiles
    if PAGE > 0:
        missing = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], layout)
    return Slots(
        tiles, q, k, v, ring(SLOTS, GROUPS + 1), ring(Q_SLOTS, 1), has_keys, has_values, missing, PAGE,
        Q_SLOTS, PARTS, TOGETHER, TRANSPOSED, BYTES,
    )  # fmt: skip


@gluon.jit
def own_place(i, turn, SLOTS_OF_GROUP: gl.constexpr):
    """Where queries of a warp group lie in a program's turn-th tile: one filling a tile."""
    return Place((turn & (SLOTS_OF_GROUP - 1)) * GROUPS + i, (turn // SLOTS_OF_GROUP) & 1)
