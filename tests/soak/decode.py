"""Decode over a sharded cache by the one-sided strategies: shapes, lengths, outputs replicated or of a rank's heads."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

import torch_fdattn
from tests.soak.loop import Group
from torch_fdattn.dist import ShardMap, decode
from torch_fdattn.dist.decode.op import ONE_SIDED

KEYS = 12


class Problem(NamedTuple):
    """A kind of call: what does not change, on one rank of one group."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_shard: Tensor
    mine: Tensor
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


class Decode:
    """The problems of one group, the largest first."""

    def __init__(self, group: Group, seed: str, device: torch.device) -> None:
        self.group, self.device = group, device
        self.problems = [
            self._problem(i, random.Random(f"{seed} {i}"))
            for i in range(12 if device.type == "cuda" else 5)
        ]

    def _problem(self, i: int, rng: random.Random) -> Problem:
        world, device = self.group.size, self.device
        batch, heads = rng.choice([1, 2, 3]), world * rng.choice([1, 2])
        tokens, dim, v_dim = rng.choice([1, 1, 2]), 16, rng.choice([16, 24])
        if i == 0:
            batch, heads, tokens, v_dim = 3, 2 * world, 2, 24
        half = torch.bfloat16 if device.type == "cuda" else torch.float16
        dtype, kv_block = [torch.float32, half][i % 2], rng.choice([1, 2, 5])
        made = torch.Generator().manual_seed(rng.getrandbits(32))
        q, k, v = (
            torch.randn(batch, h, n, d, generator=made).to(device, dtype)
            for h, n, d in ((heads, tokens, dim), (1, KEYS, dim), (1, KEYS, v_dim))
        )
        shards = ShardMap(self.group.rank, world, kv_block)
        mine, _ = shards.locate(torch.arange(KEYS, device=device))
        exact = {}
        for _ in range(3):
            lens = tuple(rng.randint(0, KEYS) for _ in range(batch))
            exact[lens] = torch_fdattn.decode(q, k, v, self._lengths(lens))
        return Problem(q, k, v, k[:, :, mine], mine, kv_block, exact)

    def _lengths(self, values: tuple[int, ...]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def warm_up(self) -> None:
        lens = next(iter(self.problems[0].exact))
        for strategy in ONE_SIDED:
            for head_sharded in (False, True) if strategy == "two_shot" else (False,):
                call = Call(0, strategy, head_sharded, lens, 1.0)
                self.run(call, self.inputs(call))

    def draw(self, rng: random.Random) -> Call:
        i = rng.randrange(len(self.problems))
        call = Call(i, rng.choice(ONE_SIDED), rng.random() < 0.3, (), 1.0)
        return self.redraw(call, rng)

    def redraw(self, call: Call, rng: random.Random) -> Call:
        scale = 2.0 ** rng.randint(-4, 4) * rng.choice([1, -1])
        return call._replace(lens=self.problems[call.problem].lengths(rng), scale=scale)

    def inputs(self, call: Call) -> tuple[Tensor, ...]:
        """(this rank's values, lengths)."""
        problem = self.problems[call.problem]
        return problem.v[:, :, problem.mine] * call.scale, self._lengths(call.lens)

    def run(self, call: Call, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        problem = self.problems[call.problem]
        return decode(
            problem.q, problem.k_shard, *inputs, self.group.name, kv_block=problem.kv_block,
            strategy=call.strategy, head_sharded=call.head_sharded,
        )  # fmt: skip

    def expect(self, call: Call, found: tuple[Tensor, ...]) -> None:
        expected = self.problems[call.problem].exact[call.lens]
        if call.head_sharded:
            expected = [x.chunk(self.group.size, 1)[self.group.rank] for x in expected]
        # In 16 bits both sides round their weights, and sums may cancel.
        bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[found[0].dtype]
        for ours, exact in zip((found[0] / call.scale, found[1]), expected, strict=True):
            torch.testing.assert_close(
                ours, exact, atol=bound, rtol=bound, msg=lambda m: f"{call}: {m}"
            )

    def replicated(self, call: Call, found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return () if call.head_sharded else found

    def kinds(self, call: Call) -> Iterable[str]:
        return call.strategy, *(["of heads"] if call.head_sharded else [])
