"""From `LLM`'s arguments to its runner: checks, sizes, memory."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import NamedTuple

import torch
import torch.distributed as dist

from torch_fdattn.dist.decode.op import ONE_SIDED, check_strategy
from torch_fdattn.dist.decode.rank_invariant import check_strategy as check_invariant_strategy
from torch_fdattn.dist.groups import Group, pair_of_names, rank_and_size
from torch_fdattn.dist.kv_cache.scales import kv_format
from torch_fdattn.dist.symm.availability import expect_mapped
from torch_fdattn.engine.llm_groups import EngineGroups
from torch_fdattn.engine.ngram_speculation import MAX_VOCAB_SIZE, NgramSpeculation
from torch_fdattn.engine.paged_step import PagedKV
from torch_fdattn.engine.prompts import check_end_ids
from torch_fdattn.engine.runner import ModelRunner
from torch_fdattn.engine.sequence_rows import SequenceRows
from torch_fdattn.engine.sharded_pages import ShardedPagedKV
from torch_fdattn.models import InferenceTransformer, Transformer
from torch_fdattn.models.parallelize import local_kv_heads

#: Of a GPU's free memory, what the pages take where nobody says how many; the rest is for activations.
_GPU_SHARE = 0.85
_CPU_BYTES = 2**30
_LARGEST_CHUNK = 512
#: Tokens of a step where the caller gives none. The host launches a step of prompts more slowly than a GPU computes small ones.
MAX_BATCH_TOKENS = 16384


class EngineSizes(NamedTuple):
    """What follows from the arguments and the memory."""

    max_model_len: int
    pages: int
    page_size: int  # tokens of a page, of all ranks of kv_group together


def make_runner(
    model: Transformer | InferenceTransformer, *, max_num_seqs: int, max_batch_tokens: int,
    max_model_len: int | None, pages: int | None, page_size: int, kv_dtype: str | None,
    enable_prefix_caching: bool, cuda_graph: bool | None, prompt_graph_tokens: int, kv_group: Group, strategy: str,
    hierarchy: tuple[Group, Group] | None, tp_group: Group, sync_group: Group, batch_invariant: bool,
    rank_invariant: bool, speculation: NgramSpeculation | None, run_ahead: bool, fused: bool,
    eos_ids: Collection[int] | None,
) -> tuple[ModelRunner, EngineSizes]:  # fmt: skip
    """The runner of `LLM`'s arguments of these names, with its pages and rows allocated. eos_ids: None without a tokenizer."""
    if not isinstance(model, (Transformer, InferenceTransformer)):
        raise TypeError(
            f"model must be a Transformer or its inference form, got {type(model).__name__}: see models.load_model"
        )
    model = model.for_inference() if fused and type(model) is Transformer else model
    config, weight = model.config, model.norm.weight
    sizes = dict(
        max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens, page_size=page_size,
        max_model_len=max_model_len, pages=pages,
    )  # fmt: skip
    groups = EngineGroups.of(kv_group, tp_group, sync_group)
    with groups.refusing(weight):
        _expect_positive(**sizes)
        _expect_bool(
            run_ahead=run_ahead, batch_invariant=batch_invariant, rank_invariant=rank_invariant, fused=fused
        )  # fmt: skip
        form = kv_format(kv_dtype)
        hierarchy = pair_of_names(hierarchy)
        _check_strategy(strategy, hierarchy, groups.kv)
        if rank_invariant:
            _check_rank_invariant(batch_invariant, strategy, groups.kv)
        _check_speculation(speculation, batch_invariant, config.vocab_size)
        check_end_ids(eos_ids or (), config.vocab_size)
        if max_model_len is not None and max_model_len > config.max_positions:
            raise ValueError(
                f"max_model_len must be at most the model's {config.max_positions} positions, got {max_model_len}"
            )
        if cuda_graph and not weight.is_cuda:
            raise ValueError(
                f"cuda_graph must be None or False where the model is on {weight.device}, got True"
            )
        capturable = groups.can_be_captured(strategy, hierarchy)
        if cuda_graph and not capturable:
            raise ValueError(
                "cuda_graph must be None or False where a group's backend is gloo, whose collectives cannot be captured, "
                "got True: NCCL's can, and one-sided strategies have none"
            )
        longest = config.max_positions if max_model_len is None else max_model_len
        ranks = 1 if groups.kv is None else rank_and_size(groups.kv)[1]
        if pages is not None:
            stored = _longest_row(longest, pages, page_size * ranks)
            _check_rows(max_num_seqs, stored, page_size * ranks, weight.device)
        graphs = weight.is_cuda and capturable if cuda_graph is None else cuda_graph
        _check_prompt_graphs(prompt_graph_tokens, graphs, kv_dtype, groups.kv, batch_invariant)
    groups.check_equal(
        weight,
        {
            **sizes, "kv_dtype": kv_dtype, "enable_prefix_caching": enable_prefix_caching,
            "cuda_graph": graphs, "prompt_graph_tokens": prompt_graph_tokens, "strategy": strategy, "batch_invariant": batch_invariant,
            "rank_invariant": rank_invariant, "fused": fused, "speculation": speculation, "run_ahead": run_ahead,
            "whether kv_group is given": groups.kv is not None,
            "whether tp_group is given": groups.tp is not None,
            "whether a tokenizer is given": eos_ids is not None,
            "the tokenizer's end tokens": tuple(sorted(eos_ids or ())),
            "the model's configuration": config, "the model's dtype": weight.dtype,
        },
    )  # fmt: skip
    if groups.kv is not None and strategy in ONE_SIDED:
        expect_mapped(f"strategy {strategy!r}", groups.kv, weight.device)
    shape = config.num_layers, page_size, local_kv_heads(model), config.head_dim
    if pages is None:
        page_bytes = PagedKV.page_bytes(*shape, weight.dtype, form)
        pages = _default_pages(
            max_num_seqs, longest, page_size * ranks, page_bytes, weight.device, groups.everybody
        )
    options = dict(dtype=weight.dtype, device=weight.device, form=form)
    if groups.kv is None:
        kv = PagedKV(config.num_layers, pages, *shape[1:], **options)
    else:
        kv = ShardedPagedKV(
            config.num_layers, pages, *shape[1:], **options, group_name=groups.kv, strategy=strategy,
            hierarchy=hierarchy, rank_invariant=rank_invariant,
        )  # fmt: skip
    stored = _longest_row(longest, pages, kv.page_size)
    rows = SequenceRows(max_num_seqs, stored, kv.page_size, weight.device)
    runner = ModelRunner(
        model, kv, rows, max_num_seqs, cuda_graph=graphs, group=groups.everybody,
        batch_invariant=batch_invariant, prompt_graph_tokens=min(prompt_graph_tokens, max_batch_tokens), speculation=speculation,
    )  # fmt: skip
    return runner, EngineSizes(longest, pages, kv.page_size)


