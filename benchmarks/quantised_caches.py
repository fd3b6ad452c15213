"""What a cache of one byte an element changes: a real model, teacher-forced over the pages in which `LLM` stores K and V.

Texts go through the model once with K and V in its own dtype and once in each format, in chunks, as `LLM` computes prompts.
Of the next token's distribution behind each token: the KL divergence from the first to the second, mean and largest, and
where the most likely token is the same; of the text: the perplexity.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.engine.prose import TEXT
from torch_fdattn.dist.kv_cache.scales import kv_format
from torch_fdattn.engine.paged_step import PagedKV, Prefills
from torch_fdattn.models import InferenceTransformer, load_model, load_tokenizer

from .cpu import processor
from .ranks import Ranks
from .results import Recorder
from .runner import DTYPES

PAGE_SIZE = 16
CHUNK = 256  # tokens of a pass
_ROWS = 64  # distributions that are compared at a time, in float64


class Comparison(NamedTuple):
    """Of one text; by the names of metrics."""

    kl_mean: float
    kl_max: float
    perplexity: float
    perplexity_change: float  # percent
    top1_agreement: float  # percent of the tokens


def file_name(options: argparse.Namespace) -> str:
    return f"quantised-caches-{options.dtype}"


def run(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    device = ranks.device
    if device.type == "cpu":
        recorder.results.meta["gpu"] = processor()
    model = load_model(options.model, dtype=DTYPES[options.dtype], device=device).for_inference()
    if options.tokens > (limit := model.config.max_positions):
        raise ValueError(f"--tokens must be at most the model's {limit}, got {options.tokens}")
    tokenizer = load_tokenizer(options.model)
    texts = {Path(name).stem: Path(name).read_text(encoding="utf-8") for name in options.texts}
    for name, text in (texts or {"prose": TEXT}).items():
        tokens = torch.tensor(tokenizer.encode(text)[: options.tokens], device=device)
        if len(tokens) < 2:
            raise ValueError(f"--texts must have two tokens at least, got {len(tokens)} of {name}")
        case = f"{options.model} {name} {len(tokens)} tokens {options.dtype}"
        exact = teacher_forced(model, tokens, None)
        for kv_dtype in options.kv_dtypes:
            found = compare(exact, teacher_forced(model, tokens, kv_dtype), tokens)
            for metric, value in found._asdict().items():
                recorder.add(case, kv_dtype, metric, value)
        loss = F.cross_entropy(exact[:-1].float(), tokens[1:])
        recorder.add(case, options.dtype, "perplexity", loss.exp())
        recorder.save()
    return True


@torch.inference_mode()
def teacher_forced(
    model: InferenceTransformer, tokens: Tensor, kv_dtype: str | None, chunk: int = CHUNK
) -> Tensor:
    """Logits (N, vocab) behind each of tokens (N,), K and V stored in kv_dtype; None: in the model's."""
    config, weight = model.config, model.norm.weight
    pages = -(-len(tokens) // PAGE_SIZE)
    kv = PagedKV(
        config.num_layers, pages, PAGE_SIZE, config.num_kv_heads, config.head_dim,
        dtype=weight.dtype, device=weight.device, form=kv_format(kv_dtype),
    )  # fmt: skip
    table = torch.arange(pages, dtype=torch.int32, device=weight.device)[None]
    logits = []
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        end = start + len(part)
        positions = torch.arange(start, end, device=weight.device)
        bounds = torch.tensor([0, len(part), end], dtype=torch.int32, device=weight.device)
        step = kv.step(
            positions, (positions // PAGE_SIZE).int(), None, Prefills(bounds[:2], table, bounds[2:]), False
        )  # fmt: skip
        logits.append(model.logits(step.hidden(model, part)))
    return torch.cat(logits)


def compare(exact: Tensor, quantised: Tensor, tokens: Tensor) -> Comparison:
    """Logits `quantised` (N, vocab) with `exact` ones, behind all of tokens (N,) but the last."""
    divergences, losses, agreeing = [], [], 0
    following = tokens[1:].split(_ROWS)
    for p, q, next_tokens in zip(exact[:-1].split(_ROWS), quantised[:-1].split(_ROWS), following, strict=True):  # fmt: skip
        p, q = (x.double().log_softmax(-1) for x in (p, q))
        divergences.append((p.exp() * (p - q)).sum(-1))
        losses.append(torch.stack([F.nll_loss(x, next_tokens, reduction="none") for x in (p, q)]))
        agreeing += int((p.argmax(-1) == q.argmax(-1)).sum())
    kl, (expected, own) = torch.cat(divergences), torch.cat(losses, 1).mean(1).exp().tolist()
    return Comparison(
        float(kl.mean()), float(kl.max()), own, 100 * (own / expected - 1), 100 * agreeing / len(kl)
    )
