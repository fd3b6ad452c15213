"""Method and strategy `low_latency`: few numbers in one launch and one trip over the wire, before or after BLAS.

A Lamport exchange (`lamport_exchange.py`) gathers and scatters, and sums up to `lamport_bytes`; beyond, two ranks send
parts one after another, and more ranks tiles with flags (`tiled_all_reduce.py`). Sums are in fp32, in an order that is
the same everywhere: the same bits on all ranks.

Here: LL packets of 32 bits and the epoch (`signals.py`), two 16-bit numbers or one fp32 each, for an odd number of
16-bit ones. Cost: (W - 1) times twice the bytes sent by every rank, no flag, no fence, no barrier.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.dist.groups import rank_and_size
from torch_fdattn.dist.symm.channel import channel
from torch_fdattn.dist.symm.faults import timeout_ns
from torch_fdattn.dist.symm.signals import (
    as_int64,
    at_rank,
    leave_epoch,
    ll_packet,
    may_send,
    packed,
    payload,
    read_epoch,
    receive_packets,
    unpacked,
)
from torch_fdattn.dist.tensor_parallel import lamport_exchange, lamport_two_shot, tiled_all_reduce
from torch_fdattn.launch.launches import launch
from torch_fdattn.launch.pdl import await_previous
from torch_fdattn.ops.launch import cdiv, power_of_two
from torch_fdattn.ops.library import INTERPRET, launches
from torch_fdattn.ops.pdl import pdl_option, uses_pdl

#: Packets of all ranks that a program polls together. 512 takes 1 to 2 µs more on two H200, 1024 5.
_TILE_PACKETS = 256
#: Bytes of a rank's part up to which LL packets, twice the bytes, are faster than tiles: on two H200 by
#: 1.4 µs at 160 and 320 KiB, as fast at 640, slower by 2 µs at 1280.
LL_MAX_BYTES = 1 << 19
#: Bytes up to which a Lamport exchange takes the place of tiles and packets: on two H200 they are faster by 0.6 to 2 µs to 320 KiB,
#: 4.4 at 640 and 4.1 at 1280, 2.6 at 2.5 MiB, 7.6 at 10 and 10 at 40. It takes three times the bytes of memory.
LAMPORT_BYTES = 48 << 20
#: Bytes that the wire carries in the time of `tiled_all_reduce`'s second trip, 4.5 µs. An estimate: not measured.
SECOND_TRIP_BYTES = 1_700_000

#: Bytes of a rank's part up to which a Lamport exchange in two trips (`lamport_two_shot.py`) takes the place of tiles with flags. Four
#: H100, µs of packets and of tiles: 2 MiB 17.5 and 21.4, 4 MiB 30.6 and 30.6, 8 MiB 56.1 and 49.3.
TWO_SHOT_LAMPORT_BYTES = 4 << 20


@triton.jit(do_not_specialize=["half_bytes", "limit_ns", "rank", "count"])
def _ll_all_reduce_kernel(
    x_ptr, y_ptr, addresses_ptr, state_ptr, fault_ptr, half_bytes, limit_ns, rank, count, WORLD: tl.constexpr,
    SOURCES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x (count,) -> y (count,), the sum over ranks."""
    await_previous(PDL)
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    PER_PACKET: tl.constexpr = 2 if dtype.primitive_bitwidth == 16 else 1
    epoch = read_epoch(state_ptr)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    packets = tl.cdiv(count, PER_PACKET)
    inside = at < packets
    numbers = first * PER_PACKET + tl.arange(0, BLOCK * PER_PACKET)
    sources = tl.arange(0, SOURCES)
    x = tl.load(x_ptr + numbers, mask=numbers < count, other=0.0)
    own = tl.reshape(packed(x[None, :], dtype), [BLOCK])
    sent = ll_packet(own, epoch)
    sends = inside & may_send(state_ptr, epoch)
    for i in tl.static_range(1, WORLD):
        base = as_int64(at_rank(addresses_ptr, (rank + i) % WORLD, epoch, half_bytes))
        tl.store(base + rank * packets + at, sent, mask=sends)
    expected = (sources < WORLD) & (sources != rank)
    base = as_int64(at_rank(addresses_ptr, rank, epoch, half_bytes))
    pointers = base + sources[:, None] * packets + at[None, :]
    none = tl.zeros_like(expected)
    found, _, came = receive_packets(
        pointers[:, None, :], (base + sources)[:, None], (expected[:, None] & inside[None, :])[:, None, :],
        none[:, None], sources, epoch, state_ptr, fault_ptr, limit_ns,
    )  # fmt: skip
    bits = tl.reshape(payload(found, tl.int32), [SOURCES, BLOCK])
    bits = tl.where((sources == rank)[:, None], own[None, :], bits)
    bits = tl.where((sources < WORLD)[:, None], bits, 0)
    total = tl.sum(unpacked(bits, dtype), 0)
    total = tl.where(came, total, float("nan"))
    tl.store(y_ptr + numbers, total.to(dtype), mask=numbers < count)
    leave_epoch(state_ptr, epoch, tl.num_programs(0))


