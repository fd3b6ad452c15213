"""What a graph over one rank's tokens does besides attention: what mixes or counts tokens is refused, all else is not.

A group of two in one process, whose collectives do nothing: graphs alone are looked at. This is rank 1, whose tokens do
not begin the sequence. `tests/dist/test_compiled_token_mixing.py` has whole models.
"""

import logging

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from torch_fdattn.compile_backend import fdattn
from torch_fdattn.compile_backend.report import UnsupportedAttention
from torch_fdattn.dist import SequenceShards

LENGTH, WIDTH = 12, 32


@pytest.fixture(scope="module")
def group():
    if dist.is_initialized():
        pytest.skip("a process group exists")
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def attended(x):
    """Attention over tokens (2, LENGTH, WIDTH)."""
    heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
    out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return out.transpose(1, 2).flatten(2)


def compiled(group, run, **options):
    torch._dynamo.reset()
    given = {"context_parallel": {"group": group, **options}, "lower": "eager"}
    return torch.compile(run, backend=fdattn, fullgraph=True, options=given)


def refusal(group, run, *args, **options) -> str:
    with pytest.raises(Exception, match="token-mixing") as raised:
        compiled(group, run, **options)(*args)
    assert isinstance(raised.value.inner_exception, UnsupportedAttention)
    assert f"{__file__}:" in str(raised.value)
    return str(raised.value)


def tokens(length: int = LENGTH):
    return torch.randn(2, length, WIDTH)


KERNEL = torch.randn(WIDTH, 1, 3)
SQUARE = torch.randn(LENGTH, LENGTH)
TABLE = torch.randn(3 * LENGTH, WIDTH)


def over_tokens(x, operation):
    return operation(x.mT).mT


MIXING = {
    "a causal convolution": lambda x: F.conv1d(F.pad(x.mT, (2, 0)), KERNEL, groups=WIDTH).mT,
    "a convolution with padding": lambda x: F.conv1d(x.mT, KERNEL, padding=2, groups=WIDTH)[..., :LENGTH].mT,
    "a cumulative sum": lambda x: x.cumsum(1),
    "a cumulative sum of chunks": lambda x: x.view(2, 3, 4, WIDTH).cumsum(2).view(2, LENGTH, WIDTH),
    "a cumulative sum of heads": lambda x: x.unflatten(-1, (2, -1)).transpose(1, 2).cumsum(-2).transpose(1, 2).flatten(2),
    "in place": lambda x: x.clone().cumsum_(1),
    "cummax": lambda x: x.cummax(1).values,
    "roll": lambda x: x.roll(1, 1),
    "flip": lambda x: x.flip(1),
    "a pad": lambda x: F.pad(x, (0, 0, 1, -1)),
    "a pad by concatenation": lambda x: torch.cat([torch.zeros(2, 1, WIDTH), x[:, :-1]], 1),
    "sort": lambda x: x.sort(1).values,
    "softmax": lambda x: x.softmax(1) * x,
    "a norm over tokens": lambda x: F.normalize(x, dim=1),
    "the mean, taken away": lambda x: x - x.mean(1, keepdim=True),
    "the mean of all, taken away": lambda x: x - x.mean(),
    "the mean of a flattened tensor, taken away": lambda x: x - x.flatten(1).mean(1)[:, None, None],
    "the norm of a flattened tensor": lambda x: x / x.reshape(-1).norm(),
    "the deviation of a flattened tensor": lambda x: x / x.flatten(1).std(1)[:, None, None],
    "the flattened heads' mean": lambda x: x * x.unflatten(-1, (2, -1)).flatten(1).mean(1)[:, None, None],
    "linalg.norm": lambda x: x / torch.linalg.norm(x),
    "linalg.matrix_norm": lambda x: x / torch.linalg.matrix_norm(x)[:, None, None],
    "aminmax": lambda x: x - x.aminmax()[0],
    "any": lambda x: x * (x > 2).any(1, keepdim=True),
    "count_nonzero": lambda x: x * torch.count_nonzero(x > 1, dim=1)[:, None],
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "scatter_add": lambda x: x + torch.zeros(2, 1, WIDTH).scatter_add(1, torch.zeros(x.shape, dtype=torch.long), x),
    "index_add": lambda x: x + torch.zeros(2, 1, WIDTH).index_add(1, torch.zeros(LENGTH, dtype=torch.long), x),
    "unbind": lambda x: x + torch.stack(x.unbind(1)).mean(0)[:, None],
    "addbmm": lambda x: x @ torch.addbmm(torch.zeros(WIDTH, WIDTH), x.mT, x),
    "squeeze and excitation": lambda x: x * x.mean(1).sigmoid()[:, None],
    "a projection of tokens": lambda x: over_tokens(x, lambda y: F.linear(y, SQUARE)),
    "a product": lambda x: SQUARE @ x,
    "tensordot": lambda x: torch.tensordot(SQUARE, x, dims=([1], [1])).transpose(0, 1),
    "inner": lambda x: torch.inner(x.mT, SQUARE).mT,
    "linear attention": lambda x: x @ (x.mT @ x),
    "linear attention, einsum": lambda x: torch.einsum("bsd,bde->bse", x, torch.einsum("bsd,bse->bde", x, x)),
    "group norm": lambda x: over_tokens(x, lambda y: F.group_norm(y, 4)),
    "pooling": lambda x: over_tokens(x, lambda y: F.avg_pool1d(y, 3, 1, 1)),
    "fft": lambda x: torch.fft.fft(x, dim=1).real,
    "unfold": lambda x: F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).sum(-1),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_refused(group, name):
    """Before attention, and behind it."""
    operation = MIXING[name]
    said = refusal(group, lambda x: attended(operation(x)), tokens())
    assert "of which a rank has its own alone" in said
    refusal(group, lambda x: operation(attended(x)), tokens())


