"""parallelize() on whole models, ours and transformers', against the model on one process."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests.dist.dense_layers import for_ranks
from tests.dist.parts import assert_near, assert_same_gradients, hf_model, randomise
from tests.pairwise import pairwise
from torch_fdattn.dist import TPMLP, ShardedKVCache
from torch_fdattn.dist.collectives import split_evenly
from torch_fdattn.dist.tensor_parallel import inference as tp_inference
from torch_fdattn.dist.tensor_parallel.auto import LAYER
from torch_fdattn.dist.tensor_parallel.head_sharding import shard_heads
from torch_fdattn.dist.tensor_parallel.inference import FusedTPAttention, FusedTPMLP
from torch_fdattn.dist.tensor_parallel.layers import STRATEGIES, TokenRows
from torch_fdattn.models import InferenceTransformer, ModelConfig, Transformer
from torch_fdattn.models.parallelize import local_kv_heads, parallelize

VOCAB = 37
CASES = {
    "llama": dict(architecture="llama"),
    "llama_tied": dict(architecture="llama", tie_embeddings=True),
    "qwen3": dict(architecture="qwen3"),
    "qwen3_biases": dict(architecture="qwen3", attention_bias=True),
}


def make(device, heads: int = 8, kv_heads: int = 2, layers: int = 2, **options) -> Transformer:
    sizes = dict(vocab_size=VOCAB, hidden_size=48, intermediate_size=45, num_layers=layers)
    shape = dict(num_heads=heads, num_kv_heads=kv_heads, head_dim=16, max_positions=64)
    config = ModelConfig(**{"architecture": "qwen3", **sizes, **shape, **options})
    return randomise(Transformer(config)).to(device)


def tokens_for(device, batch: int = 2, length: int = 7, vocab: int = VOCAB) -> Tensor:
    return torch.randint(vocab, (batch, length)).to(device)


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    out = model(tokens)
    return out if isinstance(out, Tensor) else out.logits


def compare(dense: nn.Module, parallel: nn.Module, tokens: Tensor, heads: tuple) -> None:
    expected, logits = logits_of(dense, tokens), logits_of(parallel, tokens)
    assert_near(logits, expected)
    for y in (expected, logits):
        F.cross_entropy(y[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    assert_same_gradients(parallel, dense, *heads)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ours(group, rank_device, strategy: str, case: str) -> None:
    dense = make(rank_device, **CASES[case])
    parallel = parallelize(copy.deepcopy(dense), group, strategy)
    compare(dense, parallel, tokens_for(rank_device), (8, 2, 16))


@pytest.mark.parametrize("heads", for_ranks([(9, 3), (4, 4), (8, 1)]), ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_head_counts(group, rank_device, strategy: str, heads) -> None:
    dense = make(rank_device, *heads, layers=1)
    parallel = parallelize(copy.deepcopy(dense), group, strategy)
    shard = shard_heads(*heads, dist.get_rank(), dist.get_world_size())
    assert local_kv_heads(parallel) == shard.kv_heads
    assert local_kv_heads(dense) == heads[1]
    compare(dense, parallel, tokens_for(rank_device), (*heads, 16))


def forms_of(parallel: nn.Module) -> list[str]:
    """Filled by forwards: of the first MLP's activations."""
    found: list[str] = []
    mlp = parallel.layers[0].mlp
    mlp.register_forward_pre_hook(lambda module, args: found.append(module.form))
    return found


def test_auto_follows_the_number_of_tokens(group, rank_device, measured) -> None:
    """Inner features that ranks do not share evenly: all of them look up what the first has."""
    dense, most = make(rank_device, 9, 3), split_evenly(45, dist.get_world_size())[0]
    parallel = parallelize(copy.deepcopy(dense), group)
    forms = forms_of(parallel)
    few, many = (tokens_for(rank_device, 2, length) for length in (2, 14))
    with torch.no_grad():
        assert_near(logits_of(parallel, many), logits_of(dense, many))
    measured((LAYER, 48, most, [[4, "all_reduce"], [32, "ag_rs"]]))
    with torch.no_grad():
        for tokens in (few, many, few):
            assert_near(logits_of(parallel, tokens), logits_of(dense, tokens))
    compare(dense, parallel, many, (9, 3, 16))  # with gradients
    assert forms == ["all_reduce", "all_reduce", "ag_rs", "all_reduce", "all_reduce"]


