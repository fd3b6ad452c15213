"""Tensor-parallel MLP, attention and head against the dense modules that they replace."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from tests.dist.dense_layers import DIM, HIDDEN, config, dense_attention, dense_mlp, for_ranks
from tests.dist.parts import assert_near, assert_same_gradients, randomise, rank_part
from tests.pairwise import pairwise
from torch_fdattn.dist import TPMLP, TPAttention
from torch_fdattn.dist.tensor_parallel.head_sharding import shard_heads
from torch_fdattn.dist.tensor_parallel.layers import STRATEGIES, TokenRows, TPHead
from torch_fdattn.models.inference import FusedBlock
from torch_fdattn.models.rope import Rotary
from torch_fdattn.models.transformer import Block

BATCH, LENGTH = 2, 7  # 14 tokens: uneven on 3 and 4 ranks
TOKENS = BATCH * LENGTH
HEADS = for_ranks([(9, 3), (4, 4), (8, 1), (6, 2)])


def uneven_tokens(tokens: int = TOKENS) -> TokenRows:
    spread = TokenRows()
    spread.rows = [len(part) for part in torch.arange(tokens).tensor_split(dist.get_world_size())]
    return spread


def causal_mask(device) -> Tensor:
    hidden = torch.ones(LENGTH, LENGTH, device=device).triu(1).bool()
    return torch.zeros(1, 1, LENGTH, LENGTH, device=device).masked_fill(hidden, float("-inf"))


def angles(device) -> tuple[Tensor, Tensor]:
    """cos and sin; the same for every head count."""
    return Rotary(config()).to(device)(torch.arange(LENGTH, device=device)[None])


def run(module: nn.Module, library: str, x: Tensor, turns: tuple, mask=None) -> Tensor:
    """An attention layer of either library, with the `angles`."""
    cos, sin = turns
    if library == "ours":
        return module(x, cos, sin, None)
    doubled = tuple(torch.cat([angle, angle], -1)[:, 0] for angle in (cos, sin))
    return module(x, position_embeddings=doubled, attention_mask=mask)[0]


def compare(dense, parallel, run_dense, run_parallel, strategy: str, heads, device) -> None:
    """Outputs, the gradient of x and those of all parameters."""
    x, factor = (torch.randn(BATCH, LENGTH, HIDDEN).to(device) for _ in range(2))
    one = x.clone().requires_grad_()
    expected = run_dense(dense, one)
    (expected.sin() * factor).sum().backward()
    if strategy == "ag_rs":

        def local(y: Tensor) -> Tensor:
            return rank_part(y.flatten(0, 1))
    else:

        def local(y: Tensor) -> Tensor:
            return y

    ours = local(x).clone().requires_grad_()
    y = run_parallel(parallel, ours)
    assert_near(y, local(expected))
    (y.sin() * local(factor)).sum().backward()
    assert_near(ours.grad, local(one.grad))
    assert_same_gradients(parallel, dense, *heads)


@pytest.mark.parametrize(
    ("library", "options"),
    [
        ("ours", dict()),
        ("ours", dict(inner=2, mlp_bias=True)),  # fewer inner features than ranks
        ("transformers", dict(architecture="llama", mlp_bias=True)),
        ("transformers", dict(inner=32)),
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mlp(group, rank_device, strategy: str, library: str, options: dict) -> None:
    dense = dense_mlp(config(**options), library).to(rank_device)
    parallel = TPMLP.from_module(dense, group, strategy, tokens=uneven_tokens())
    compare(dense, parallel, *[lambda mlp, x: mlp(x)] * 2, strategy, (8, 8, DIM), rank_device)


@pairwise(
    strategy=STRATEGIES,
    heads=HEADS,
    architecture=["llama", "qwen3"],
    library=["ours", "transformers"],
)
def test_attention(group, rank_device, strategy, heads, architecture, library) -> None:
    ours = config(*heads, architecture=architecture, attention_bias=heads != (4, 4))
    dense = dense_attention(ours, library).to(rank_device)
    parallel = TPAttention.from_module(dense, group, strategy, tokens=uneven_tokens())
    shard = shard_heads(*heads, dist.get_rank(), dist.get_world_size())
    assert (parallel.heads, parallel.kv_heads) == (shard.q_heads, shard.kv_heads)
    turns = angles(rank_device)
    mask = causal_mask(rank_device)  # transformers' eager attention knows no other causality

    def run_dense(attention: nn.Module, x: Tensor) -> Tensor:
        return run(attention, library, x, turns, mask)

    def run_parallel(attention: nn.Module, x: Tensor) -> Tensor:
        return run(attention, library, x, turns)

    compare(dense, parallel, run_dense, run_parallel, strategy, (*heads, DIM), rank_device)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_attention_with_a_mask(group, rank_device, strategy: str) -> None:
    """transformers' masks, as for padded batches."""
    ours = config(8, 2)
    dense = dense_attention(ours, "transformers").to(rank_device)
    parallel = TPAttention.from_module(dense, group, strategy, tokens=uneven_tokens())
    turns = angles(rank_device)
    mask = causal_mask(rank_device).repeat(BATCH, 1, 1, 1)
    mask[1, :, 2:, :2] = float("-inf")

    def both(attention: nn.Module, x: Tensor) -> Tensor:
        return run(attention, "transformers", x, turns, mask)

    compare(dense, parallel, both, both, strategy, (8, 2, DIM), rank_device)


