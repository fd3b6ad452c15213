"""Whole models with random weights: one prefill, one decode step, or a whole generation.

Ours is the model over its cache, on GPUs its passes in CUDA graphs (static_batch.py); `eager` is eager PyTorch with NCCL on the
same weights and the same cache memory (peers/eager_parallel.py), one all-reduce after each layer; `torch_symm` the same
by torch's fused symmetric-memory ops. On one process ours is the plain model. `…_graph` is a decode step of
theirs in a CUDA graph.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from ..peers.eager_parallel import EAGER, Linears, TorchModel, fused
from ..ranks import Ranks, StepFailed, largest, mesh, together
from ..report import parallel
from ..report.parallel import IN_GRAPH, TORCH
from ..results import Recorder
from ..runner import DTYPES, generator
from ..timing import Call, captured, compare
from .layer_run import checked, marked, our_name
from .models import (
    config_named,
    kv_bytes,
    model_bytes,
    require_memory,
    sharded_model,
    unsharded_model,
)
from .parallel_options import file_name as file_name
from .static_batch import StaticBatch

table = parallel.table
Item = TypeVar("Item")
STEPS = 2  # room in the cache: the step that is timed is taken back each time
PREFILL_TOKENS = 65536  # of the whole batch in a pass, which bounds the activations


class _Model:
    """The parallel model, on one process the plain one, over its cache, and eager torch over the same memory."""

    def __init__(
        self, options: argparse.Namespace, ranks: Ranks, batch: int, capacity: int, strategy: str,
    ) -> None:  # fmt: skip
        self.ranks = ranks
        self.config = config_named(options.model, options.layers)
        dtype, kv_ranks = DTYPES[options.dtype], getattr(options, "kv_ranks", 1)
        tp, kv_group = mesh(ranks, kv_ranks) if kv_ranks > 1 else (ranks, None)
        needed = model_bytes(self.config, dtype, tp.size)
        needed += kv_bytes(self.config, dtype, tp.size, batch, -(-capacity // kv_ranks))
        # Logits and the widest activations.
        needed += 3 * batch * self.config.vocab_size * dtype.itemsize
        require_memory(f"{options.model} with batch {batch}", needed, ranks.device, ranks.size)
        (method,), (variant,) = options.allreduce_method, options.strategy
        if strategy == "auto":
            method = "auto"
        parts = (tp.group_name, strategy, method, variant)
        check = getattr(options, "check", False)
        plain = ranks.size == 1 and not check
        if plain:
            self.model = unsharded_model(self.config, ranks.device, dtype)
        elif check:
            from torch_fdattn.models.parallelize import parallelize

            whole = 2 * model_bytes(self.config, dtype, 1)  # to be split, and to compare with
            require_memory(f"the whole {options.model}", whole, ranks.device, ranks.size)
            self.model = parallelize(unsharded_model(self.config, ranks.device, dtype), *parts)
        else:
            self.model = sharded_model(self.config, ranks.device, dtype, *parts, tp.rank)
        chunk = max(1, PREFILL_TOKENS // batch)
        self.batch = StaticBatch(self.model, batch, capacity, chunk, kv_group)
        self.torch = TorchModel(self.model, self.batch.cache, ranks.size)
        self.strategy, self.dtype, self.kv_ranks = strategy, dtype, kv_ranks
        variant = method if strategy == "all_reduce" else variant
        self.ours = "fdattn" if plain else our_name(strategy, variant)

    def peers(self, tokens: int) -> dict[str, Linears]:
        """Eager torch, and torch's fused ops for steps of so many tokens; neither knows a cache that ranks share."""
        if self.kv_ranks > 1:
            return {}
        replicated = self.strategy == "all_reduce"
        hidden = self.config.hidden_size
        return {TORCH: EAGER, **fused(self.ranks, tokens, hidden, self.dtype, replicated)}

    def prompts(self, batch: int, length: int) -> torch.Tensor:
        made = generator(torch.device("cpu"), 0)
        return torch.randint(self.config.vocab_size, (batch, length), generator=made)


