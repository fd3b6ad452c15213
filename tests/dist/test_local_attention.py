"""Attention that would see one rank's tokens alone is refused by name inside `context_parallel`, and nothing else is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.varlen import varlen_attn

import torch_fdattn
from torch_fdattn.dist import SequenceShards, context_parallel

LENGTH = 8


def attention_fp8(x):
    scales = torch.ones(1, 2, device=x.device)
    return torch_fdattn.attention_fp8(*[x.to(torch.float8_e4m3fn)] * 3, *[scales] * 3)


def flash_for_cpu(x):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)


def flash_overload(x):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(x, x, x)


def math_of_torch(x):
    return torch._scaled_dot_product_attention_math(x, x, x)


def varlen(x):
    begins = torch.tensor([0, LENGTH], dtype=torch.int32, device=x.device)
    return varlen_attn(*[x[0].transpose(0, 1)] * 3, begins, begins, LENGTH, LENGTH)


def written_out(x):
    return (x @ x.mT).softmax(-1) @ x


def written_out_in_groups(x):
    scores = x[:, :, None] @ x[:, :, None].mT
    return scores.softmax(-1)[:, :, 0] @ x


def written_out_with_sinks(x):
    scores = torch.cat([x @ x.mT, torch.zeros_like(x[..., :1])], dim=-1)
    return torch.softmax(scores, dim=-1)[..., :-1] @ x


def by_torch_softmax(x):
    return torch.softmax(x @ x.mT, dim=-1) @ x


def eager_attention_forward(x):
    """As transformers names it; of other keys than its own."""
    return F.softmax((x @ x.mT)[..., :7], dim=-1) @ x[:, :, :7]


def written_out_by_bmm(x):
    heads = x.flatten(0, 1)
    return torch.bmm(torch.bmm(heads, heads.mT).softmax(-1), heads).view_as(x)


def by_log_softmax(x):
    return (x @ x.mT).log_softmax(-1).exp() @ x


def by_log_softmax_of_functional(x):
    return F.log_softmax(x @ x.mT, dim=-1).exp() @ x


def by_logsumexp(x):
    scores = x @ x.mT
    return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ x


@pytest.fixture
def inside(group):
    world = dist.get_world_size()
    with context_parallel(group, shards=SequenceShards.zigzag(LENGTH * world, world)):
        yield


@pytest.mark.parametrize(
    ("attend", "name"),
    [
        (attention_fp8, "attention_fp8"),
        (flash_for_cpu, "aten._scaled_dot_product_flash_attention_for_cpu"),
        (flash_overload, "aten._scaled_dot_product_flash_attention_for_cpu.default"),
        (math_of_torch, "_scaled_dot_product_attention_math"),
        (varlen, "torch_attn._varlen_attn"),
        (written_out, "attention written out"),
        (written_out_in_groups, "attention written out"),
        (written_out_with_sinks, "attention written out"),
        (by_torch_softmax, "attention written out"),
        (written_out_by_bmm, "attention written out"),
        (by_log_softmax, "attention written out"),
        (by_log_softmax_of_functional, "attention written out"),
        (by_logsumexp, "attention written out"),
        (eager_attention_forward, "eager_attention_forward"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_refused(inside, rank_device, attend, name) -> None:
    x = torch.randn(1, 2, LENGTH, 16, device=rank_device)
    with pytest.raises(NotImplementedError, match=f"{name}.* attend to this rank's tokens only"):
        attend(x)


@pytest.mark.parametrize(
    ("namespace", "name", "refused"),
    [
        ("flash_attn", "fwd", True),
        ("_flash_attn3_cuda_9a1b", "fwd", True),
        ("flash_attn", "layer_norm_fwd_impl", False),
        ("flash_attn_lib", "rotary_fwd", False),
    ],
)
def test_ops_of_other_libraries(inside, rank_device, namespace, name, refused) -> None:
    with torch.library._scoped_library(namespace, "FRAGMENT") as library:
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, torch.neg, "CompositeExplicitAutograd")
        op, x = getattr(getattr(torch.ops, namespace), name), torch.ones(2, device=rank_device)
        if not refused:
            assert op(x).tolist() == [-1, -1]
            return
        with pytest.raises(
            NotImplementedError, match=f"{namespace}.{name} inside context_parallel"
        ):
            op(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention(inside, rank_device, compiled) -> None:
    """Which Dynamo traces, eager or not: the error is Dynamo's."""
    x = torch.randn(1, 2, LENGTH, 16, device=rank_device)
    torch._dynamo.reset()
    attend = torch.compile(flex_attention, backend="eager") if compiled else flex_attention
    with pytest.raises(Exception, match="flex_attention inside context_parallel would attend to"):
        attend(x, x, x)


def test_what_goes_token_by_token(inside, rank_device) -> None:
    """Softmaxes of routers and words, and aten's other ops."""
    x = torch.randn(2, LENGTH, LENGTH + 2, device=rank_device)
    for softmax in (F.softmax, torch.softmax, F.log_softmax):
        assert softmax(x, -1).shape == x.shape
        assert softmax(x[0, :, :LENGTH], -1).shape == (LENGTH, LENGTH)
    labels = torch.zeros(2, LENGTH, dtype=torch.long, device=rank_device)
    assert F.cross_entropy(x[..., :LENGTH].mT, labels).dim() == 0
    assert torch.ops.aten.relu.default(x).shape == torch.ops.aten.relu(x).shape
    assert F.softmax(torch.randn(2, 3, LENGTH, 5, device=rank_device), -1).shape[-1] == 5


def test_eager_models_of_transformers(inside, rank_device) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32,
        attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(rank_device)
    tokens = torch.arange(LENGTH, device=rank_device)[None]
    with pytest.raises(NotImplementedError, match='use attn_implementation="fdattn"'):
        model(tokens, position_ids=tokens, use_cache=False)
