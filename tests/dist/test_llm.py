"""Continuous batching over a cache that the ranks share by position, on their devices, by each strategy of decode."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.dist.ranks import expect_own_gpus
from tests.engine.expected import expect_greedy
from tests.engine.sharded_worker import windowed
from tests.engine.test_chat import Numbers
from tests.engine.tiny import PROMPTS, random_model
from torch_fdattn.dist.decode.op import COLLECTIVES_ALONE, ONE_SIDED
from torch_fdattn.engine import LLM, SamplingParams
from torch_fdattn.engine.llm_groups import EngineGroups
from torch_fdattn.models.parallelize import parallelize

from .test_rank_invariant import alone  # noqa: F401

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=2)


@pytest.mark.parametrize("strategy", ["auto", *COLLECTIVES_ALONE, *ONE_SIDED])
def test_greedy_tokens_are_the_models(group: str, rank_device, strategy: str) -> None:
    """On GPUs decodes alone run in CUDA graphs, exchange included."""
    if strategy in ONE_SIDED and rank_device.type != "cuda":
        pytest.skip("needs a CUDA device")
    model = random_model(rank_device)
    tokens = max(1, 8 // dist.get_world_size())  # of a page on each rank: prompts are of 20 at most
    llm = LLM(
        model, kv_group=group, strategy=strategy, max_model_len=48, page_size=tokens, pages=96 // tokens,
        max_num_seqs=5, max_batch_tokens=11,
    )  # fmt: skip
    for _ in range(2):  # with prefix hits the second time
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY), strict=True):
            expect_greedy(model, prompt, output.outputs[0])
    assert llm.stats().prefix_hit_tokens > 0


def test_collectives_that_cannot_be_captured(group, alone, monkeypatch) -> None:  # noqa: F811
    """gloo's, which the host computes: no graphs by default, and none that the caller asks for."""
    over_gloo = {group}
    monkeypatch.setattr(
        dist, "get_backend_config",
        lambda of: "cpu:gloo,cuda:gloo" if of.group_name in over_gloo else "cpu:gloo,cuda:nccl",
    )  # fmt: skip

    def captured(kv: str | None, tp: str | None, strategy: str = "auto", hierarchy=None) -> bool:
        return EngineGroups(kv, tp, dist.group.WORLD).can_be_captured(strategy, hierarchy)

    assert captured(None, None)
    assert captured(alone, None)
    assert captured(None, alone)
    assert not captured(None, group)
    assert not captured(alone, group)
    assert captured(group, alone) == (dist.get_world_size() == 1)
    assert captured(group, None, "fused")
    assert not captured(alone, None, "hierarchical", (alone, group))
    over_gloo.add(alone)
    assert captured(alone, None)  # nothing to send
    assert not captured(None, alone)
    over_gloo.clear()
    assert captured(group, alone, "hierarchical", (alone, group))


def test_graphs_over_gloo_are_refused(group, rank_device, monkeypatch) -> None:
    """Where tensors are a GPU's, or pass for them."""
    model = random_model(rank_device)
    monkeypatch.setattr(dist, "get_backend_config", lambda of: "cpu:gloo,cuda:gloo")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(ValueError, match=r"where a group's backend is gloo.*got True"):
        LLM(model, tp_group=group, pages=2, cuda_graph=True)


def test_cuda_graphs_change_no_token(group: str, rank_device) -> None:
    if rank_device.type != "cuda":
        pytest.skip("needs a CUDA device")
    expect_own_gpus()
    model = random_model(rank_device).to(torch.bfloat16)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=24)
    options = dict(kv_group=group, max_model_len=64, pages=16, kv_dtype="fp8_e4m3")
    captured, eager = (
        LLM(model, cuda_graph=graph, batch_invariant=True, max_num_seqs=8, **options) for graph in (True, False)
    )  # fmt: skip
    found = [x.outputs[0].token_ids for x in captured.generate(PROMPTS, params)]
    assert found == [x.outputs[0].token_ids for x in eager.generate(PROMPTS, params)]


def test_by_nodes(group: str, rank_device, hierarchies) -> None:
    model = random_model(rank_device)
    for hierarchy in hierarchies:
        llm = LLM(
            model, kv_group=group, strategy="hierarchical", hierarchy=hierarchy, max_model_len=48, page_size=4, pages=24,
            max_num_seqs=5,
        )  # fmt: skip
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, GREEDY), strict=True):
            expect_greedy(model, prompt, output.outputs[0])
        llm.close()


