"""Decode calls by the one-sided strategies, back to back, in any order: torchrun --nproc-per-node N -m tests.soak.

Strategies, shapes, lengths, outputs (replicated or of each rank's heads) and groups (all ranks; with three or more
also the first two) are drawn, ranks come late by different times, and epochs start again and again just below
the end of their 32 bits. On GPUs several calls are under way at once on several streams, and replays of CUDA
graphs are mixed with eager calls. Every result is compared with one process's, and now and then between the ranks.

Values are scaled by a power of two of each call's own, so that what an earlier call left behind is wrong, and the
expected result is known without computing it anew. Exit code 1 on a mismatch, a time-out or a hang.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import os
import random
import sys
import time
from collections import Counter
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import torch_fdattn
from torch_fdattn.dist import ShardMap, check, decode, set_timeout
from torch_fdattn.dist.channel import _channels
from torch_fdattn.dist.decode.op import ONE_SIDED
from torch_fdattn.ops.library import INTERPRET

HANG_S = 300
KEYS = 12
ROUND = 200  # calls between two settings of the epochs


class Problem(NamedTuple):
    """A kind of call: what does not change, on one rank of one group."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_shard: Tensor
    mine: Tensor
    group: str
    kv_block: int
    exact: dict[tuple[int, ...], tuple[Tensor, Tensor]]

    def lengths(self, rng: random.Random) -> tuple[int, ...]:
        return rng.choice(list(self.exact))


class Call(NamedTuple):
    """One call's draw."""

    problem: int
    strategy: str
    head_sharded: bool
    lens: tuple[int, ...]
    scale: float
    stream: int


def problems(rng: random.Random, ranks: list[int], group: str, device: torch.device, many: int):
    """The largest first, for which the channels then have room."""
    world, rank = len(ranks), ranks.index(dist.get_rank())
    dtypes = [torch.float32, torch.bfloat16 if device.type == "cuda" else torch.float16]
    torch.manual_seed(0)
    found = []
    for i in range(many):
        batch, heads = rng.choice([1, 2, 3]), world * rng.choice([1, 2])
        tokens, dim, v_dim = rng.choice([1, 1, 2]), 16, rng.choice([16, 24])
        if i == 0:
            batch, heads, tokens, v_dim = 3, 2 * world, 2, 24
        dtype, kv_block = dtypes[i % 2], rng.choice([1, 2, 5])
        q, k, v = (
            torch.randn(batch, h, n, d).to(device, dtype)
            for h, n, d in ((heads, tokens, dim), (1, KEYS, dim), (1, KEYS, v_dim))
        )
        mine, _ = ShardMap(rank, world, kv_block).locate(torch.arange(KEYS, device=device))
        exact = {}
        for _ in range(3):
            lens = tuple(rng.randint(0, KEYS) for _ in range(batch))
            exact[lens] = torch_fdattn.decode(q, k, v, lengths(lens, device))
        found.append(Problem(q, k, v, k[:, :, mine], mine, group, kv_block, exact))
    return found


