"""One rank of test_llm_sharded.py: what `LLM` over a cache that ranks share writes, case by case."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.engine.tiny import PROMPTS, config, random_model
from torch_fdattn.engine import (
    LLM,
    AsyncLLM,
    Follower,
    NgramSpeculation,
    RequestOutput,
    SamplingParams,
)
from torch_fdattn.models import Transformer
from torch_fdattn.models.config import LayerConfig, RopeConfig
from torch_fdattn.models.parallelize import parallelize

TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=64)
DRAWN = SamplingParams(temperature=1.5, seed=3, max_tokens=TOKENS, logprobs=64)
ALL_LOGPROBS = SamplingParams(temperature=0, max_tokens=4, logprobs=64, prompt_logprobs=64)
#: Options of `LLM`, of a page of 4 tokens on each rank.
CASES = {
    "as it comes": {},
    "chunks of 1": {"max_batch_tokens": 1},
    "chunks of 7": {"max_batch_tokens": 7, "run_ahead": False},
    "a token a page": {"page_size": 1, "max_batch_tokens": 9},
    "few pages": {"tokens_in_pages": 48, "max_batch_tokens": 13},
    "batch-invariant": {
        "batch_invariant": True, "max_num_seqs": 3, "max_batch_tokens": 20
    },
    "speculation": {"speculation": NgramSpeculation(max_tokens=3, shortest=1), "max_batch_tokens": 9},
    "int8": {"kv_dtype": "int8", "max_batch_tokens": 9},
    "fp8_e4m3": {"kv_dtype": "fp8_e4m3", "tokens_in_pages": 48},
}  # fmt: skip


def windowed() -> Transformer:
    """Of Gemma 2's form: softcaps, a scale of its own, and a window shorter than the prompts in every other layer."""
    layers = LayerConfig(6, RopeConfig()), LayerConfig(None, RopeConfig())
    changes = dict(layers=layers, softcap=5.0, logit_softcap=12.0, attention_scale=0.3)
    model = random_model("cpu", "gemma2")
    own = Transformer(dataclasses.replace(config("gemma2"), **changes))
    own.load_state_dict(model.state_dict())
    return own


MODELS = {"qwen3": lambda: random_model("cpu"), "windowed": windowed}


def engine(model: Transformer, ranks: int, options: dict, **groups) -> LLM:
    options = {"page_size": 4, "max_model_len": 48, "tokens_in_pages": 256, **options}
    tokens = options.pop("tokens_in_pages")
    options["pages"] = tokens // (options["page_size"] * ranks)
    return LLM(model, **options, **groups)


def told(outputs: list[RequestOutput]) -> list[dict]:
    """Of each prompt: its first completion's tokens, and the log-probabilities of all tokens at each, by token."""
    found = []
    for output in outputs:
        completion = output.outputs[0]
        rows = [[row[token].logprob for token in sorted(row)] for row in completion.logprobs]
        found.append({"tokens": completion.token_ids, "logprobs": rows, "cached": output.num_cached_tokens})  # fmt: skip
    return found


def write(llm: LLM) -> dict:
    """Greedy and drawn answers, the second time with prefix hits; then requests that come and go while others run."""
    found = {"greedy": told(llm.generate(PROMPTS, GREEDY))}
    found["drawn"] = told(llm.generate(PROMPTS, DRAWN))
    outputs, coming = {}, list(enumerate(PROMPTS))
    llm.add_request("aborted", PROMPTS[3], GREEDY)
    while coming or llm.has_unfinished:
        if coming:
            number, prompt = coming.pop()
            llm.add_request(str(number), prompt, GREEDY)
        elif llm.abort("aborted") is not None:
            continue
        outputs |= {x.request_id: x for x in llm.step()}
    found["while others run"] = told([outputs[str(i)] for i in range(len(PROMPTS))])
    return found | {"stats": dataclasses.asdict(llm.stats())}


def prompt_logprobs(llm: LLM) -> list[list[float]]:
    outputs = llm.generate(PROMPTS, ALL_LOGPROBS)
    rows = [row for output in outputs for row in output.prompt_logprobs[1:]]
    return [[row[token].logprob for token in sorted(row)] for row in rows]