def test_a_quantile_is_refused(group):
    """PyTorch 2.11 looks at its data, so that Dynamo names a break of the graph there; 2.13 traces it, and we refuse it."""
    with pytest.raises(Exception, match=r"token-mixing|Data dependent operator") as raised:
        compiled(group, lambda x: attended(x - x.quantile(0.5, dim=1, keepdim=True)))(tokens())
    assert f'"{__file__}", line' in str(raised.value) or f"{__file__}:" in str(raised.value)


def moe(x):
    """Routed experts: tokens are sorted and come back."""
    flat = x.reshape(-1, x.shape[-1])
    weights, chosen = (flat @ TABLE[: x.shape[-1], :4]).softmax(-1).topk(2, -1)
    order = chosen.flatten().argsort()
    counts = F.one_hot(chosen, 4).sum((0, 1)).cumsum(0)
    picked = flat[order // 2] * weights.flatten()[order, None] + counts.sum() * 0
    return torch.zeros_like(flat).index_add_(0, order // 2, picked).view(x.shape)


def rms_norm(x):
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)


WORKING = {
    "norms": lambda x: F.layer_norm(rms_norm(x), x.shape[-1:]),
    "F.rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "a gated MLP": lambda x: (F.silu(x) * x.sigmoid()) @ TABLE[: x.shape[-1], : x.shape[-1]],
    "softmax of features": lambda x: x.softmax(-1) + x.cumsum(-1).roll(1, -1),
    "a convolution of width 1": lambda x: F.conv1d(x.mT, torch.ones(x.shape[-1], x.shape[-1], 1)).mT,
    "norms of heads": lambda x: F.normalize(x.unflatten(-1, (4, -1)).transpose(1, 2), dim=-1).transpose(1, 2).reshape(x.shape),
    "flattened": lambda x: F.layer_norm(x.reshape(-1, x.shape[-1]), x.shape[-1:]).view(x.shape),
    "concatenated features": lambda x: torch.cat([x[..., :4], x[..., 4:]], -1),
    "halves that meet again": lambda x: torch.cat([x[:, :5] * 2, x[:, 5:] * 2], 1),
    "sums of features": lambda x: x * x.flatten(0, 1).amax(-1).view(2, -1, 1) + (x > 2).any(-1, keepdim=True),
    "the larger of two": lambda x: torch.max(x, x * 2) + torch.max(x, torch.zeros(())) * x + x.max(other=x + 1),
    "the smaller of two": lambda x: x.min(x * 2) + torch.min(x[..., :1], other=x),
    "heads apart": lambda x: torch.stack(x.unflatten(-1, (2, -1)).unbind(2), 2).flatten(2),
    "einsum": lambda x: torch.einsum("...d,de->...e", x, TABLE[: x.shape[-1], : x.shape[-1]]),
    "tensordot of features": lambda x: torch.tensordot(x, TABLE[: x.shape[-1], : x.shape[-1]], dims=1),
    "experts": moe,
    "the first token's row": lambda x: x + 0 * x.sum(-1, keepdim=True),
    "a pad of features": lambda x: F.pad(x, (0, 4))[..., : x.shape[-1]],
}  # fmt: skip


@pytest.mark.parametrize("length", [LENGTH, WIDTH], ids=["", "as long as wide"])
@pytest.mark.parametrize("name", WORKING)
def test_token_by_token(group, name, length):
    """Also where the hidden size is the number of tokens."""
    operation = WORKING[name]
    compiled(group, lambda x: operation(attended(operation(x))))(tokens(length=length))


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()),
        lambda x, y: (x - x.detach()).square().mean(1).mean(),
        lambda x, y: x.logsumexp(-1).mean() / (y >= 0).sum(),
        lambda x, y: x.mean(1),
        lambda x, y: (x, x.square().mean(), x[:, -1]),
    ],
    ids=["cross entropy", "means", "a mean by a count", "a pooled mean", "beside the tokens"],
)
def test_what_a_rank_reduces_is_the_callers(group, loss):
    compiled(group, lambda x, y: loss(attended(x), y))(tokens(), torch.ones(2, LENGTH).long())