def test_parameters_that_move(group, rank_device, mesh) -> None:
    """To another dtype, as DTensors too (FSDP makes them of a layer's parameters), and to other memory."""
    layer = TPMLP.from_module(dense_mlp(config(), "ours").to(rank_device), group, "all_reduce")
    whole = layer.gate_proj.weight.detach().clone()
    layer.gate_proj.weight = nn.Parameter(
        DTensor.from_local(layer.gate_proj.weight.detach(), mesh, [Shard(0)])
    )
    layer.double()
    assert type(layer.gate_proj.weight) is DTensor
    assert torch.equal(layer.gate_proj.weight.to_local(), whole.double())
    shared = copy.deepcopy(layer.up_proj).cpu().share_memory()
    assert shared.weight.is_shared()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_half_precision(group, rank_device, strategy: str) -> None:
    """Within the roundings of a bfloat16 layer and of its sum over ranks."""
    ours = config()
    exact_mlp, exact_attention = dense_mlp(ours, "ours"), dense_attention(ours, "ours")
    mlp, attention = (copy.deepcopy(m).bfloat16() for m in (exact_mlp, exact_attention))
    mlp, attention = mlp.to(rank_device), attention.to(rank_device)
    x = torch.randn(BATCH, LENGTH, HIDDEN).bfloat16().to(rank_device)
    local = rank_part(x.flatten(0, 1)) if strategy == "ag_rs" else x
    tokens, turns = uneven_tokens(), angles(rank_device)
    for dense, parallel, call in (
        (mlp, TPMLP.from_module(mlp, group, strategy, tokens=tokens), lambda m, x: m(x)),
        (
            attention,
            TPAttention.from_module(attention, group, strategy, tokens=tokens),
            lambda m, x: run(m, "ours", x, turns),
        ),
    ):
        expected = call(copy.deepcopy(dense).float(), x.float())
        expected = rank_part(expected.flatten(0, 1)) if strategy == "ag_rs" else expected
        assert_near(call(parallel, local), expected, 2e-2)