def changed_bits(make: Callable[..., LLM]) -> list[str]:
    """When a request's log-probabilities, in batch-invariant mode, are not the bits that it has alone."""
    options = dict(batch_invariant=True, max_num_seqs=5, max_batch_tokens=21)
    prompt, params = list(range(10, 33)), SamplingParams(seed=3, max_tokens=TOKENS, logprobs=0)
    others = [[i] * (3 * i + 1) for i in range(1, 6)]
    (alone,) = make(options).generate([prompt], params)
    found = []
    for name, tokens in (("with others", 256), ("after a preemption", 64)):
        llm = make({**options, "tokens_in_pages": tokens})
        for _ in range(2):  # the second time over a prefix
            *_, output = llm.generate([*others, prompt], params)
            found += [name] * (output.outputs != alone.outputs)
        found += [f"no preemption {name}"] * (tokens == 64 and not llm.stats().preemptions)
    return found


def unseeded(llm: LLM) -> list[list[int]]:
    """Drawn by seeds that each rank chooses for itself."""
    params = SamplingParams(temperature=1.5, max_tokens=TOKENS, n=2)
    outputs = llm.generate(PROMPTS, params)
    return [completion.token_ids for output in outputs for completion in output.outputs]


def one_rank(rank: int, folder: Path, shape: tuple[int, int], models: list[str], cases: list[str]) -> None:  # fmt: skip
    """Writes what this rank has, by model and case; shape: ranks that share the cache, and the model."""
    torch.set_num_threads(1)
    size = shape[0] * shape[1]
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("kv", "tp"))
    groups = {"kv_group": mesh["kv"]}
    if shape[1] > 1:
        groups["tp_group"] = mesh["tp"]
    found = {}
    for name in models:
        model = MODELS[name]()
        if shape[1] > 1:
            model = parallelize(model, mesh["tp"], strategy="ag_rs")
        for case in cases:
            found[f"{name}, {case}"] = write(engine(model, shape[0], CASES[case], **groups))
        llm = engine(model, shape[0], {"max_batch_tokens": 9}, **groups)
        found[f"{name}, of prompts"] = prompt_logprobs(llm)
        found[f"{name}, unseeded"] = unseeded(llm)
        if "batch-invariant" in cases:
            found[f"{name}, changed bits"] = changed_bits(
                functools.partial(engine, model, shape[0], **groups)
            )
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def refused(make: Callable[[], object]) -> str:
    try:
        make()
    except (ValueError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals(rank: int, folder: Path) -> None:
    """Writes what this one of two ranks says of wrong arguments, some of which the other one alone has."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    world, model = dist.group.WORLD, random_model("cpu")

    def made(**options) -> str:
        return refused(lambda: LLM(model, **{"kv_group": world, "pages": 8, **options}))

    llm = LLM(model, kv_group=world, pages=8)

    def asked(prompt: list[int]) -> str:
        return refused(lambda: llm.add_request("a", prompt, GREEDY))

    found = {
        "bytes": [llm.step_bytes(tokens) - llm.step_bytes(0) for tokens in (16, 40)],
        "the other's": refused(lambda: (AsyncLLM if rank else Follower)(llm)),
        "another prompt": asked([1, 2 + rank]),
        "sizes": made(page_size=4 + rank),
        "read at once": made(run_ahead=rank == 0),
        "a prefix cache": made(enable_prefix_caching=rank == 0),
        "one rank's format": made(kv_dtype=None if rank else "fp4"),
        "pages of one": made(pages=8 * rank),
        "hierarchical": made(strategy="hierarchical"),
        "invariance of one": made(batch_invariant=True, rank_invariant=rank == 0),
        "unknown": made(strategy="nearest"),
        "one-sided": made(strategy="two_shot"),
        "without a group": made(kv_group=None, strategy="ring"),
        "no mesh": made(tp_group=world),
        "no group": made(kv_group="nowhere"),
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