def test_labels_that_a_loss_shifts(group):
    """As transformers' of causal models does; a pad of ids by another number is the model's."""

    def loss(x, y, fill, begin):
        labels = F.pad(y, (0, 1), value=fill)[..., begin : begin + LENGTH].contiguous()
        return F.cross_entropy(attended(x).flatten(0, 1), labels.flatten(), ignore_index=-100)

    labels = torch.ones(2, LENGTH).long()
    assert "shift_labels" in refusal(group, lambda x, y: loss(x, y, -100, 1), tokens(), labels)
    compiled(group, lambda x, y: loss(x, y, 0, 0))(tokens(), labels)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_the_data_decides(group):
    """As many rows as an expert is sent."""

    def run(x):
        flat = attended(x).flatten(0, 1)
        rows = (flat[:, 0] > 0).nonzero()[:, 0]
        picked = torch.cat([flat[rows, :4], flat[rows, 4:] * 2], -1)
        return torch.zeros_like(flat).index_add(0, rows, picked).view(x.shape)

    compiled(group, run)(tokens())


def test_in_a_checkpoint(group):
    def run(x):
        return checkpoint(lambda y: attended(y.cumsum(1)), x, use_reentrant=False)

    refusal(group, run, tokens().requires_grad_())


def test_a_loop_and_a_foreign_operator(group):
    @torch.library.custom_op("test_token_mixing::causal_conv1d", mutates_args=())
    def causal_conv1d(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    causal_conv1d.register_fake(torch.empty_like)
    said = refusal(group, lambda x: attended(causal_conv1d(x)), tokens())
    assert "test_token_mixing.causal_conv1d" in said


class Positions(nn.Module):
    def __init__(self, made) -> None:
        super().__init__()
        self.made = made
        self.embed = nn.Embedding(64, WIDTH)
        self.register_buffer("ids", torch.arange(64)[None])
        self.register_buffer("kinds", torch.zeros(1, 64, dtype=torch.long))
        self.register_buffer("sines", torch.randn(1, 64, WIDTH))

    def forward(self, x):
        return attended(self.made(self, x))


LOCAL = {
    "arange": lambda m, x: x + m.embed(torch.arange(x.shape[1])),
    "arange + 0": lambda m, x: x + m.embed(torch.arange(0, x.shape[1]) + 0)[None],
    "a buffer's first ids": lambda m, x: x + m.embed(m.ids[:, : x.shape[1]]),
    "a table's first rows": lambda m, x: x + m.sines[:, : x.shape[1]],
    "learned rows": lambda m, x: x + m.embed.weight[: x.shape[1]],
    "with two rows before": lambda m, x: x + m.embed(torch.arange(x.shape[1]) + 2),
    "rotary": lambda m, x: x * (torch.arange(x.shape[1])[:, None] * 0.1).cos(),
    "linspace": lambda m, x: x + torch.linspace(0, 1, x.shape[1])[:, None],
    "a sum of ones": lambda m, x: x + torch.ones(x.shape[1]).cumsum(0)[:, None],
    "multiplied by a mask": lambda m, x: x * (torch.ones(x.shape[:2]).cumsum(1) == 1)[..., None],
    "counted from a mask": lambda m, x: x + m.embed((x[..., 0] < 100).long().cumsum(1)),
}  # fmt: skip
LOCAL_BEHIND = {
    "divided": lambda x: x / (torch.arange(x.shape[1])[:, None] + 1.0),
    "where": lambda x: torch.where(torch.arange(x.shape[1])[:, None] == 0, torch.zeros_like(x), x),
    "masked_fill": lambda x: x.masked_fill((torch.arange(x.shape[1]) < 2)[:, None], 0.0),
}  # fmt: skip
GLOBAL = {
    "begins at the rank's": lambda m, x: x + m.embed(torch.arange(x.shape[1]) + LENGTH),
    "a sum of ones": lambda m, x: (
        x + m.embed(torch.ones(x.shape[1], dtype=torch.long).cumsum(0) + (LENGTH - 1))
    ),
    "rows of the rank": lambda m, x: x + m.sines[:, LENGTH : 2 * LENGTH],
    "kinds of tokens": lambda m, x: x + m.embed(m.kinds[:, : x.shape[1]]),
    "no positions": lambda m, x: x + m.embed.weight[0],
}


@pytest.mark.parametrize("name", LOCAL)
def test_positions_of_local_tokens(group, name):
    assert "give the model position_ids" in refusal(group, Positions(LOCAL[name]), tokens())


@pytest.mark.parametrize("name", LOCAL_BEHIND)
def test_positions_of_local_tokens_behind_attention(group, name):
    """Before it they are refused as numbers that q, k and v are made of (`local_counts.py`)."""
    said = refusal(group, lambda x: LOCAL_BEHIND[name](attended(x)), tokens())
    assert "give the model position_ids" in said


def test_choices_by_positions_of_the_ranks(group):
    def run(x):
        return attended(x).masked_fill((torch.arange(x.shape[1]) + LENGTH < 2)[:, None], 0.0)

    compiled(group, run)(tokens())


@pytest.mark.parametrize("name", GLOBAL)
def test_positions_that_may_be_the_ranks(group, name):
    compiled(group, Positions(GLOBAL[name]))(tokens())


def test_positions_of_a_shard_that_is_no_run(group):
    shards = SequenceShards.from_positions([range(r, 2 * LENGTH, 2) for r in range(2)])
    model = Positions(lambda m, x: x + m.embed(torch.arange(x.shape[1]) + LENGTH))
    refusal(group, model, tokens(), shards=shards)


def by_longest(limit):
    def run(x, positions):
        frequency = torch.where(positions.max() + 1 > limit, 0.1, 0.2)
        return attended(x * (positions[..., None] * frequency).cos())

    return run


def test_frequencies_that_follow_from_the_longest_position(group):
    positions = torch.arange(LENGTH, 2 * LENGTH)[None]
    assert "longrope" in refusal(group, by_longest(2 * LENGTH - 1), tokens(), positions)
    compiled(group, by_longest(2 * LENGTH))(tokens(), positions)  # no rank has so long a one


def test_a_graph_break_around_attention_is_warned_of(group, caplog):
    outside = torch._dynamo.disable(attended)
    torch._dynamo.reset()
    options = {"context_parallel": {"group": group}, "lower": "eager"}
    with caplog.at_level(logging.WARNING, "torch_fdattn"):
        torch.compile(lambda x: outside(x * 2) + 1, backend=fdattn, options=options)(tokens())
    assert "fullgraph=True" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "torch_fdattn"):
        compiled(group, attended)(tokens())
    assert not caplog.text
