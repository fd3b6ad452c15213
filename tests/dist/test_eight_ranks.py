"""Eight ranks, as a host of users has GPUs: every strategy by the error rule, shards even, uneven and empty; drawn cases of
`invariant_block`, which have the bits of one rank.

    torchrun --nproc-per-node 8 -m pytest tests/dist/test_eight_ranks.py

TRITON_INTERPRET=1 runs the one-sided strategies of decode and ring attention on CPUs, and these alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.dist import test_rank_invariant
from tests.dist.dense_layers import DIM, HIDDEN, config, dense_attention, dense_mlp
from tests.dist.parts import parameter_part, rank_part
from tests.dist.test_decode_strategies import by
from tests.dist.test_ring_attention import joined, run
from tests.dist.test_strategies import call, same_everywhere
from torch_fdattn.dist import TPMLP, SequenceShards, TPAttention, set_timeout
from torch_fdattn.dist.decode.op import ONE_SIDED, PORTABLE
from torch_fdattn.dist.tensor_parallel.head_sharding import shard_heads
from torch_fdattn.dist.tensor_parallel.layers import STRATEGIES, TokenRows
from torch_fdattn.models.rope import Rotary
from torch_fdattn.ops.library import INTERPRET
from torch_fdattn.testing import AttentionCase, check_close, expected_attention

RANKS, TOTAL = 8, 61
#: Positions of each rank; in the last one every other rank has none, the first and the last among them.
SHARDS = {
    "even": [8, 8, 8, 8, 8, 7, 7, 7],
    "uneven": [1, 20, 3, 7, 2, 17, 5, 6],
    "empty": [0, 24, 0, 13, 11, 0, 13, 0],
}
RING = ("ring", "all_gather", "ulysses", "query_split", "star", "ulysses_ring")
DTYPES = [torch.float32, torch.float16]  # the interpreter has no bfloat16
#: (query heads, KV heads): one KV head a rank, and each of four kept by two ranks.
HEADS = [(16, 8), (8, 4)]
#: Of the dense layer's own error in fp32 (`torch_fdattn/testing/errors.py` says why several).
SAMPLES = 8

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _eight(group: str) -> None:
    if dist.get_world_size() != RANKS:
        pytest.skip("needs 8 ranks")


@pytest.fixture
def kernels(rank_device: torch.device) -> Iterator[None]:
    """Eight busy processes share few processors: a rank may be late by more than the usual limit."""
    if rank_device.type == "cpu" and not INTERPRET:
        pytest.skip("tests a kernel: needs a CUDA device or TRITON_INTERPRET=1")
    set_timeout(90)
    yield
    set_timeout(10)


def check_decode(group, device, shards: list[int], dtype: torch.dtype, **options) -> None:
    """Two sequences, the second one's keys on few ranks; the same bits on all ranks."""
    case = AttentionCase(
        5, 2, 6, 2, 3, TOTAL, 32, dtype, 16, causal=True, window=(40, 0), kv_lens=(TOTAL, 9)
    )
    q, k, v = case.inputs(device)
    begin, end = sum(shards[: dist.get_rank()]), sum(shards[: dist.get_rank() + 1])
    lens = torch.tensor(case.kv_lens, dtype=torch.int32, device=device)
    out, lse = call(
        options.pop("strategy"), q, k[:, :, begin:end], v[:, :, begin:end], lens, group,
        kv_start=torch.full_like(lens, begin), causal=True, window=case.window, **options,
    )  # fmt: skip
    same_everywhere((out, lse), head_sharded=False)
    expected_attention(case, "cpu", backward=False).check(lse.cpu(), out=out.cpu())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shards", SHARDS.values(), ids=SHARDS)
@pytest.mark.parametrize("strategy", PORTABLE)
def test_decode(group, rank_device, hierarchies, strategy, shards, dtype) -> None:
    draws = len(hierarchies) if strategy == "hierarchical" else 1
    for draw in range(draws):
        check_decode(group, rank_device, shards, dtype, **by(strategy, hierarchies, draw))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shards", SHARDS.values(), ids=SHARDS)
@pytest.mark.parametrize("strategy", ONE_SIDED)
def test_decode_one_sided(group, rank_device, kernels, strategy, shards, dtype) -> None:
    check_decode(group, rank_device, shards, dtype, strategy=strategy)