class Checkpointed(nn.Module):
    """A layer, with its hooks, whose forward runs with gradients off and is run again in the backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args) -> Tensor:
        return checkpoint(self.layer, *args, use_reentrant=True)


def test_auto_in_a_reentrant_checkpoint(group, rank_device, measured) -> None:
    dense, tokens = make(rank_device), tokens_for(rank_device)
    measured((LAYER, 48, split_evenly(45, dist.get_world_size())[0], [[14, "ag_rs"]]))
    parallel = parallelize(copy.deepcopy(dense), group)
    for model in (dense, parallel):
        layers = model.layers
        model.layers = nn.ModuleList(Checkpointed(layer) for layer in layers)
        y = logits_of(model, tokens)
        F.cross_entropy(y[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        model.layers = layers
    assert_same_gradients(parallel, dense, 8, 2, 16)


def test_auto_refuses_gradients_of_sharded_rows(group, rank_device) -> None:
    tokens = TokenRows()
    tokens.rows = [1] * dist.get_world_size()
    layer = TPMLP.from_module(make(rank_device).layers[0].mlp, group, "auto", tokens=tokens)
    x = torch.randn(1, 48, device=rank_device)
    with pytest.raises(NotImplementedError, match="strategy 'auto' has gradients for replicated"):
        layer(x)
    with torch.no_grad():
        assert layer(x).shape == x.shape


@pairwise(
    strategy=STRATEGIES,
    case=["llama3_tied", "llama3_biases", "qwen3", "qwen3_tied"],
    implementation=["sdpa", "eager"],
)
def test_transformers(group, rank_device, strategy: str, case: str, implementation: str) -> None:

    dense = hf_model(case)
    dense.set_attn_implementation(implementation)
    dense = dense.to(rank_device)
    parallel = parallelize(copy.deepcopy(dense), group, strategy)
    config = dense.config
    compare(
        dense,
        parallel,
        tokens_for(rank_device, vocab=config.vocab_size),
        (
            config.num_attention_heads,
            config.num_key_value_heads,
            dense.model.layers[0].self_attn.head_dim,
        ),
    )


@torch.no_grad()
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_transformers_generate(group, rank_device, strategy: str) -> None:
    """transformers' own generation with its own cache, also over a padded batch."""

    dense = hf_model("qwen3")
    dense.set_attn_implementation("sdpa")
    dense = dense.to(rank_device)
    parallel = parallelize(copy.deepcopy(dense), group, strategy)
    tokens = tokens_for(rank_device, vocab=dense.config.vocab_size)
    mask = torch.ones_like(tokens)
    for padding in (0, 2):
        mask[0, :padding] = 0
        options = dict(attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
        expected = dense.generate(tokens, **options)
        assert torch.equal(parallel.generate(tokens, **options), expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_transformers_cache_by_either_name(group, rank_device, name: str) -> None:
    from transformers import DynamicCache

    dense = hf_model("qwen3").to(rank_device)
    layer = parallelize(dense, group, "all_reduce").model.layers[0].self_attn
    x = torch.randn(2, 5, dense.config.hidden_size).to(rank_device)
    angles = dense.model.rotary_emb(x, torch.arange(5, device=rank_device)[None])
    whole, _ = layer(x, angles)
    cache = DynamicCache(config=dense.config)
    for part in (slice(0, 3), slice(3, 5)):
        turns = tuple(y[:, part] for y in angles)
        out, _ = layer(x[:, part], turns, **{name: cache})
        assert_near(out, whole[:, part])


def greedy(model: Transformer, cache: ShardedKVCache, tokens: Tensor, steps: int = 10) -> Tensor:
    written = []
    for _ in range(steps):
        tokens = model(tokens, cache, last_only=True).argmax(-1)
        written.append(tokens)
    return torch.cat(written, 1)


def cache_of(model: Transformer, device, batch: int, **options) -> ShardedKVCache:
    config = model.config
    return ShardedKVCache(
        config.num_layers, batch, local_kv_heads(model), 24, config.head_dim,
        dtype=torch.float32, device=device, **options,
    )  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 2, 5])  # with ag_rs some ranks have no row when decoding
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_greedy_tokens_with_a_cache(group, rank_device, strategy: str, batch: int) -> None:
    dense = make(rank_device, 9, 3)
    parallel = parallelize(copy.deepcopy(dense), group, strategy)
    tokens = tokens_for(rank_device, batch)
    expected = greedy(dense, cache_of(dense, rank_device, batch), tokens)
    assert torch.equal(greedy(parallel, cache_of(parallel, rank_device, batch), tokens), expected)