def _check_strategy(strategy: str, hierarchy: tuple[str, str] | None, kv_group: str | None) -> None:
    if kv_group is None and strategy != "auto":
        raise ValueError(f"strategy must be 'auto' where kv_group is None, got {strategy!r}")
    check_strategy(strategy, hierarchy)


def _check_rank_invariant(batch_invariant: bool, strategy: str, kv_group: str | None) -> None:
    if kv_group is None:
        raise ValueError(
            "kv_group must be a process group where rank_invariant is True, of this process alone for a cache that is not "
            "shared, got None"
        )
    if not batch_invariant:
        raise ValueError("batch_invariant must be True where rank_invariant is True, got False")
    check_invariant_strategy(strategy, round_robin=True)


def _check_prompt_graphs(
    tokens: int, graphs: bool, kv_dtype: str | None, kv_group: str | None, batch_invariant: bool
) -> None:
    if type(tokens) is not int or tokens < 0:
        raise ValueError(f"prompt_graph_tokens must be an int of 0 or more, got {tokens!r}")
    refused = {
        "without CUDA graphs": not graphs, "with kv_dtype, whose prompts attend over copies": kv_dtype is not None,
        "with kv_group": kv_group is not None, "with batch_invariant": batch_invariant,
    }  # fmt: skip
    for where, holds in refused.items():
        if tokens and holds:
            raise ValueError(f"prompt_graph_tokens must be 0 {where}, got {tokens}")