@pytest.mark.parametrize(
    ("strategy", "backend"),
    [
        # Inductor compiles the graph that "aot_eager" runs.
        pytest.param("ag_rs", "aot_eager", marks=pytest.mark.slow),
        ("all_reduce", "aot_eager"),
        ("ag_rs", "inductor"),
    ],
)
def test_compiles_whole(group, rank_device, strategy: str, backend: str) -> None:
    torch._dynamo.reset()
    ours = config(9, 3, attention_bias=True, mlp_bias=True)
    tokens, turns = uneven_tokens(), angles(rank_device)
    mlp, attention = dense_mlp(ours, "ours"), dense_attention(ours, "ours")
    dense = nn.ModuleList([attention, mlp]).to(rank_device)
    parallel = nn.ModuleList(
        [
            TPAttention.from_module(attention, group, strategy, tokens=tokens),
            TPMLP.from_module(mlp, group, strategy, tokens=tokens),
        ]
    )

    def block(layers: nn.ModuleList, x: Tensor) -> Tensor:
        x = x + run(layers[0], "ours", x, turns)
        return x + layers[1](x)

    compiled = torch.compile(block, backend=backend, fullgraph=True)
    compare(dense, parallel, block, compiled, strategy, (9, 3, DIM), rank_device)


def test_frozen_parameters_take_their_hooks_when_thawed(group, rank_device) -> None:
    dense = dense_attention(config(8, 1, attention_bias=True), "ours").to(rank_device)
    dense.requires_grad_(False)
    parallel = TPAttention.from_module(dense, group, "ag_rs", tokens=uneven_tokens())
    assert not any(parameter.requires_grad for parameter in parallel.parameters())
    dense.requires_grad_(True)
    parallel.requires_grad_(True)
    turns = angles(rank_device)
    both = [lambda attention, x: run(attention, "ours", x, turns)] * 2
    compare(dense, parallel, *both, "ag_rs", (8, 1, DIM), rank_device)


def test_slices_do_not_keep_the_dense_weights(group, rank_device) -> None:
    dense = dense_mlp(config(), "ours").to(rank_device)
    parallel = TPMLP.from_module(dense, group, "all_reduce")
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in parallel.parameters()}
    held = sum(storage.nbytes() for storage in storages.values())
    assert held == 4 * sum(x.numel() for x in parallel.parameters())


def test_equal_rows_need_not_be_told(group, rank_device) -> None:
    dense = dense_mlp(config(), "ours").to(rank_device)
    x = torch.randn(4 * dist.get_world_size(), HIDDEN).to(rank_device)
    parallel = TPMLP.from_module(dense, group, "ag_rs")
    assert_near(parallel(rank_part(x)), rank_part(dense(x)))


@pytest.mark.parametrize("vocab", [11, 12, 3])
def test_head(group, rank_device, vocab: int) -> None:
    dense = randomise(nn.Linear(HIDDEN, vocab, bias=False)).to(rank_device)
    parallel = TPHead(dense, group)
    x = torch.randn(BATCH, LENGTH, HIDDEN).to(rank_device)
    one, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, logits = dense(one), parallel(ours)
    assert_near(logits, expected)
    targets = torch.randint(vocab, (BATCH * LENGTH,), device=rank_device)
    for y in (logits, expected):
        F.cross_entropy(y.flatten(0, 1), targets).backward()
    assert_near(ours.grad, one.grad)
    assert_near(parallel.weight.grad, rank_part(dense.weight.grad))