def e2e(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    """`--mode prefill`: a batch of prompts; `decode`: one step after them; `--check`: the logits."""
    strategy = "all_reduce" if options.use_allreduce else "ag_rs"
    capacity = options.seq_len + STEPS
    made = _Model(options, ranks, options.bsz, capacity, strategy)
    prompts = made.prompts(options.bsz, options.seq_len)
    holds = not options.check or _check(made, prompts, options, recorder)
    sizes = [
        f"bsz{options.bsz}",
        f"N{options.seq_len}",
        options.model,
        f"L{made.config.num_layers}",
    ]
    sizes += [f"kv{options.kv_ranks}"] if options.kv_ranks > 1 else []
    for mode in [options.mode] if options.mode else ["prefill", "decode"]:
        decode = mode == "decode"
        case = " ".join(("e2e", *sizes, options.dtype, f"x{ranks.size}", mode))
        case = marked(case, ranks.device)
        others, ours, back = _calls(made, prompts, decode)
        calls = {**_that_run(made, case, others, recorder, decode), made.ours: ours}
        timed = functools.partial(compare, ranks, recorder, case, repeats=options.repeats)
        medians = timed(calls=calls, before={made.ours: back})
        if decode and options.eager:
            made.batch.close()  # steps run eagerly from here on
            name = f"{made.ours}-eager"
            medians |= timed(calls={name: ours}, before={name: back})
        tokens = options.bsz * (1 if decode else options.seq_len)
        for impl, ms in medians.items():
            recorder.add(case, impl, "tokens_per_s", 1e3 * tokens / ms)
    made.batch.close()
    return holds


def _calls(made: _Model, prompts: torch.Tensor, decode: bool) -> tuple[dict[str, Call], Call, Call]:
    """(others' calls, ours, what takes ours back): the prompts, or the step behind them."""
    tokens, held = prompts.to(made.ranks.device), 0
    if decode:
        made.batch.truncate(0)
        made.batch(tokens)
        tokens, held = tokens[:, :1].contiguous(), prompts.shape[1]
    ours = functools.partial(made.batch, tokens)
    back = functools.partial(made.batch.truncate, held)
    peers = made.peers(tokens.numel()).items()
    return {x: functools.partial(made.torch, tokens, held, by) for x, by in peers}, ours, back


def _that_run(
    made: _Model, case: str, calls: Mapping[str, Call], recorder: Recorder, in_graphs: bool
) -> dict[str, Call]:
    """Those that run here, and, where asked for, replays of them: our decode step is a CUDA graph as well."""
    ranks = made.ranks
    variants, _ = checked(
        case, ranks, recorder, {x: [call] for x, call in calls.items()}, lambda *_: True
    )
    found = {}
    for name, (call,) in variants.items():
        found[name] = call
        if in_graphs and ranks.device.type == "cuda":
            try:
                graph = together(ranks, "graph", lambda call=call: captured(ranks, call))
                found[f"{name}{IN_GRAPH}"] = graph.replay
            except StepFailed as failure:
                recorder.error(case, name, str(failure))
    return found


def _check(
    made: _Model, prompts: torch.Tensor, options: argparse.Namespace, recorder: Recorder
) -> bool:
    """Logits of the prompts and of one step more against the whole model on one process."""
    whole = unsharded_model(made.config, made.ranks.device, DTYPES[options.dtype])
    tokens = torch.cat([prompts, prompts[:, :1]], 1).to(made.ranks.device)
    with torch.inference_mode():
        right = torch.stack([whole(tokens[:, :-1], last_only=True), whole(tokens, last_only=True)])
    del whole
    found = [made.batch(tokens[:, :-1]).clone(), made.batch(tokens[:, -1:])]
    made.batch.truncate(0)
    error = largest((torch.stack(found).double() - right[:, :, 0].double()).abs())
    bound = (1e-3 if options.dtype == "fp32" else 5e-2) * max(1.0, largest(right.double().abs()))
    holds = error <= bound < math.inf
    kv = f" kv{made.kv_ranks}" if made.kv_ranks > 1 else ""
    case = f"e2e bsz{options.bsz} N{options.seq_len} {options.model}{kv} x{made.ranks.size} check"
    recorder.add(case, made.ours, "max_abs_err", error)
    if made.ranks.rank == 0:
        verdict = "ok" if holds else "WRONG"
        print(f"check: largest error {error:.2e}, bound {bound:.2e}: {verdict}", flush=True)
    return holds


def e2e_inference(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    """`gen_len` greedy tokens a sequence, up to `max_length` in all: latency and tokens/s."""
    prompt_length = options.max_length - options.gen_len
    if prompt_length < 1:
        raise ValueError(
            f"--max-length must be more than --gen-len, got {options.max_length} and {options.gen_len}"
        )
    strategy = "all_reduce" if options.backend == "torch" else options.backend
    made = _Model(options, ranks, options.bsz, options.max_length, strategy)
    prompts = made.prompts(options.bsz, prompt_length)
    case = " ".join(map(str, (
        "e2e_inference", f"bsz{options.bsz}", f"gen{options.gen_len}", f"N{options.max_length}",
        options.model, f"L{made.config.num_layers}", options.dtype, f"x{ranks.size}",
    )))  # fmt: skip
    case = marked(case, ranks.device)
    runs = {TORCH: made.torch}
    if options.backend != "torch":
        runs[made.ours] = lambda tokens, held: made.batch(tokens)
    for name, run in runs.items():
        generate = functools.partial(_generate, made, name, run, prompts)
        generate(min(3, options.gen_len))  # compiles, and connects communicators
        dist.barrier()
        begin = time.perf_counter()
        generate(options.gen_len)
        seconds = torch.tensor([time.perf_counter() - begin], device=ranks.device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        recorder.add(case, name, "latency_ms", 1e3 * seconds.item())
        recorder.add(case, name, "tokens_per_s", options.bsz * options.gen_len / seconds.item())
    made.batch.close()
    return True


def _progress(steps: Iterable[Item], total: int, text: str, rank: int) -> Iterable[Item]:
    """The items, with a bar on rank 0's terminal where rich is installed."""
    if rank or not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        return steps
    from rich.console import Console
    from rich.progress import track

    return track(steps, text, total=total, console=Console(stderr=True), transient=True)


def _generate(
    made: _Model, name: str, run: Callable[[torch.Tensor, int], torch.Tensor], prompts: torch.Tensor, count: int
) -> None:  # fmt: skip
    """`count` greedy tokens behind the prompts; run: (tokens, how many are held) → logits after them."""
    made.batch.truncate(0)
    tokens, held = prompts.to(made.ranks.device), 0
    for _ in _progress(range(count), count, name, made.ranks.rank):
        logits = run(tokens, held)
        held += tokens.shape[1]
        tokens = logits.argmax(-1, keepdim=True)
        tokens.tolist()  # every token reaches the host, as it does from an engine
