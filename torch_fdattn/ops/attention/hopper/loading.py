"""The loading warp of Hopper's forward: it fills the slots (`slots.py`) in the order in which they are emptied."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_fdattn.ops.attention.hopper.pipeline import place_of
from torch_fdattn.ops.attention.hopper.slots import GROUPS, SLOTS, own_place
from torch_fdattn.ops.attention.hopper.tiles import read_tile

#: A page that no cache has.
_FAR = gl.constexpr(1 << 30)
_LANES = gl.constexpr(32)
_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def load(slots, q_blocks, k_blocks, v_blocks, call, page_table, table_stride, table_step):
    """Of one warp: the tiles that `scheduling.py` hands over, and their blocks of keys from right to left."""
    COPIES: gl.constexpr = call.KEYS // k_blocks.block_type.shape[2]
    turn = gl.to_tensor(0)
    step = gl.to_tensor(0)
    tile = _tile_of(slots, turn)
    corners_of_values = _corners(page_table, table_step, tile, 0, k_blocks, call, False)
    while tile.end > 0:
        table = page_table
        if page_table is not None:
            table += tile.sequence.to(gl.int64) * table_stride
        count = tile.end - tile.begin
        following = _corners(table, table_step, tile, tile.end - 1, k_blocks, call, True)
        for i in range(count):
            here = following
            # Ahead: entries of a page table take long to come.
            following = _corners(table, table_step, tile, tile.end - 2 - i, k_blocks, call, i + 1 < count)  # fmt: skip
            _load_keys(slots, k_blocks, here, COPIES, step)
            if step > 0:
                _load_values(slots, v_blocks, corners_of_values, COPIES, step, True)
            # After the last values of the tile before, without which no queries are released.
            if i == 0:
                _load_queries(slots, q_blocks, tile, turn)
            corners_of_values = here
            step += 1
        # Only now: the scheduling warp then takes a number, which an idle program should rather have.
        slots.has_tile.release(place_of(turn, SLOTS))
        turn += 1
        tile = _tile_of(slots, turn)
    if step > 0:
        _load_values(slots, v_blocks, corners_of_values, COPIES, step, False)


@gluon.jit
def _tile_of(slots, turn):
    place = place_of(turn, SLOTS)
    slots.has_tile.wait_full(place)
    return read_tile(slots.tiles, place.slot, _ONE)


@gluon.jit
def _corners(table, table_step, tile, block, blocks, call, needed):
    """Where a block of keys lies: (batch, KV head, first row); on pages (entries, KV head, first row of a page).

    entries: of the page table, one a lane, in the order of the copies. -1 is no page: copies from there bring zeros.
    Entries of pages that the window has left behind may be anything: none, too.
    """
    head = tile.head // call.group
    first_key = block * call.KEYS
    if table is None:
        return tile.batch, head, tile.keys.first + first_key
    else:
        PAGE: gl.constexpr = blocks.block_type.shape[2]
        if PAGE == call.KEYS:  # or a part of a page
            size = blocks.shape[2].to(gl.int32)
            first = first_key % size
        else:
            size: gl.constexpr = PAGE
            first = gl.to_tensor(0)
        seen_from = gl.to_tensor(0)
        if call.HAS_LEFT:
            seen_from = gl.maximum(tile.row + tile.offset - call.left, 0)
        lane = gl.arange(0, _LANES, layout=_ONE)
        entry = first_key // size + lane
        needed = needed & (lane < call.KEYS // PAGE)
        needed = needed & (entry * size < call.capacity) & ((entry + 1) * size > seen_from)
        return gl.load(table + entry.to(gl.int64) * table_step, mask=needed, other=-1), head, first


@gluon.jit
def _copies(corners, blocks, COUNT: gl.constexpr):
    """(corners with a page, or the batch, for each copy; a bit for each page that is none)"""
    found, head, first = corners
    if found.type.is_block():
        lane = gl.arange(0, _LANES, layout=_ONE)
        is_page = (found >= 0) & (found < blocks.shape[0])
        found = gl.where(is_page, found, _FAR).to(gl.int32)
        pages = ()
        for i in gl.static_range(COUNT):
            pages = pages + (gl.max(gl.where(lane == i, found, 0), 0),)  # noqa: RUF005 -- Triton knows no unpacking
        missing = gl.sum(gl.where(is_page | (lane >= COUNT), 0, 1 << lane), 0)
        return (pages, head, first), missing
    else:
        return ((found,), head, first), gl.to_tensor(0)


@gluon.jit
def _fill(ring, blocks, corners, buffers, slot, place, PARTS: gl.constexpr, TRANSPOSED: gl.constexpr):  # fmt: skip
    """Starts to copy a block of rows: whole, in parts, or page by page, of which a copy has 64 columns."""
    ROWS_OF_COPY: gl.constexpr = blocks.block_type.shape[2]
    COLUMNS: gl.constexpr = blocks.block_type.shape[3]
    pages, head, first = corners
    for part in gl.static_range(PARTS):
        whole = buffers.index(slot * PARTS + part)
        if TRANSPOSED:
            ring.fill(blocks, [pages[0], head, part * ROWS_OF_COPY, first], whole, place)
        else:
            for i in gl.static_range(whole.shape[2] // ROWS_OF_COPY):
                for j in gl.static_range(whole.shape[3] // COLUMNS):
                    piece = whole
                    if piece.shape[2] != ROWS_OF_COPY:
                        piece = piece.slice(i * ROWS_OF_COPY, ROWS_OF_COPY, 2)
                    if piece.shape[3] != COLUMNS:
                        piece = piece.slice(j * COLUMNS, COLUMNS, 3)
                    column = part * whole.shape[3] + j * COLUMNS
                    ring.fill(blocks, [pages[i], head, first, column], piece, place)


@gluon.jit
def _load_keys(slots, k_blocks, corners, COPIES: gl.constexpr, step):
    """Of a step that has keys: of the whole step, where its values lie beside them."""
    BYTES: gl.constexpr = slots.BYTES
    place = place_of(step, SLOTS)
    slots.has_keys.wait_empty(place)
    corners, missing = _copies(corners, k_blocks, COPIES)
    if slots.PAGE > 0:
        slots.missing.index(place.slot).store(gl.full([1], missing, gl.int32, _ONE))
    if slots.TOGETHER:
        slots.has_keys.expect(place, BYTES, step == 0)
        slots.has_keys.expect(place, 2 * BYTES, step > 0)
    else:
        slots.has_keys.expect(place, BYTES)
    _fill(slots.has_keys, k_blocks, corners, slots.k, place.slot, place, slots.PARTS, False)


@gluon.jit
def _load_values(slots, v_blocks, corners, COPIES: gl.constexpr, step, HAS_KEYS: gl.constexpr):
    """Of a step, whether or not it has keys: the block before its keys."""
    place = slots.place_of_values(step)
    if not (slots.TOGETHER and HAS_KEYS):
        slots.has_values.wait_empty(place)
        slots.has_values.expect(place, slots.BYTES)
    corners, _ = _copies(corners, v_blocks, COPIES)
    _fill(slots.has_values, v_blocks, corners, slots.v, place.slot, place, slots.PARTS, slots.TRANSPOSED)  # fmt: skip


@gluon.jit
def _load_queries(slots, q_blocks, tile, turn):
    for i in gl.static_range(GROUPS):
        place = own_place(i, turn, slots.Q_SLOTS // GROUPS)
        slots.has_queries.wait_empty(place)
        slots.has_queries.expect(place, slots.PARTS * q_blocks.block_type.nbytes)
        own = tile.of_warp_group(i)
        corners = (own.batch,), own.head, own.queries.first + own.row
        _fill(slots.has_queries, q_blocks, corners, slots.q, place.slot, place, slots.PARTS, False)