CASES = [
    ("qwen3", {}), ("qwen3", {"kv_dtype": "int8"}),
    ("windowed", {"strategy": "all_gather", "enable_prefix_caching": False}),
]  # fmt: skip


@pytest.mark.parametrize(("form", "options"), CASES)
def test_bits_do_not_depend_on_the_number_of_ranks(group, alone, rank_device, form, options) -> None:  # fmt: skip # noqa: F811
    """Log-probabilities of prompts and completions: chunks, decodes, prefixes, preemptions and other requests beside them,
    over all ranks and over one that has the request alone."""
    model = random_model(rank_device) if form == "qwen3" else windowed().to(rank_device)
    prompt, world = [(7 * i) % 64 for i in range(41)], dist.get_world_size()
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=6, logprobs=64)
    asking = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=64, logprobs=64)
    given = dict(
        max_model_len=64, page_size=4, max_num_seqs=3, max_batch_tokens=23, batch_invariant=True, rank_invariant=True, **options
    )  # fmt: skip
    one = LLM(model, kv_group=alone, pages=64, **given)
    expected = [one.generate([prompt], x)[0] for x in (params, asking)]
    llm = LLM(model, kv_group=group, pages=16 // world, **given)
    for _ in range(2):  # the second time with prefix hits
        for x, right in zip((params, asking), expected, strict=True):
            *_, found = llm.generate([[1] * 7, [2] * 7, prompt], x)
            assert found.outputs == right.outputs
            assert found.prompt_logprobs == right.prompt_logprobs
    assert llm.stats().preemptions or world != 2  # by the size of a page
    for each in (one, llm):
        each.close()


def test_what_bits_on_any_number_of_ranks_need(group, alone, rank_device) -> None:  # noqa: F811
    model = random_model(rank_device)
    given = dict(pages=8, rank_invariant=True)
    for wrong, kind, message in (
        (dict(batch_invariant=True), ValueError, "kv_group must be a process group where rank_invariant"),
        (dict(kv_group=alone), ValueError, "batch_invariant must be True where rank_invariant is True"),
        (dict(kv_group=alone, batch_invariant=True, strategy="star"), NotImplementedError, "strategy must be one of .* with invariant_block"),
        (dict(kv_group=alone, batch_invariant=True, strategy="fused"), NotImplementedError, "others need one node a rank, or merge by ranks, got 'fused'"),
    ):  # fmt: skip
        with pytest.raises(kind, match=message):
            LLM(model, **given, **wrong)


def test_engines_side_by_side(group, alone, rank_device) -> None:  # noqa: F811
    """Each rank serves other requests, in a mesh of its own."""
    model = parallelize(random_model(rank_device), alone)
    options = dict(kv_group=alone, tp_group=alone, pages=8, max_model_len=48)
    llm = LLM(model, sync_group=alone, **options)
    prompt = PROMPTS[dist.get_rank() % len(PROMPTS)]
    (output,) = llm.generate([prompt], GREEDY)
    expect_greedy(random_model(rank_device), prompt, output.outputs[0])
    llm.close()
    world = dist.get_world_size()
    if world > 1:
        with pytest.raises(ValueError, match=f"of a mesh of all ranks, got groups of 1 and 1 among {world} ranks: give sync_group"):  # fmt: skip
            LLM(model, **options)
        with pytest.raises(ValueError, match=f"sync_group must have the ranks of .* together, 1, got a group of {world}"):  # fmt: skip
            LLM(model, sync_group=group, **options)


class Ending(Numbers):
    """Whose end tokens differ between ranks."""

    @property
    def eos_ids(self):
        return frozenset({dist.get_rank()})


@pytest.mark.parametrize("case", ["no tokenizer on some", "other end tokens"])
def test_ends_that_differ_between_ranks_are_refused(group, rank_device, case) -> None:
    """Sequences would end on some ranks alone."""
    if dist.get_world_size() == 1:
        pytest.skip("needs 2 ranks")
    tokenizer, name = Ending(), "the tokenizer's end tokens"
    if case == "no tokenizer on some":
        tokenizer, name = Numbers() if dist.get_rank() else None, "whether a tokenizer is given"
    with pytest.raises(ValueError, match=f"{name} must be the same on all ranks"):
        LLM(random_model(rank_device), tokenizer, kv_group=group, pages=8, max_model_len=48)