@torch.no_grad()
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_dimensional_mesh(group, rank_device, strategy: str) -> None:
    """Heads over one dimension, the cache's positions over the other."""
    if dist.get_world_size() != 4:
        pytest.skip("needs 4 ranks")
    mesh = init_device_mesh(rank_device.type, (2, 2), mesh_dim_names=("tp", "kv"))
    dense = make(rank_device, 9, 3)
    with pytest.raises(
        ValueError, match=r"mesh must be a DeviceMesh of one dimension .*, got 2 dimensions: tp, kv"
    ):
        parallelize(dense, mesh, strategy)
    parallel = parallelize(copy.deepcopy(dense), mesh["tp"], strategy)
    tokens = tokens_for(rank_device)
    expected = greedy(dense, cache_of(dense, rank_device, 2), tokens)
    kv_group = mesh["kv"].get_group().group_name
    cache = cache_of(parallel, rank_device, 2, group=kv_group, kv_block=3)
    assert torch.equal(greedy(parallel, cache, tokens), expected)


@pytest.mark.parametrize(
    "strategy", [STRATEGIES[0], *(pytest.param(x, marks=pytest.mark.slow) for x in STRATEGIES[1:])]
)
def test_compiles_whole(group, rank_device, strategy: str) -> None:
    torch._dynamo.reset()
    dense = make(rank_device, layers=1)
    parallel = parallelize(copy.deepcopy(dense), group, strategy)
    compiled = torch.compile(parallel, backend="aot_eager", fullgraph=True, dynamic=False)
    for length in (7, 6):
        dense.zero_grad()
        parallel.zero_grad()
        tokens = tokens_for(rank_device, length=length)
        expected, logits = dense(tokens), compiled(tokens)
        assert_near(logits, expected)
        for y in (expected, logits):
            y.sin().sum().backward()
        assert_same_gradients(parallel, dense, 8, 2, 16)


def test_takes_a_mesh(rank_device, mesh) -> None:
    dense = make(rank_device, layers=1)
    parallel = parallelize(copy.deepcopy(dense), mesh)
    compare(dense, parallel, tokens_for(rank_device), (8, 2, 16))


class TestBadInput:
    """Every wrong call raises on every rank, before any communication, and leaves the model as it was."""

    @pytest.mark.parametrize(
        ("wrong", "error", "message"),
        [
            (dict(mesh=3), TypeError, "mesh must be a process group, its name or a DeviceMesh of one dimension, got int"),
            (dict(mesh="nosuch"), ValueError, "mesh must name a process group"),
            (dict(strategy="rows"), ValueError, "strategy must be one of .* got 'rows'"),
            (dict(allreduce_method="x"), ValueError, "allreduce_method must be one of .* got 'x'"),
            (dict(linear_strategy="x"), ValueError, "linear_strategy must be one of .* got 'x'"),
            (dict(model=nn.Linear(2, 2)), TypeError, "model must be a torch_fdattn Transformer .* got Linear"),
        ],
    )  # fmt: skip
    def test_options(self, group, wrong, error, message) -> None:
        with pytest.raises(error, match=message):
            parallelize(**{**dict(model=make("cpu"), mesh=group), **wrong})

    def test_a_bad_last_layer(self, group) -> None:
        model = make("cpu")
        model.layers[-1].mlp.act_fn = nn.ReLU()
        with pytest.raises(ValueError, match="module's activation must be SiLU, got ReLU"):
            parallelize(model, group)
        assert type(model.layers[0].mlp).__name__ == "MLP"

    def test_an_attention_of_another_kind(self, group) -> None:
        """With the same parts: Ernie turns neighbouring dims, as no Llama does."""
        from transformers import Ernie4_5Config, Ernie4_5ForCausalLM

        sizes = dict(
            hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2
        )
        model = Ernie4_5ForCausalLM(Ernie4_5Config(vocab_size=64, num_hidden_layers=1, **sizes))
        with pytest.raises(
            TypeError, match=r"module must be the attention of .* got .*Ernie4_5Attention"
        ):
            parallelize(model, group)

    def test_no_tokens(self, group) -> None:
        model = parallelize(make("cpu"), group, "ag_rs")
        with pytest.raises(
            ValueError, match=r"tokens must have at least one position, got shape \(1, 0\)"
        ):
            model(torch.zeros(1, 0, dtype=torch.long))

    def test_twice(self, group) -> None:
        model = parallelize(make("cpu"), group)
        with pytest.raises(ValueError, match="model must not be parallelised already"):
            parallelize(model, group)

    def test_too_many_ranks(self, group) -> None:
        if dist.get_world_size() == 1:
            pytest.skip("needs 2 ranks")
        with pytest.raises(ValueError, match="heads must be at least the number of ranks"):
            parallelize(make("cpu", 1, 1), group)