def all_gather_matmul(
    x: Tensor, weights: Sequence[Tensor], group_name: str, rows: Sequence[int], keep: bool,
) -> list[Tensor]:  # fmt: skip
    """[gathered x (M, K) @ weight.T (M, N_i) …, the gathered x where that is to be kept].

    Ranks of fewer rows than others send zeros besides.
    """
    most, features = max(rows), x.shape[1]
    even = most == min(rows)
    if not even and len(x) < most:
        x = F.pad(x, (0, 0, 0, most - len(x)))
    gathered = x.new_empty(most * len(rows), features)
    if gathered.numel():
        launches["tensor_parallel/low_latency_all_gather"] += 1
        lamport_exchange.all_gather(x, gathered, group_name, *rank_and_size(group_name))
    if not even:
        parts = zip(gathered.split(most), rows, strict=True)
        gathered = torch.cat([part[:count] for part, count in parts])
    return [*(F.linear(gathered, weight) for weight in weights), *([gathered] if keep else [])]


def matmul_reduce_scatter(
    x: Tensor, weight: Tensor, group_name: str, rows: Sequence[int], bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """This rank's rows (m, N) of the sum over ranks of x (M, K) @ weight (N, K).T + bias (N,).

    Where ranks have different numbers of rows, they are of the sum of all rows.
    """
    part = F.linear(x, weight, bias)
    if max(rows) > min(rows):
        rank = rank_and_size(group_name)[0]
        first = sum(rows[:rank])
        # A copy: nobody's view, and without the others' rows.
        return all_reduce(part, group_name)[first : first + rows[rank]].clone()
    y = part.new_empty(rows[0], part.shape[1])
    if y.numel():
        launches["tensor_parallel/low_latency_reduce_scatter"] += 1
        lamport_exchange.reduce_scatter(part, y, group_name, *rank_and_size(group_name))
    return y


def lamport_bytes(world: int) -> int:
    """Bytes of a rank's part up to which it goes by a Lamport exchange in one shot; two send 2 / W of that shot's bytes."""
    if world == 2:
        return LAMPORT_BYTES
    return min(LAMPORT_BYTES, SECOND_TRIP_BYTES * world // ((world - 1) * (world - 2)))


def ll_all_reduce(x: Tensor, y: Tensor, group_name: str, world: int) -> None:
    """Writes the sum of x over the ranks into y; both contiguous, of one dtype."""
    count, sources = x.numel(), power_of_two(world)
    packets = cdiv(x.nbytes, 4)
    where = channel(group_name, "low_latency", world * packets * 8, x.device)
    where.enter()
    block = min(power_of_two(packets), 1 << 13) if INTERPRET else max(32, _TILE_PACKETS // sources)
    pdl = uses_pdl(y)
    launch(
        _ll_all_reduce_kernel, cdiv(packets, block),
        x, y, where.memory.addresses, where.state, where.fault.tensor, where.half_bytes, timeout_ns(), where.rank,
        count, world, sources, block, pdl, num_warps=1, **pdl_option(pdl),
    )  # fmt: skip


def all_reduce(x: Tensor, group_name: str) -> Tensor:
    """The sum of x over the ranks; contiguous, float32 or of 16 bits."""
    y = torch.empty_like(x)
    if not x.numel():
        return y
    launches["tensor_parallel/low_latency"] += 1
    rank, world = rank_and_size(group_name)
    most = lamport_bytes(world)
    if (
        lamport_exchange.fills_packets(x)
        and lamport_two_shot.shots(x.nbytes, world) == 2
        and x.nbytes <= TWO_SHOT_LAMPORT_BYTES
    ):
        lamport_two_shot.all_reduce(x, y, group_name, rank, world)
    elif lamport_exchange.fills_packets(x) and x.nbytes <= most:
        lamport_exchange.all_reduce(x, y, group_name, rank, world)
    elif lamport_exchange.fills_packets(x) and world == 2:
        parts, sums = (z.reshape(-1).split(most // z.element_size()) for z in (x, y))
        for part, total in zip(parts, sums, strict=True):
            lamport_exchange.all_reduce(part, total, group_name, rank, world)
    elif x.nbytes <= LL_MAX_BYTES:
        ll_all_reduce(x, y, group_name, world)
    else:
        tiled_all_reduce.all_reduce(x, y, group_name, rank, world, shots=2 if world > 2 else 1)
    return y


def matmul_all_reduce(
    x: Tensor, weight: Tensor, group_name: str, bias: Tensor | None = None
) -> Tensor:
    """The sum over ranks of x (M, K) @ weight (N, K).T + bias (N,), by the device's BLAS."""
    return all_reduce(F.linear(x, weight, bias), group_name)
