"""The loading warp of Hopper's forward: it fills the slots (`slots.py`) in the order in which they are emptied."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_fdattn.ops.attention.hopper.pipeline import place_of
from torch_fdattn.ops.attention.hopper.rows import ROWS
from torch_fdattn.ops.attention.hopper.slots import GROUPS, SLOTS, own_place
from torch_fdattn.ops.attention.hopper.tiles import read_end, read_tile, take, tile_of, write_tile

#: A page that no cache has.
_FAR = gl.constexpr(1 << 30)
_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def load(slots, q_blocks, k_blocks, v_blocks, counter, call, page_table, table_stride, table_step):
    """Of one warp: hands tiles over, and fills the slots in the order in which they are emptied.

    The tile after the one that it loads is handed over before it is needed.
    """
    turn = gl.to_tensor(0)
    step = gl.to_tensor(0)
    corners_of_values = (_no_pages(k_blocks, call), gl.to_tensor(0), gl.to_tensor(0))
    _hand_over(slots, gl.program_id(0), turn, counter, call)
    more = read_end(slots.tiles, place_of(turn, SLOTS).slot, _ONE) > 0
    while more:
        tile = read_tile(slots.tiles, place_of(turn, SLOTS).slot, _ONE)
        table = page_table
        if page_table is not None:
            table += tile.sequence.to(gl.int64) * table_stride
        for i in range(tile.end - tile.begin):
            first_key = tile.keys.first + (tile.end - 1 - i) * call.KEYS
            head = tile.head // call.group
            if table is not None:
                pages, first, missing = _pages(table, table_step, first_key, tile, k_blocks, call)
                here = pages, head, first
            else:
                here = ((tile.batch,), head, first_key)
                missing = gl.to_tensor(0)
            _load_keys(slots, k_blocks, here, missing, step)
            if step > 0:
                _load_values(slots, v_blocks, corners_of_values, step, True)
            # After the last values of the tile before, without which no queries are released.
            if i == 0:
                _load_queries(slots, q_blocks, tile, turn)
                _hand_over(slots, take(counter, call.tiles()), turn + 1, counter, call)
            corners_of_values = here
            step += 1
        turn += 1
        more = read_end(slots.tiles, place_of(turn, SLOTS).slot, _ONE) > 0
    if step > 0:
        _load_values(slots, v_blocks, corners_of_values, step, False)


@gluon.jit
def _hand_over(slots, number, turn, counter, call):
    """The tile of this number, or of the next one that has rows; or says that there is none."""
    tiles = call.tiles()
    tile = tile_of(gl.minimum(number, tiles - 1), call)
    if call.cu_seqlens_q is not None:
        while (number < tiles) & (tile.row >= tile.queries.length):
            number = take(counter, tiles)
            tile = tile_of(gl.minimum(number, tiles - 1), call)
    place = place_of(turn, SLOTS)
    slots.has_tile.wait_empty(place)
    write_tile(tile, gl.where(number < tiles, tile.end, 0), slots.tiles, place.slot, _ONE)
    slots.has_tile.hand_over(place)


@gluon.jit
def _no_pages(blocks, call):
    pages = ()
    for _ in gl.static_range(call.KEYS // blocks.block_type.shape[2]):
        pages = pages + (gl.to_tensor(0),)  # noqa: RUF005 -- Triton knows no unpacking
    return pages


@gluon.jit
def _pages(table, table_step, first_key, tile, blocks, call):
    """The pages of a block of keys, one for each copy, where in them these begin, and a bit for each that is none.

    Copies from pages that are none bring zeros. Entries of pages that the window has left behind may be anything: none, too.
    """
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
    pages = ()
    missing = gl.to_tensor(0)
    for i in gl.static_range(call.KEYS // PAGE):
        entry = first_key // size + i
        needed = (entry * size < call.capacity) & ((entry + 1) * size > seen_from)
        page = gl.load(table + entry.to(gl.int64) * table_step, mask=needed, other=-1).to(gl.int64)
        is_page = (page >= 0) & (page < blocks.shape[0])
        missing |= gl.where(is_page, 0, 1 << i)
        pages = pages + (gl.where(is_page, page, _FAR).to(gl.int32),)  # noqa: RUF005
    return pages, first, missing


@gluon.jit
def _fill(ring, blocks, corners, buffers, slot, place, PARTS: gl.constexpr, TRANSPOSED: gl.constexpr):  # fmt: skip
    """Starts to copy a block of keys or values: whole, in parts, or page by page, of which a copy has 64 columns."""
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
def _load_keys(slots, k_blocks, corners, missing, step):
    """Of a step that has keys: of the whole step, where its values lie beside them."""
    BYTES: gl.constexpr = slots.BYTES
    place = place_of(step, SLOTS)
    slots.has_keys.wait_empty(place)
    if slots.PAGE > 0:
        slots.missing.index(place.slot).store(gl.full([1], missing, gl.int32, _ONE))
    if slots.TOGETHER:
        slots.has_keys.expect(place, BYTES, step == 0)
        slots.has_keys.expect(place, 2 * BYTES, step > 0)
    else:
        slots.has_keys.expect(place, BYTES)
    _fill(slots.has_keys, k_blocks, corners, slots.k, place.slot, place, slots.PARTS, False)


@gluon.jit
def _load_values(slots, v_blocks, corners, step, HAS_KEYS: gl.constexpr):
    """Of a step, whether or not it has keys: the block before its keys."""
    place = slots.place_of_values(step)
    if not (slots.TOGETHER and HAS_KEYS):
        slots.has_values.wait_empty(place)
        slots.has_values.expect(place, slots.BYTES)
    _fill(slots.has_values, v_blocks, corners, slots.v, place.slot, place, slots.PARTS, slots.TRANSPOSED)  # fmt: skip


@gluon.jit
def _load_queries(slots, q_blocks, tile, turn):
    for i in gl.static_range(GROUPS):
        place = own_place(i, turn, slots.Q_SLOTS // GROUPS)
        slots.has_queries.wait_empty(place)
        slots.has_queries.expect(place, slots.PARTS * q_blocks.block_type.nbytes)
        first = tile.queries.first + tile.row + i * ROWS
        corners = (tile.batch,), tile.head, first
        _fill(slots.has_queries, q_blocks, corners, slots.q, place.slot, place, slots.PARTS, False)