def lengths(values: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def run(problem: Problem, call: Call, v_shard: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
    return decode(
        problem.q, problem.k_shard, v_shard, lens, problem.group, kv_block=problem.kv_block,
        strategy=call.strategy, head_sharded=call.head_sharded,
    )  # fmt: skip


def compare(problem: Problem, call: Call, found, ranks: list[int]) -> None:
    expected = problem.exact[call.lens]
    if call.head_sharded:
        expected = [x.chunk(len(ranks), 1)[ranks.index(dist.get_rank())] for x in expected]
    # In 16 bits both sides round their weights, and sums may cancel.
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[found[0].dtype]
    for ours, exact in zip((found[0] / call.scale, found[1]), expected, strict=True):
        torch.testing.assert_close(
            ours, exact, atol=bound, rtol=bound, msg=lambda m: f"{call}: {m}"
        )


def same_everywhere(call: Call, found) -> None:
    for x in found:
        everywhere = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, x)
        assert all(torch.equal(part, x) for part in everywhere), f"ranks differ: {call}"


def near_the_wrap(rng: random.Random, device: torch.device) -> None:
    """As if every channel were a few calls before the end of its epochs; no call is under way."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    epoch = 0xFFFFFFFF - rng.randint(0, 6)
    for channels in _channels.values():
        for channel in itertools.chain(*channels.values()):
            channel.memory.local.zero_()
            channel.state[0] = epoch
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


class Graph:
    """A captured call, whose values and lengths are written anew before each replay."""

    def __init__(self, problem: Problem, call: Call) -> None:
        self.call, self.problem = call, problem
        self.v = problem.v[:, :, problem.mine].clone()
        self.lens = lengths(call.lens, self.v.device)
        run(problem, call, self.v, self.lens)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.found = run(problem, call, self.v, self.lens)

    def replay(self, call: Call) -> tuple[Tensor, Tensor]:
        self.v.copy_(self.problem.v[:, :, self.problem.mine] * call.scale)
        self.lens.copy_(lengths(call.lens, self.v.device))
        self.graph.replay()
        out, lse = self.found
        return out.clone(), lse.clone()


def drawn(rng: random.Random, kinds: list[Problem], streams: int) -> Call:
    i = rng.randrange(len(kinds))
    scale = 2.0 ** rng.randint(-4, 4) * rng.choice([1, -1])
    lens = kinds[i].lengths(rng)
    return Call(i, rng.choice(ONE_SIDED), rng.random() < 0.3, lens, scale, rng.randrange(streams))


def soak(count: int, seed: int, device: torch.device) -> Counter:
    rank, world, cuda = dist.get_rank(), dist.get_world_size(), device.type == "cuda"
    pair = dist.new_group([0, 1]) if world > 2 else None
    rng, own_rng = random.Random(seed), random.Random(1000 * seed + rank)
    many = 12 if cuda else 5
    groups = [
        (
            list(range(world)),
            problems(rng, list(range(world)), dist.group.WORLD.group_name, device, many),
        )
    ]
    state = rng.getstate()
    if pair is not None:
        if rank < 2:
            groups.append(([0, 1], problems(rng, [0, 1], pair.group_name, device, many)))
        else:  # lengths are drawn all the same, from problems of the whole group's
            groups.append(([0, 1], groups[0][1]))
        rng.setstate(state)
    streams = [torch.cuda.Stream() for _ in range(3)] if cuda else []
    # Channels are made here, where all come, and with room for every later call.
    for ranks, kinds in groups:
        for strategy in ONE_SIDED if rank in ranks else ():
            for head_sharded in (False, True) if strategy == "two_shot" else (False,):
                lens = next(iter(kinds[0].exact))
                call = Call(0, strategy, head_sharded, lens, 1.0, 0)
                run(kinds[0], call, kinds[0].v[:, :, kinds[0].mine], lengths(lens, device))
    graphs = []
    for _ in range(8 if cuda else 0):
        call = drawn(rng, groups[0][1], 1)
        graphs.append(Graph(groups[0][1][call.problem], call))
    counts, start, shown = Counter(), time.monotonic(), time.monotonic()
    done = 0
    while done < count:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        if done % ROUND == 0:
            near_the_wrap(rng, device)
        burst = min(rng.choice([1, 2, 4]), count - done, ROUND - done % ROUND)
        # The library does not see replays: with them a burst's calls are on one stream.
        replays = bool(graphs) and rng.random() < 0.3
        waiting = []
        for _ in range(burst):
            which = int(len(groups) > 1 and rng.random() < 0.3)
            ranks, kinds = groups[which]
            index_rng = random.Random(rng.getrandbits(32))  # the same number of draws on all ranks
            call = drawn(index_rng, kinds, max(1, len(streams)))
            graph = index_rng.choice(graphs) if replays and index_rng.random() < 0.5 else None
            if graph is not None:
                ranks, kinds = groups[0]
                lens = graph.problem.lengths(index_rng)
                call = graph.call._replace(lens=lens, scale=call.scale)
            late = own_rng.random() * 0.004 if own_rng.random() < 0.1 else 0.0
            if rank not in ranks:
                counts["of others"] += 1
                continue
            time.sleep(late)
            problem = kinds[call.problem]
            if not cuda:
                v = problem.v[:, :, problem.mine] * call.scale
                found = run(problem, call, v, lengths(call.lens, device))
            else:
                with torch.cuda.stream(streams[0 if replays else call.stream]):
                    if graph is not None:
                        found = graph.replay(call)
                    else:
                        v = problem.v[:, :, problem.mine] * call.scale
                        found = run(problem, call, v, lengths(call.lens, device))
            counts[call.strategy] += 1
            counts["replays"] += graph is not None
            counts["of heads"] += call.head_sharded
            counts["in the pair"] += len(ranks) < world
            waiting.append((problem, call, found, ranks))
        if cuda:
            torch.cuda.synchronize()
        for each in waiting:
            compare(*each)
        compares = rng.random() < 0.05
        for _, call, found, ranks in waiting if compares else ():
            if len(ranks) == world and not call.head_sharded:
                same_everywhere(call, found)
                counts["compared between ranks"] += 1
        done += burst
        if rank == 0 and time.monotonic() - shown > 20:
            shown = time.monotonic()
            print(f"{done} of {count} calls, {done / (shown - start):.0f} a second", flush=True)
    check()
    faulthandler.cancel_dump_traceback_later()
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    cuda = not INTERPRET and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=HANG_S))
    set_timeout(60)
    start = time.monotonic()
    counts = soak(options.calls, options.seed, device)
    dist.barrier()
    if dist.get_rank() == 0:
        listed = ", ".join(f"{value} {name}" for name, value in sorted(counts.items()))
        print(
            f"soak: {options.calls} calls on {dist.get_world_size()} {device.type} ranks, no mismatch and no hang "
            f"in {time.monotonic() - start:.0f} s ({listed})",
            flush=True,
        )
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