def chunk_size_of(page_size: int, max_num_seqs: int, max_batch_tokens: int) -> int:
    """Tokens of a chunk in batch-invariant mode: whole pages, and always room for one beside all decodes."""
    largest = min(max_batch_tokens - max_num_seqs, max(_LARGEST_CHUNK, page_size))
    if largest < page_size:
        raise ValueError(
            f"max_batch_tokens must be at least max_num_seqs + page_size = {max_num_seqs + page_size} where "
            f"batch_invariant is True, got {max_batch_tokens}"
        )
    return largest // page_size * page_size


def _check_speculation(
    speculation: NgramSpeculation | None, batch_invariant: bool, vocab_size: int
) -> None:
    if speculation is None:
        return
    if not isinstance(speculation, NgramSpeculation):
        raise TypeError(
            f"speculation must be a NgramSpeculation or None, got {type(speculation).__name__}"
        )
    if batch_invariant:
        raise ValueError(
            "speculation must be None where batch_invariant is True, got a NgramSpeculation: how many tokens a pass has "
            "would depend on the batch, and so would bits; leave one of the two out"
        )
    if vocab_size > MAX_VOCAB_SIZE:
        raise NotImplementedError(
            f"speculation needs a vocabulary of at most {MAX_VOCAB_SIZE} tokens, got {vocab_size}: leave it out"
        )


def _longest_row(longest: int, pages: int, page_size: int) -> int:
    """Tokens of the longest sequence: all that the pages hold, and one behind them, which is not stored."""
    return min(longest, pages * page_size + 1)


def _check_rows(max_num_seqs: int, max_length: int, page_size: int, device: torch.device) -> None:
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    needed = SequenceRows.bytes_of(max_num_seqs, max_length, page_size)
    if needed > memory:
        raise ValueError(
            f"max_num_seqs rows of {max_length} tokens must fit into the {memory / 2**30:.1f} GiB of {device}, got "
            f"max_num_seqs = {max_num_seqs}, which needs {needed / 2**30:.1f} GiB: give fewer, a smaller max_model_len "
            "or fewer pages"
        )


def _default_pages(
    max_num_seqs: int, longest: int, page_size: int, page_bytes: int, device: torch.device,
    group: dist.ProcessGroup | None,
) -> int:  # fmt: skip
    """For max_num_seqs of the longest sequences, or what fits beside the rows of their tokens; the same on all ranks of the
    group. page_size: of all ranks together."""
    free = _CPU_BYTES
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0] * _GPU_SHARE)
    enough = max_num_seqs * -(-longest // page_size)
    # Rows grow with the pages up to the longest sequence: there are as many as either count allows.
    per_page = SequenceRows.bytes_of(max_num_seqs, page_size, page_size)
    all_rows = SequenceRows.bytes_of(max_num_seqs, longest, page_size)
    fitting = max(free // (page_bytes + per_page), (free - all_rows) // page_bytes)
    pages = max(min(enough, fitting), 1)
    if group is not None:
        smallest = torch.tensor(pages, device=device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN, group=group)
        pages = int(smallest)
    return pages


def _expect_positive(**sizes: int | None) -> None:
    for name, value in sizes.items():
        if value is None and name in ("max_model_len", "pages"):
            continue
        if type(value) is not int:
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


def _expect_bool(**named: object) -> None:
    for name, value in named.items():
        if type(value) is not bool:
            raise TypeError(f"{name} must be a bool, got {value!r}")