@torch.no_grad()
@pairwise(strategy=STRATEGIES, case=CASES, order=["parallel first", "fused first", "fused layers"])
def test_inference_form(group, rank_device, strategy: str, case: str, order: str) -> None:
    """Of the parallel model, of the model that is then split, and of its layers alone."""
    dense, tokens = make(rank_device, 9, 3, **CASES[case]), tokens_for(rank_device)
    model = copy.deepcopy(dense)
    if order == "fused first":
        parallel = parallelize(model.for_inference(), group, strategy)
        expected = logits_of(model, tokens)  # which is as it was
        assert_near(expected, logits_of(dense, tokens))
    else:
        parallel = parallelize(model, group, strategy, fused=order == "fused layers")
        if order == "parallel first":
            parallel = parallel.for_inference()
    is_inference = order != "fused layers"
    assert type(parallel) is (InferenceTransformer if is_inference else Transformer)
    for layer in parallel.layers:
        assert type(layer.self_attn) is FusedTPAttention
        assert type(layer.mlp) is FusedTPMLP
    assert_near(logits_of(parallel, tokens), logits_of(dense, tokens))
    assert local_kv_heads(parallel) == parallel.layers[0].self_attn.kv_heads
    expected = greedy(dense, cache_of(dense, rank_device, 2), tokens)
    assert torch.equal(greedy(parallel, cache_of(parallel, rank_device, 2), tokens), expected)
    with pytest.raises(ValueError, match="model must not be parallelised already"):
        parallelize(parallel, group)


@torch.no_grad()
def test_inference_form_follows_the_number_of_tokens(group, rank_device, measured) -> None:
    dense, most = make(rank_device, 9, 3), split_evenly(45, dist.get_world_size())[0]
    measured((LAYER, 48, most, [[4, "all_reduce"], [32, "ag_rs"]]))
    parallel = parallelize(dense.for_inference(), group)
    few, many = (tokens_for(rank_device, 2, length) for length in (2, 14))
    for tokens, form in ((few, "all_reduce"), (many, "ag_rs"), (few, "all_reduce")):
        assert_near(logits_of(parallel, tokens), logits_of(dense, tokens))
        assert parallel.layers[0].mlp.form == form


@torch.no_grad()
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fused_layers_in_transformers(group, rank_device, strategy: str) -> None:

    for case in ("llama3_tied", "qwen3"):
        dense = hf_model(case).to(rank_device)
        parallel = parallelize(copy.deepcopy(dense), group, strategy, fused=True)
        tokens = tokens_for(rank_device, vocab=dense.config.vocab_size)
        assert_near(logits_of(parallel, tokens), logits_of(dense, tokens))
        with torch.enable_grad(), pytest.raises(RuntimeError, match="is for inference and has no"):
            parallel.requires_grad_()(tokens)


@torch.no_grad()
def test_an_all_reduce_has_the_norm_behind_it(group, rank_device, monkeypatch) -> None:
    """In the inference form, that of attention and, between blocks, that of the MLP: one launch for three where one of our
    own is chosen."""
    dense, tokens, calls = make(rank_device, layers=3), tokens_for(rank_device), []
    whole = tp_inference.matmul_all_reduce_rms_norm
    monkeypatch.setattr(
        tp_inference, "matmul_all_reduce_rms_norm", lambda *args, **how: calls.append(1) or whole(*args, **how)
    )  # fmt: skip
    parallel = parallelize(copy.deepcopy(dense), group, "all_reduce")
    assert_near(logits_of(parallel, tokens), logits_of(dense, tokens))
    assert not calls
    assert_near(logits_of(parallel.for_inference(), tokens), logits_of(dense, tokens))
    assert len(calls) == 3 + 2