class TestBadInput:
    """Every wrong call raises on every rank, before any collective."""

    @pytest.mark.parametrize(
        ("strategy", "method", "error", "message"),
        [
            ("fast", "nccl", ValueError, r"strategy must be one of \('auto', 'ag_rs', 'all_reduce'\), got 'fast'"),
            ("all_reduce", "ring", ValueError, "allreduce_method must be one of .* got 'ring'"),
            ("all_reduce", "two_shot_multimem", NotImplementedError, "allreduce_method .* needs NVLink multicast"),
        ],
    )  # fmt: skip
    def test_options(self, group, strategy, method, error, message) -> None:
        with pytest.raises(error, match=message):
            TPMLP.from_module(dense_mlp(config(), "ours"), group, strategy, method)
        with pytest.raises(error, match=message):
            TPAttention.from_module(dense_attention(config(), "ours"), group, strategy, method)

    def test_unknown_group(self) -> None:
        with pytest.raises(ValueError, match="group must name a process group"):
            TPMLP.from_module(dense_mlp(config(), "ours"), "nosuch", "ag_rs")

    def test_activation(self, group) -> None:
        mlp = dense_mlp(config(), "ours")
        mlp.act_fn = nn.GELU()
        with pytest.raises(ValueError, match="module's activation must be SiLU, got GELU"):
            TPMLP.from_module(mlp, group, "ag_rs")

    def test_layers_that_are_not_linear(self, group) -> None:
        mlp = dense_mlp(config(), "ours")
        mlp.up_proj = nn.Identity()
        with pytest.raises(
            TypeError, match=r"must have an nn.Linear 'up_proj', got Identity in MLP"
        ):
            TPMLP.from_module(mlp, group, "ag_rs")
        with pytest.raises(
            TypeError, match=r"must have an nn.Linear 'q_proj', got NoneType in MLP"
        ):
            TPAttention.from_module(mlp, group, "ag_rs")

    @pytest.mark.parametrize(
        ("name", "value"), [("sliding_window", 8), ("attention_dropout", 0.1), ("is_causal", False)]
    )
    def test_attention_that_is_not_plain(self, group, name: str, value: object) -> None:
        attention = dense_attention(config(), "ours")
        setattr(attention, name, value)
        with pytest.raises(ValueError, match=f"module's {name} must be .*, got {value}"):
            TPAttention.from_module(attention, group, "ag_rs")

    def test_more_ranks_than_heads(self, group) -> None:
        if dist.get_world_size() == 1:
            pytest.skip("needs 2 ranks")
        with pytest.raises(ValueError, match="heads must be at least the number of ranks"):
            TPAttention.from_module(dense_attention(config(1, 1), "ours"), group, "ag_rs")

    def test_broken_sequences(self, group, rank_device) -> None:
        ours = config()
        attention = dense_attention(ours, "ours").to(rank_device)
        parallel = TPAttention.from_module(attention, group, "all_reduce")
        x = torch.randn(1, LENGTH + 1, HIDDEN, device=rank_device)
        with pytest.raises(
            ValueError, match="x must hold whole sequences of 7 tokens like cos, got 8"
        ):
            run(parallel, "ours", x, angles(rank_device))

    def test_masks_that_are_no_tensor(self, group, rank_device) -> None:
        attention = dense_attention(config(), "transformers").to(rank_device)
        parallel = TPAttention.from_module(attention, group, "all_reduce")
        x = torch.randn(1, LENGTH, HIDDEN, device=rank_device)
        with pytest.raises(TypeError, match=r"attention_mask must be None or a tensor .* got dict"):
            run(parallel, "transformers", x, angles(rank_device), {})


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fused", [False, True])
def test_in_a_block(group, rank_device, strategy: str, fused: bool) -> None:
    """The plain block, whose norms run with their hooks, and the fused one, which adds and norms in one op."""
    dense = randomise(Block(config(), 0)).to(rank_device)
    parallel, tokens, seen = copy.deepcopy(dense), uneven_tokens(), []
    parallel.self_attn = TPAttention.from_module(dense.self_attn, group, strategy, tokens=tokens)
    parallel.mlp = TPMLP.from_module(dense.mlp, group, strategy, tokens=tokens)
    parallel.post_attention_layernorm.register_forward_hook(lambda *_: seen.append(1))
    x = torch.randn(BATCH, LENGTH, HIDDEN).to(rank_device)
    own = rank_part(x.flatten(0, 1)) if strategy == "ag_rs" else x
    turns, last = angles(rank_device), nn.RMSNorm(HIDDEN, 1e-5).to(rank_device)
    expected = dense(x, *turns, None)
    expected = rank_part(expected.flatten(0, 1)) if strategy == "ag_rs" else expected
    if not fused:
        assert_near(parallel(own, *turns, None), expected)
        assert seen == [1]
        return
    block = FusedBlock(parallel)
    with torch.no_grad():
        y, nothing = block(own, *turns, None)
        assert nothing is None
        assert_near(y, expected)
        y, normed = block(own, *turns, None, block.input_layernorm(own), last)
        assert_near(y, expected)
        assert_near(normed, last(expected))
    assert not seen