def check_ring(group, device, shards: SequenceShards, dtype, strategy: str, **options) -> None:
    """out, lse and the gradients of q, k and v."""
    heads = 16 if strategy.startswith("ulysses") else 2
    case = AttentionCase(3, 1, heads, heads // 2, TOTAL, TOTAL, 32, dtype, 16, causal=True)
    whole, douts = case.inputs(device), case.output_gradients(device)
    out, lse, *grads = run(group, shards, whole, douts, strategy, causal=True, **options)
    results = dict(zip(("out", "lse", "dq"), (joined(shards, x) for x in (out, lse, grads[0])), strict=True))  # fmt: skip
    # With query_split every rank already holds the whole gradients of K and V.
    parts = grads[1:] if strategy == "query_split" else [joined(shards, x) for x in grads[1:]]
    results |= dict(zip(("dk", "dv"), parts, strict=True))
    found = {name: x.detach().cpu() for name, x in results.items()}
    expected_attention(case, "cpu").check(found.pop("lse"), **found)


def ring_shards() -> dict[str, SequenceShards]:
    every = {name: SequenceShards.from_lengths(lengths) for name, lengths in SHARDS.items()}
    return {"zigzag": SequenceShards.zigzag(TOTAL, RANKS), **every}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shards", ring_shards().values(), ids=ring_shards())
@pytest.mark.parametrize("strategy", RING)
def test_ring(group, rank_device, hierarchies, strategy, shards, dtype) -> None:
    options = {"hierarchy": hierarchies[1]} if strategy == "ulysses_ring" else {}  # 2 x 4
    check_ring(group, rank_device, shards, dtype, strategy, **options)


@pytest.mark.parametrize(("shards", "dtype"), [("zigzag", DTYPES[0]), ("empty", DTYPES[1])])
def test_ring_one_sided(group, rank_device, kernels, shards, dtype) -> None:
    check_ring(group, rank_device, ring_shards()[shards], dtype, "one_sided")


alone = test_rank_invariant.alone


@pytest.mark.parametrize("seed", range(100, 104))
@pytest.mark.parametrize("strategy", test_rank_invariant.INVARIANT)
def test_same_bits_of_ring_attention(
    group, alone, rank_device, hierarchies, strategy, seed
) -> None:
    test_rank_invariant.check_ring(group, alone, rank_device, hierarchies, seed, strategy)


@pytest.mark.parametrize("seed", range(100, 106))
def test_same_bits_of_decode(group, alone, rank_device, seed) -> None:
    test_rank_invariant.check_decode(group, alone, rank_device, seed)


class Layers(nn.Module):
    """Attention and MLP with their residuals, dense or tensor-parallel."""

    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(x, cos, sin, None)
        return x + self.mlp(x)


def results(layers: nn.Module, x: Tensor, turns, dy: Tensor) -> dict[str, Tensor]:
    """y and the gradients of x and of every parameter."""
    x = x.detach().clone().requires_grad_()
    layers.zero_grad()
    y = layers(x, *turns)
    y.backward(dy)
    parameters = {name: p.grad.clone() for name, p in layers.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **parameters}


@pytest.mark.parametrize("tokens", [14, 5], ids=["uneven", "empty"])
@pytest.mark.parametrize("heads", HEADS, ids=["8 KV heads", "4 KV heads"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_tensor_parallel(group, rank_device, strategy, heads, tokens) -> None:
    """With 5 tokens three ranks have none of them."""
    ours = config(*heads)
    attention, mlp = (layer.to(rank_device) for layer in (dense_attention(ours, "ours"), dense_mlp(ours, "ours")))  # fmt: skip
    dense, spread = Layers(attention, mlp), TokenRows()
    spread.rows = [len(rows) for rows in torch.arange(tokens).tensor_split(RANKS)]
    parallel = Layers(
        TPAttention.from_module(copy.deepcopy(attention), group, strategy, tokens=spread),
        TPMLP.from_module(copy.deepcopy(mlp), group, strategy, tokens=spread),
    )
    rank = dist.get_rank()
    assert parallel.attention.kv_heads == 1
    assert shard_heads(*heads, rank, RANKS).replicated == (heads[1] < RANKS)
    turns = Rotary(ours).to(rank_device)(torch.arange(tokens, device=rank_device)[None])
    precise, precise_turns = copy.deepcopy(dense).double(), [x.double() for x in turns]
    inputs = torch.randn(SAMPLES, 2, 1, tokens, HIDDEN, device=rank_device)

    def local(x: Tensor) -> Tensor:
        return rank_part(x.flatten(0, -2)) if strategy == "ag_rs" else x

    found = results(parallel, local(inputs[0, 0]), turns, local(inputs[0, 1]))
    errors: dict[str, list[Tensor]] = {name: [] for name in found}
    for x, dy in reversed(inputs):  # what stays is exact for the first
        exact = results(precise, x.double(), precise_turns, dy.double())
        for name, value in results(dense, x, turns, dy).items():
            errors[name].append(value.double() - exact[name])
    for name, value in found.items():
        right, samples = exact[name], errors[name]
        if name in ("y", "x"):
            right, *samples = (local(each) for each in (right, *samples))
        else:
            right, *samples = (parameter_part(name, each, *heads, DIM) for each in (right, *samples))  # fmt: skip
        if not right.numel():
            assert value.shape == right.shape
            continue
        right, value, *samples = (each.reshape(-1, each.shape[-1]) for each in (right, value, *samples))  # fmt: skip
        check_close(name, value, right, samples)
