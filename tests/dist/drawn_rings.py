"""Ring attention drawn over masks, documents, shards, heads, dtypes and strategies, against one process: `make drawn-rings`.

    torchrun --nproc-per-node 2 -m tests.dist.drawn_rings [--count 500] [--first 0] [--strategy one_sided] [--limit-s 600]

Each rank draws the same case: which keys are seen (causal, windows on either side, documents, chunks, prefixes, lengths, a
boolean or additive mask), scores (scale, softcap, ALiBi, sinks, dropout), shards (even, zigzag, balanced, uneven, empty, any), groups of heads, and
a strategy that takes them. Values and all gradients are compared with attention written out in fp64 over the full sequence:
fp32 within 1e-5 of the largest value, half precision by the error rule. "one_sided" needs GPUs or TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import sys
import time
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.dist.ranks import start_group
from tests.dist.test_ring_attention import assert_near, drawn_shards, joined, max_abs
from tests.dist.test_ring_chunks import mask_of_chunks, mask_of_prefixes
from tests.dist.test_ring_documents import drawn_documents, same_document
from torch_fdattn.dist import SequenceShards, ring_attention
from torch_fdattn.ops.attention.dropout import Dropout, kept_weights
from torch_fdattn.testing.errors import check_close, check_lse

STRATEGIES = ("ring", "all_gather", "ulysses", "ulysses_ring", "star", "query_split")
#: Strategies whose ranks hold rows of other ranks' masks.
NO_MASK_GRADIENT = ("ulysses", "ulysses_ring", "star")
NAMES = ("out", "lse", "dq", "dk", "dv")


class Case:
    """One drawn call, the same on all ranks."""

    def __init__(self, seed: int, strategy: str | None, hierarchies: list[tuple[str, str]]) -> None:
        rng = self.rng = random.Random(f"rings {seed}")
        torch.manual_seed(seed)
        self.world = dist.get_world_size()
        self.strategy = strategy or rng.choice(STRATEGIES)
        self.hierarchy = rng.choice(hierarchies) if self.strategy == "ulysses_ring" else None
        self.dtype = rng.choice(3 * [torch.float32] + [torch.bfloat16, torch.float16])
        if self.strategy == "one_sided" and self.dtype == torch.bfloat16:
            self.dtype = torch.float16  # which the interpreter has
        self.total = rng.choice([rng.randint(1, 9), rng.randint(10, 40), rng.randint(40, 96)])
        self._draw_heads()
        self.given: dict = dict(causal=rng.random() < 0.6, scale=rng.choice([None, None, 0.3]))
        self.trained: dict[str, Tensor] = {}
        self._draw_visible()
        self._draw_scores()
        self._draw_shards()
        shape = self.batch, self.heads, self.total, 16
        self.q, self.dout = torch.randn(2, *shape).to(self.dtype)
        self.k, self.v = torch.randn(2, self.batch, self.kv_heads, self.total, 16).to(self.dtype)
        self.dlse = torch.randn(shape[:3])

    def _draw_heads(self) -> None:
        rng, share = self.rng, 1
        if self.strategy == "ulysses":
            share = self.world
        elif self.hierarchy is not None:
            share = dist.get_world_size(group_of(self.hierarchy[0]))
        self.batch = rng.choice([1, 2])
        self.kv_heads = rng.choice([x for x in range(1, share + 1) if share % x == 0] + [2 * share])
        self.heads = max(self.kv_heads, share) * rng.choice([1, 2, 3])

    def _draw_visible(self) -> None:
        """What the call is told of keys that are seen, and (B, H, S, S) which these are."""
        rng, total = self.rng, self.total
        at = torch.arange(total)
        distance = at[:, None] - at  # from the key to the query
        seen = torch.ones(self.batch, self.heads, total, total, dtype=torch.bool)
        if self.given["causal"]:
            seen &= distance >= 0
        if rng.random() < 0.4:
            left = rng.choice([-1, 0, min(rng.randint(1, 40), total)])
            right = (
                -1 if self.given["causal"] else rng.choice([-1, 0, min(rng.randint(1, 30), total)])
            )
            self.given["window"] = left, right
            seen &= (distance <= left) if left >= 0 else True
            seen &= (-distance <= right) if right >= 0 else True
        self.documents = None
        if rng.random() < 0.35:
            self.documents = drawn_documents(rng, total)
            self.given["cu_seqlens"] = self.documents
        documents = self.documents or [0, total]
        if rng.random() < 0.2:
            self.given["attention_chunk"] = rng.choice([1, 3, 16, 200])
            seen &= mask_of_chunks(documents, self.given["attention_chunk"])
        elif self.given["causal"] and self.given.get("window", (-1,))[0] < 0 and rng.random() < 0.4:
            prefixes = [rng.randint(0, b - a) for a, b in itertools.pairwise(documents)]
            self.given["prefix_lens"] = prefixes
            seen |= mask_of_prefixes(documents, prefixes)
        seen &= same_document(documents)
        if rng.random() < 0.25:
            lens = torch.tensor([rng.randint(0, total) for _ in range(self.batch)])
            self.given["kv_lens"] = lens.int()
            seen &= at < lens[:, None, None, None]
        self.mask, self.bias = None, None
        if rng.random() < 0.3:
            shape = (
                rng.choice([1, self.batch]),
                rng.choice([1, self.heads]),
                rng.choice([1, total]),
                total,
            )
            explicit = torch.rand(shape) < 0.8
            seen &= explicit
            self.mask = explicit
            if rng.random() < 0.5:
                self.bias = torch.randn(shape)
                self.mask = torch.where(explicit, self.bias, -torch.inf)
        self.seen = seen

    def _draw_scores(self) -> None:
        rng = self.rng
        if rng.random() < 0.25:
            self.given["softcap"] = rng.choice([2.0, 20.0])
        if rng.random() < 0.25:
            self.trained["alibi_slopes"] = torch.rand(self.heads)
        if rng.random() < 0.3:
            self.trained["sinks"] = torch.randn(self.heads)
        if rng.random() < 0.2:
            seed = torch.tensor([rng.randint(0, 99), 1 << 40])
            self.given |= dict(dropout_p=rng.choice([0.1, 0.5]), dropout_seed=seed)
        self.of_mask = self.bias is not None and self.strategy not in NO_MASK_GRADIENT and rng.random() < 0.6  # fmt: skip

    def _draw_shards(self) -> None:
        self.shards = drawn_shards(self.rng, self.total, self.world)
        if self.rng.random() < 0.25:
            documents = self.documents and sorted(set(self.documents))
            self.shards = SequenceShards.balanced(self.total, self.world, cu_seqlens=documents)

    def __str__(self) -> str:
        told = ", ".join(
            (*self.given, *self.trained, *(["attn_mask"] if self.mask is not None else []))
        )
        return (
            f"{self.strategy}, {self.dtype}, {self.batch} x {self.heads}/{self.kv_heads} x {self.total}, "
            f"tokens {self.shards.lengths}: {told}"
        )

    def written_out(self, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """((out, lse, dq, dk, dv), the gradients of slopes, sinks and mask) over the full sequence, by torch."""
        q, k, v = leaves = [x.to(dtype).requires_grad_() for x in (self.q, self.k, self.v)]
        trained = {name: x.double().requires_grad_() for name, x in self.trained.items()}
        if self.bias is not None:
            trained["attn_mask"] = self.bias.double().requires_grad_()
        k, v = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k, v))
        scores = q @ k.mT * (self.given["scale"] or 0.25)
        if cap := self.given.get("softcap"):
            scores = cap * torch.tanh(scores / cap)
        at = torch.arange(self.total)
        if "alibi_slopes" in trained:
            slopes = trained["alibi_slopes"][:, None, None]
            scores = scores - (slopes * (at[:, None] - at).abs()).to(dtype)
        if "attn_mask" in trained:
            scores = scores + trained["attn_mask"].to(dtype)
        scores = scores.masked_fill(~self.seen, -math.inf)
        if "sinks" in trained:
            sinks = trained["sinks"].to(dtype)[:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], -1)
        empty = (scores == -math.inf).all(-1, keepdim=True)
        scores = scores.masked_fill(empty, 0.0)
        weights = scores.softmax(-1)[..., : self.total].masked_fill(empty, 0.0)
        if self.given.get("dropout_p"):
            dropout = Dropout(self.given["dropout_p"], self.given["dropout_seed"])
            kept = kept_weights(dropout, at[None], at[None], self.batch, self.heads)
            weights = weights * (kept * dropout.factor).to(dtype)
        out, lse = weights @ v, scores.double().logsumexp(-1)
        loss = (out.double() * self.dout.double()).sum()
        loss = loss + (lse * self.dlse.double()).masked_fill(empty[..., 0], 0.0).sum()
        grads = torch.autograd.grad(loss, [*leaves, *trained.values()], allow_unused=True)
        self.names = tuple(trained)
        lse = lse.masked_fill(empty[..., 0], -math.inf)
        return [x.detach() for x in (out, lse, *grads[:3])], list(grads[3:])

    def over_ranks(self, device: torch.device) -> tuple[list[Tensor], dict[str, Tensor]]:
        """This rank's (out, lse, dq, dk, dv), and its parts of the gradients of what is trained."""
        rank = dist.get_rank()
        leaves = [self.shards.shard(x, rank, 2).to(device) for x in (self.q, self.k, self.v)]
        if self.strategy == "query_split":
            leaves[1:] = [x.to(device) for x in (self.k, self.v)]
        leaves = [x.clone().requires_grad_() for x in leaves]
        trained = {name: x.to(device).clone().requires_grad_() for name, x in self.trained.items()}
        if self.mask is not None:
            mask = self.mask if self.mask.shape[2] == 1 else self.shards.shard(self.mask, rank, 2)
            trained["attn_mask"] = mask.to(device).clone().requires_grad_(self.of_mask)
        given = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in self.given.items()}
        out, lse = ring_attention(
            *leaves, None, shards=self.shards, strategy=self.strategy, hierarchy=self.hierarchy, **given, **trained,
        )  # fmt: skip
        douts = [self.shards.shard(x, rank, 2).to(device) for x in (self.dout, self.dlse)]
        wanted = {name: x for name, x in trained.items() if x.requires_grad}
        grads = torch.autograd.grad((out, lse), [*leaves, *wanted.values()], douts)
        return [x.detach() for x in (out, lse, *grads[:3])], dict(
            zip(wanted, grads[3:], strict=True)
        )

    def check(self, device: torch.device) -> None:
        """Raises AssertionError where something is wrong, after the last collective."""
        rank = dist.get_rank()
        found, of_trained = self.over_ranks(device)
        whole = 3 if self.strategy == "query_split" else 5
        found = [joined(self.shards, x) if i < whole else x for i, x in enumerate(found)]
        for name, value in of_trained.items():
            if name != "attn_mask" or self.bias.shape[2] == 1:
                dist.all_reduce(value)
        exact, exact_trained = self.written_out(torch.float64)
        pairs = [*zip(NAMES, (x.cpu() for x in found), exact, strict=True)]
        if self.dtype == torch.float32:
            gradient = max(1e-3, *(max_abs(x) for x in exact[2:]))
            for i, (name, value, right) in enumerate(pairs):
                assert_near(name, value, right, gradient if i >= 2 else max(max_abs(right), 1e-3))
            for name, right in zip(self.names, exact_trained, strict=True):
                if name not in of_trained:
                    continue
                if name == "attn_mask" and right.shape[2] != 1:
                    right = self.shards.shard(right, rank, 2)
                largest = max(gradient, max_abs(right))
                assert_near(f"d{name}", of_trained[name].cpu(), right, largest)
            return
        at_dtype = self.written_out(self.dtype)[0]
        factor = 3.0 if "softcap" in self.given else 2.0
        for (name, value, right), other in zip(pairs, at_dtype, strict=True):
            if name == "lse":
                check_lse(value, right, self.dtype)
            else:
                check_close(name, value, right, [other.double() - right], factor=factor)


