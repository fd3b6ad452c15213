"""Ranks that compile other attention than each other are told so, on every rank, when their graphs run."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import torch_fdattn
from torch_fdattn import checks
from torch_fdattn.compile_backend import fdattn
from torch_fdattn.compile_backend.context_parallel import agreement
from torch_fdattn.compile_backend.report import UnsupportedAttention
from torch_fdattn.dist import SequenceShards

pytestmark = pytest.mark.usefixtures("compared_in_every_call")


@pytest.fixture(autouse=True)
def _compiled_anew() -> None:
    torch._dynamo.reset()


def compiled(run, group, lower: str = "aot_eager", **given):
    options = {"context_parallel": {"group": group, **given}, "lower": lower}
    return torch.compile(run, backend=fdattn, fullgraph=True, options=options)


def attended(x, **options):
    return torch_fdattn.attention(x, x, x, **options)[0]


def tokens(device, batch: int = 1, heads: int = 2, length: int = 8) -> torch.Tensor:
    return torch.randn(batch, heads, length, 16, device=device)


def odd() -> bool:
    return dist.get_rank() == 1


@pytest.mark.parametrize("lower", ["eager", "aot_eager"])
def test_windows(group, rank_device, lower) -> None:
    left = 3 if odd() else 5
    run = compiled(lambda x: attended(x, causal=True, window=(left, 0)), group, lower)
    with pytest.raises(
        ValueError, match=r"window_left of attention 0 .* same on all ranks, got 5 on rank 0, 3 on"
    ):
        run(tokens(rank_device))


def test_causal(group, rank_device) -> None:
    causal = odd()
    run = compiled(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=causal), group)
    with pytest.raises(ValueError, match="of attention 0 in a compiled graph must be the same"):
        run(tokens(rank_device))


def test_shards(group, rank_device) -> None:
    run = compiled(
        lambda x: attended(x, causal=True), group, shards="zigzag" if odd() else "contiguous"
    )
    with pytest.raises(ValueError, match="shards of attention 0 in a compiled graph must be the"):
        run(tokens(rank_device))


def test_strategies(group, rank_device) -> None:
    run = compiled(lambda x: attended(x), group, strategy="ring" if odd() else "all_gather")
    with pytest.raises(
        ValueError, match=r"strategy of .* got all_gather on rank 0, ring on rank 1"
    ):
        run(tokens(rank_device))


def test_gradients(group, rank_device) -> None:
    run = compiled(lambda x: attended(x), group)
    with pytest.raises(ValueError, match="whether gradients of a compiled graph are wanted must"):
        run(tokens(rank_device).requires_grad_(odd()))


def test_numbers_of_calls(group, rank_device) -> None:
    times = 2 if odd() else 1

    def attend(x):
        for _ in range(times):
            x = attended(x)
        return x

    with pytest.raises(ValueError, match=r"a compiled graph's attention must be the same .*\(0, 0\)"):  # fmt: skip
        compiled(attend, group)(tokens(rank_device))


def test_batches_of_one_graph(group, rank_device) -> None:
    """Sizes that a graph leaves open are those of each run."""
    run = compiled(lambda x: attended(x), group, strategy="all_gather")
    x = tokens(rank_device, batch=2)
    torch._dynamo.mark_dynamic(x, 0)
    run(x)
    with torch._dynamo.config.patch(error_on_recompile=True):
        run(tokens(rank_device, batch=3))
        with pytest.raises(ValueError, match=r"q of attention 0 .*4, 2, 16\) on rank 0, .*5, 2, 16"):  # fmt: skip
            run(tokens(rank_device, batch=5 if odd() else 4))


def test_lengths(group, rank_device) -> None:
    """One rank refuses to compile: the others have compiled, and raise when they run."""
    world = dist.get_world_size()
    run = compiled(lambda x: attended(x), group, shards=SequenceShards.contiguous(8 * world, world))
    with pytest.raises(Exception, match="9 tokens where the shards of rank 1 have 8") as raised:
        run(tokens(rank_device, length=9 if odd() else 8))
    if odd():
        assert isinstance(raised.value.inner_exception, UnsupportedAttention)
    else:
        assert isinstance(raised.value, NotImplementedError)
        assert str(raised.value).endswith("(on rank 1)")


def test_a_rank_that_refuses_while_others_have_compiled_before(group, rank_device) -> None:
    if rank_device.type == "cuda":
        pytest.skip("on GPUs ranks compare at first runs")
    world = dist.get_world_size()
    run = compiled(lambda x: attended(x), group, shards=SequenceShards.contiguous(8 * world, world))
    run(tokens(rank_device))
    with pytest.raises(Exception, match="7 tokens where the shards of rank 1 have 8"):
        run(tokens(rank_device, length=7 if odd() else 8))
    run(tokens(rank_device))


def test_options(group, rank_device) -> None:
    run = compiled(lambda x: attended(x), group, strategy="pigeon" if odd() else "ring")
    with pytest.raises(Exception, match=r"strategy must be one of .* got 'pigeon'") as raised:
        run(tokens(rank_device))
    if not odd():
        assert isinstance(raised.value, ValueError)


def test_equal_runs_are_compared_each_on_cpus_and_once_on_gpus(
    group, rank_device, monkeypatch
) -> None:
    monkeypatch.setattr(checks, "CHECK_VALUES", False)
    run = compiled(lambda x: attended(x, scale=0.217), group)
    x, calls, check = tokens(rank_device), [], agreement.check_equal_on_all_ranks

    def counted(*args, **kwargs):
        calls.append(args[2])
        check(*args, **kwargs)

    monkeypatch.setattr(agreement, "check_equal_on_all_ranks", counted)
    for _ in range(3):
        run(x)
    assert len(calls) == 3
    assert calls[0] == calls[1] == calls[2]


def test_a_refusal_is_told_where_graphs_of_such_inputs_are_compared(group, monkeypatch) -> None:
    """A group of two backends compares in one way on CPUs, and in another one on GPUs."""
    likes = []
    monkeypatch.setattr(agreement, "tell_refusal", lambda name, like, error: likes.append(like))
    inputs = [torch.empty(1), 3, torch.empty(2, device="meta")]
    with pytest.raises(ValueError, match="refused"), agreement.refusing_on_all_ranks(group, inputs):
        raise ValueError("refused")
    likes.append(agreement._like(group, inputs))  # of the ranks that run theirs
    assert [x.device.type for x in likes] == ["meta", "meta"]
