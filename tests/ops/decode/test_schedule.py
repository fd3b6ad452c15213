"""How work is cut: no piece is lost, whatever the lengths; what may and what may not change with the batch."""

import random

import pytest
import torch

import torch_fdattn
from torch_fdattn.ops.attention.configs import TileConfig
from torch_fdattn.ops.decode import schedule
from torch_fdattn.ops.decode.inputs import Cache, DecodeCall
from torch_fdattn.ops.decode.launch import DecodeLaunchPlan, launch_decode
from torch_fdattn.ops.library import INTERPRET
from torch_fdattn.ops.options import DecodeOptions
from torch_fdattn.ops.positions import Mask
from torch_fdattn.testing import attention_oracle, make_tensor


def splits_on_device(units, work_tiles, target, ragged_target, low, even, twice, invariant):
    """`schedule`'s Triton functions in Python: the splits of a work tile of each sequence."""
    chunk, long = schedule.CHUNK.value, schedule.LONG_SHARE.value
    if invariant:
        return [-(-u // chunk) for u in units]
    if even:
        most = schedule.splits_per_work_tile(len(units) * work_tiles, target)
        if twice and units[0] >= most * long:
            return [2 * most] * len(units)
        return [min(-(-u // low), most) for u in units]
    total = sum(units) * work_tiles
    ragged = 4 * max(units) * len(units) > 5 * sum(units)
    share = -(-total // (ragged_target if ragged else target))
    if twice and share >= long and not ragged:
        share = -(-share // 2)
    share = max(share, low)
    reciprocal = 0xFFFFFFFF // share
    return [max((u + share * 2 // 5) * reciprocal >> 32, 1) for u in units]


@pytest.mark.parametrize("seed", range(20))
def test_the_grid_holds_every_piece(seed):
    rng = random.Random(seed)
    for _ in range(500):
        batch, work_tiles = rng.choice([1, 2, 3, 17, 200]), rng.choice([1, 2, 8, 40])
        capacity = int(2 ** rng.uniform(0, 21))
        num_sms = rng.choice([2, 132])
        target = rng.choice([1, 7, schedule.target_splits(batch * work_tiles, num_sms)])
        low = rng.choice([schedule.MIN_SHARE, 8])
        even, twice, invariant = rng.random() < 0.5, rng.random() < 0.5, rng.random() < 0.2
        power = rng.choice([0, 1, 6])  # all equal, uniform, few long ones
        lens = [int(capacity * rng.random() ** power) for _ in range(batch)]
        if even:
            lens = [lens[0]] * batch
        units = [max(1, -(-length // schedule.UNIT.value)) for length in lens]
        ragged = schedule.ragged_target_splits(target, num_sms)
        programs, most = schedule.max_splits(
            batch, work_tiles, capacity, target, ragged, low, even, twice, invariant
        )
        splits = splits_on_device(units, work_tiles, target, ragged, low, even, twice, invariant)
        assert max(splits) <= most
        assert sum(splits) * work_tiles <= programs


def plan(batch, capacity, *, paged=False, dtype=torch.bfloat16, invariant=False, capability=(9, 0)):
    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    q, table = meta(batch, 32, 1, 128), None
    k = meta(batch, 8, capacity, 128, dtype=dtype)
    if paged:
        k, table = (
            meta(batch * capacity // 16, 8, 16, 128, dtype=dtype),
            meta(batch, capacity // 16, dtype=torch.int32),
        )
    lens = meta(batch, dtype=torch.int32)
    options = DecodeOptions(Mask(lens), 1.0, batch_invariant=invariant)
    return DecodeLaunchPlan(DecodeCall(q, Cache(k, k, table), options), q, capability=capability)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("paged", [False, True])
def test_invariant_tiles_do_not_follow_the_batch(paged, dtype):
    """On an H100, whose tiles else depend on how many work tiles there are."""
    found = {
        plan(batch, capacity, paged=paged, dtype=dtype, invariant=True).tiles
        for batch in (1, 32, 64, 256)
        for capacity in (4096, 131072)
    }
    assert len(found) == 1
    others = {plan(b, 4096, paged=paged, dtype=dtype).tiles[0] for b in (1, 64)}
    assert INTERPRET or len(others) == 2


def test_tiles_know_the_target():
    tiles = {
        plan(64, 4096, paged=True, dtype=torch.int8, capability=capability).tiles[0]
        for capability in ((9, 0), (0, 0))
    }
    assert INTERPRET or len(tiles) == 2


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("lens", "invariant"),
    [
        ((600,), False),
        ((600, 600), True),
        ((1300, 40, 0), False),
        ((1300, 40, 0), True),
        ((1280, 40, 0), False),
        ((33,), True),
    ],
)
def test_pages_cut_twice_and_long_sequences(lens, invariant, device):
    """More than one piece a chunk, and two programs a processor where a page table is read."""
    page, capacity, heads = 16, 1312, 3 - len(lens) if len(lens) < 3 else 1
    batch = len(lens)
    q = make_tensor((batch, 2 * heads, 1, 32), device=device, dtype=torch.float32)
    k, v = (
        make_tensor((batch, heads, capacity, 32), device=device, dtype=torch.float32) for _ in "kv"
    )
    table = torch.randperm(batch * capacity // page, device=device).int().view(batch, -1)
    pages = []
    for x in (k, v):
        there = torch.empty(table.numel(), heads, page, 32, device=device)
        there[table.flatten().long()] = (
            x.view(batch, heads, -1, page, 32).transpose(1, 2).flatten(0, 1)
        )
        pages.append(there)
    kv_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    out, lse = torch_fdattn.paged_decode(q, *pages, table, kv_lens, batch_invariant=invariant)
    exact, exact_lse = attention_oracle(q.double(), k.double(), v.double(), lens)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreter
def test_a_second_call_with_wider_values(device):
    """q a slice whose strides are those of the output, which has more dims."""
    q = make_tensor((2, 2, 1, 32), device=device, dtype=torch.float32)[..., :16]
    k = make_tensor((2, 1, 16, 16), device=device, dtype=torch.float32)
    v = make_tensor((2, 1, 16, 32), device=device, dtype=torch.float32)
    first, _ = torch_fdattn.decode(q, k, v)
    second, _ = torch_fdattn.decode(q, k, v)
    assert second.shape == first.shape == (2, 2, 1, 32)
    assert torch.equal(first, second)


@pytest.mark.interpreter
def test_too_many_keys_are_refused(kernel_device):
    q = make_tensor((1, 1, 1, 16), device=kernel_device, dtype=torch.float32)
    k = make_tensor((1, 1, 1, 16), device=kernel_device, dtype=torch.float32).expand(
        1, 1, 2**30, 16
    )
    lens = torch.ones(1, dtype=torch.int32, device=kernel_device)
    with pytest.raises(ValueError, match=r"fewer than 2\*\*30 keys a sequence, got 1073741824"):
        torch_fdattn.decode(q, k, k, lens)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "tile",
    [TileConfig(16, 128, 1, 1), pytest.param(TileConfig(16, 64, 1, 1), marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize(
    ("lens", "target"),  # 60: more than there are tiles
    [(None, 3), ((700, 700), 60), ((1000, 1, 0), 3), ((129, 640, 64), 3), ((129, 640, 64), 60)],
    ids=str,
)
def test_tiles_of_a_gpu(lens, target, tile, kernel_device):
    """The interpreter's own tiles hold one unit; these hold more than the least that a piece has."""
    batch = 2 if lens is None else len(lens)
    q = make_tensor((batch, 6, 1, 32), device=kernel_device, dtype=torch.float32)
    k, v = (
        make_tensor((batch, 2, 1000, 32), device=kernel_device, dtype=torch.float32) for _ in "kv"
    )
    mask = Mask(
        None if lens is None else torch.tensor(lens, dtype=torch.int32, device=kernel_device)
    )
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    # Guards behind what the plan asks for: no program writes beyond its slots.
    call = DecodeCall(q, Cache(k, v), DecodeOptions(mask, 0.2))
    plan = DecodeLaunchPlan(call, out, tile, target)
    room = torch.full((plan.floats + 512,), 77.0, device=kernel_device)
    launch_decode(call, out, lse, room.view(torch.int32), config=tile, target_splits=target)
    assert (room[plan.floats :] == 77).all()
    expected, expected_lse = attention_oracle(q, k, v, lens, scale=0.2)
    torch.testing.assert_close(out, expected.to(out), atol=2e-5, rtol=0)
    torch.testing.assert_close(lse, expected_lse.to(lse), atol=2e-5, rtol=0)


def test_no_grid_is_too_wide():
    """y and z of a CUDA grid end at 65535: many heads go to x."""
    q = torch.empty(2, 70000, 1, 16, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 70000, 64, 16, dtype=torch.bfloat16, device="meta")
    grid = DecodeLaunchPlan(DecodeCall(q, Cache(k, k), DecodeOptions(scale=1.0)), q)._decode.grid
    assert grid[0] >= 70000
    assert max(grid[1:]) < 65536


@pytest.mark.interpreter
@pytest.mark.parametrize("shape", [(3, 1), (), (1, 3, 1)], ids=str)
def test_scales_of_an_empty_cache(shape, device):
    """Expanded to no keys they have no address, which a kernel must not load from."""
    q = make_tensor((1, 3, 1, 16), device=device, dtype=torch.float16)
    k = torch.empty(1, 3, 0, 16, dtype=torch.int8, device=device)
    scale = torch.rand(shape, device=device)
    lens = torch.zeros(1, dtype=torch.int32, device=device)
    out, lse = torch_fdattn.decode(q, k, k, lens, k_scale=scale, v_scale=scale)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


def test_many_items_take_bounded_room():
    """A large batch balances by itself: its ragged pieces are at most twice as many."""
    num_sms = 132
    for work_tiles in (1, 40, 512, 1024, 32768):
        target = schedule.target_splits(work_tiles, num_sms)
        ragged = schedule.ragged_target_splits(target, num_sms)
        assert 2 * target <= ragged <= max(2 * target, schedule.ENOUGH * num_sms)
    assert schedule.ragged_target_splits(132, 132) == schedule.FINER * 132