def group_of(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)


def meshes(device_type: str) -> list[tuple[str, str]]:
    """(inner, outer) group names of every mesh (nodes, ranks of a node) that the ranks make."""
    world, found = dist.get_world_size(), []
    for nodes in range(1, world + 1):
        if world % nodes == 0:
            names = "nodes", "places"
            mesh = init_device_mesh(device_type, (nodes, world // nodes), mesh_dim_names=names)
            found.append(tuple(mesh[name].get_group().group_name for name in reversed(names)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--strategy", choices=(*STRATEGIES, "one_sided"))
    parser.add_argument("--limit-s", type=float, default=math.inf, help="no case begins after it")
    asked = parser.parse_args()
    device = start_group(timedelta(seconds=300))
    hierarchies, counted, wrong = meshes(device.type), Counter(), 0
    start = time.monotonic()
    for seed in range(asked.first, asked.first + asked.count):
        case, said = Case(seed, asked.strategy, hierarchies), None
        try:
            case.check(device)
        except AssertionError as error:
            said = f"rank {dist.get_rank()}: {error}"
        texts: list = [None] * case.world
        dist.all_gather_object(texts, said)
        late = [time.monotonic() - start > asked.limit_s]  # by rank 0's clock
        dist.broadcast_object_list(late)
        counted[case.strategy] += 1
        if any(texts):
            wrong += 1
            if dist.get_rank() == 0:
                print(f"seed {seed}, {case}:\n  " + "\n  ".join(filter(None, texts)), flush=True)
        if late[0]:
            break
    if dist.get_rank() == 0:
        of = ", ".join(f"{n} {name}" for name, n in sorted(counted.items()))
        print(
            f"{sum(counted.values())} cases on {dist.get_world_size()} ranks, {wrong} wrong: {of}",
            flush=True,
        )
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
