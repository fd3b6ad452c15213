"""`fdattn bench serve`: the engine in this process, or on the ranks of torchrun, and its peers; or a running server."""

from __future__ import annotations

import gc
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torch_fdattn import stdout
from torch_fdattn.cli.errors import UsageError
from torch_fdattn.cli.setup import DType, EngineOptions, check_ranks
from torch_fdattn.cli.world import World
from torch_fdattn.models import Transformer
from torch_fdattn.server.bench.in_process import run_workload, trace_workload
from torch_fdattn.server.bench.memory_limit import measure_ceilings, memory_limit
from torch_fdattn.server.bench.over_http import run_against
from torch_fdattn.server.bench.peers import PEERS, missing_package, run_peer
from torch_fdattn.server.bench.peers.checkpoint import save_checkpoint
from torch_fdattn.server.bench.report import figure_lines, write_record
from torch_fdattn.server.bench.workload import Workload, make_workload


def run_served(
    url: str, num_requests: int, lengths: tuple[int, int], rate: float | None, api_key: str | None, out: Path | None,
) -> int:  # fmt: skip
    """Against a server; exit code 1 where a request failed."""
    # Prompts are of the first ids alone, so the vocabulary's size is of no concern.
    workload = _workload(num_requests, lengths, vocab_size=1 << 30)
    served = run_against(url, workload, rate=rate, api_key=api_key)
    arrivals = "all at once" if rate is None else f"{rate:g} requests/s (Poisson)"
    record: dict[str, Any] = {"url": url, "rate": rate, "failures": served.failures}
    if len(served.failures) < num_requests:
        figures = served.run.figures()
        _print(figure_lines(f"{url}, {arrivals}", figures))
        record |= figures
    for failure, count in _counts(served.failures).items():
        _print([f"{count} of {num_requests} requests failed: {failure}"])
    _write(out, record)
    return int(bool(served.failures))


def run_here(
    world: World, shape: str, dtype: DType, num_requests: int, lengths: tuple[int, int], options: EngineOptions,
    peers: list[str], repeats: int, out: Path | None, trace: Path | None = None,
) -> int:  # fmt: skip
    """In this process, with random weights of a published shape; each peer in a process of its own.

    On several ranks all make the same calls, and rank 0 tells.
    """
    from torch_fdattn.models import named_config, random_model

    def tell(lines: list[str]) -> None:
        if world.rank == 0:
            _print(lines)

    check_ranks(options.tensor_parallel, world)
    for name, given in (("peer", peers), ("trace", trace)):
        if given and world.size > 1:
            raise UsageError(f"--{name} is for one process: start it without torchrun")
    _check_peers(peers)
    if trace is not None:  # before a long run
        try:
            trace.write_bytes(b"")
        except OSError as error:
            raise UsageError(f"--trace {trace}: {error.strerror}") from None
    config = named_config(shape)
    workload = _workload(num_requests, lengths, config.vocab_size)
    options = replace(options, max_model_len=options.max_model_len or workload.max_length + 1)
    on_cpu = world.device.type == "cpu"
    kind = ("float32" if on_cpu else "bfloat16") if dtype is DType.auto else dtype.value
    weights_dtype = getattr(torch, kind)
    limit = memory_limit(
        config, workload, dtype=weights_dtype,
        kv_dtype=options.stored,
        max_num_seqs=options.max_num_seqs, ceilings=measure_ceilings(world.device, weights_dtype),
        ranks=world.size, tensor_parallel=options.tensor_parallel,
    )  # fmt: skip
    where = f"{world.device}, each of {world.size} ranks" if world.size > 1 else world.device
    tell(
        [
            f"{shape}, {kind}, on {where}: {num_requests} requests, {workload.num_prompt_tokens:,} prompt tokens, "
            f"{workload.num_new_tokens:,} new tokens"
        ]
    )
    tell(limit.lines())
    model = random_model(config, dtype=weights_dtype, device=world.device)
    record: dict[str, Any] = {
        "shape": shape, "dtype": kind, "kv_dtype": options.kv_dtype.value, "ranks": world.size,
        "tensor_parallel": options.tensor_parallel, "limit": limit.record(), "runs": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        if peers:
            _save(model, Path(folder))
        llm = options.make(model, None, world)
        runs = [x.figures() for x in run_workload(llm, workload, repeats)]
        record["runs"]["torch_fdattn"] = runs
        tell(figure_lines("torch_fdattn", _best(runs), limit.seconds))
        if options.ngram_tokens:
            stats = llm.stats()  # of all runs
            record["speculation"] = {"proposed": stats.proposed_tokens, "accepted": stats.accepted_tokens}  # fmt: skip
            tell([f"  n-grams: {stats.accepted_tokens:,} of {stats.proposed_tokens:,} proposed tokens accepted"])  # fmt: skip
        if trace is not None:
            tell([trace_workload(llm, workload, trace).table(), f"trace, for ui.perfetto.dev: {trace}"])  # fmt: skip
        del model, llm
        gc.collect()
        torch.cuda.empty_cache()  # nothing where there is no GPU
        for peer in peers:
            runs = [
                {**x._asdict(), "requests": num_requests, "tokens_per_s": x.new_tokens / x.seconds}
                for x in run_peer(peer, Path(folder), workload, repeats)
            ]
            record["runs"][peer] = runs
            tell(figure_lines(peer, _best(runs), limit.seconds))
    if world.rank == 0:
        _write(out, record, world.device)
    return 0


def _workload(num_requests: int, lengths: tuple[int, int], vocab_size: int) -> Workload:
    try:
        return make_workload(num_requests, lengths, vocab_size)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _check_peers(peers: list[str]) -> None:
    for peer in peers:
        if peer not in PEERS:
            raise UsageError(f"--peer must be one of {', '.join(PEERS)}, got {peer}")
        if package := missing_package(peer):
            raise UsageError(f"--peer {peer} needs the package {package}, which is not installed")


def _save(model: Transformer, folder: Path) -> None:
    try:
        save_checkpoint(model, folder)
    except NotImplementedError as error:
        raise UsageError(f"--peer: {error}") from None


def _best(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return min(runs, key=lambda x: x["seconds"])


def _counts(failures: list[str]) -> dict[str, int]:
    return {x: failures.count(x) for x in dict.fromkeys(failures)}


def _print(lines: list[str]) -> None:
    stdout.write("\n".join(lines) + "\n")


def _write(out: Path | None, record: dict[str, Any], device: torch.device | None = None) -> None:
    if out is None:
        return
    try:
        write_record(out, record, device)
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror}") from None
