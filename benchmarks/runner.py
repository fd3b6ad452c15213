"""From a command line to a results file: `run` does this for every benchmark of `registry.py`.

A benchmark's module has a function of its name, or `run`: (options, ranks, recorder) → whether all that was
computed is right. It may have `table(results)`, which is printed in place of all tables, `file_name(options)`,
where runs of different kinds have files of their own, and `default_path(options)`.

`Run` is the loop over cases that benchmarks on one device share. Nothing that was asked for vanishes: what
cannot run, fails or comes too late has a row that says so.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .cases import select
from .distributed import mpi, parallel_options
from .ranks import Ranks, alone, join, start_ranks, under_torchrun
from .registry import Benchmark, cases_of
from .report.tables import render
from .results import Recorder, Results, collect_meta, describe, output_path
from .shapes import Case
from .timing import DeviceLost, Sample, Timer, interleave, release

if TYPE_CHECKING:
    from .peers import Implementation

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """The exit status: 1 where a check fails."""
    benchmark: Benchmark = options.benchmark
    for flag in benchmark.positive():
        value = getattr(options, flag.removeprefix("--").replace("-", "_"))
        if value is not None and value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
    if benchmark.over_ranks or (benchmark.may_be_over_ranks and under_torchrun()):
        return _over_ranks(options, argv)
    if benchmark.cases:
        chosen_cases(options)  # a typo is said at once
    if getattr(options, "peers_dir", None) is not None:
        import site

        site.addsitedir(options.peers_dir)
    return measure(options, argv, alone(_device(options.device)))


def chosen_cases(options: argparse.Namespace) -> list:
    cases = cases_of(options, options.benchmark.name)
    tiny_only = options.device == "cpu" and options.benchmark.name != "cpu"
    return select(cases, options.cases, tiny_only=tiny_only)


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ValueError("--device must be cpu on a machine without CUDA, got cuda")
    if device.index is not None:
        torch.cuda.set_device(device)
    return torch.device("cuda", torch.cuda.current_device())


def _over_ranks(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """On the ranks that torchrun or mpirun started, or that --gpus asks for."""
    gpus = getattr(options, "gpus", None)
    here = os.environ.get("LOCAL_WORLD_SIZE") or gpus or 1
    parallel_options.interpret_on_cpu(options, int(here))
    parallel_options.check(options)
    if torchrun := under_torchrun():
        size = int(os.environ["WORLD_SIZE"])
        if gpus not in (None, size):
            raise ValueError(
                f"--gpus must be {size} like torchrun's WORLD_SIZE, or left out, got {gpus}"
            )
    else:
        count = gpus or (2 if options.benchmark.name == "ring" else 1)
        if count > 1:
            return start_ranks(count, argv)
    ranks = join(options.device)
    try:
        status = measure(options, argv, ranks)
        torch.distributed.barrier()  # none leaves while another still talks to it
    finally:
        torch.distributed.destroy_process_group()
    if torchrun:
        # With gloo about one process in thirty aborts in a static destructor after main ("terminate called
        # without an active exception", torch 2.13): everything is written, so leave without them.
        sys.stdout.flush()
        sys.stderr.flush()
        mpi.finish()
        os._exit(status)
    return status


def measure(options: argparse.Namespace, argv: Sequence[str], ranks: Ranks) -> int:
    """On ranks that are there; rank 0 writes and shows the results."""
    benchmark: Benchmark = options.benchmark
    if hasattr(options, "dtype"):
        options.dtype = options.dtype or ("fp32" if ranks.device.type == "cpu" else "bf16")
    parallel_options.check_method(options, ranks.device.type)
    module = importlib.import_module(f".{benchmark.module}", __package__)
    function = getattr(module, benchmark.name, None) or module.run
    named = getattr(module, "file_name", lambda _: benchmark.name.replace("_", "-"))
    default = getattr(module, "default_path", lambda _: None)
    meta = collect_meta(argv, ranks.device, ranks.size, mpi.under_mpirun())
    path = None
    if ranks.rank == 0:
        path = output_path(options.json or default(options), meta, named(options))
    recorder = Recorder(Results(meta), path)
    try:
        holds = function(options, ranks, recorder)
    finally:
        # What a run that fails has measured; a wrong command measured nothing.
        if recorder.results.rows:
            recorder.save()
    if ranks.rank == 0:
        show(recorder, options.html, getattr(module, "table", render))
    return 0 if holds else 1


def show(recorder: Recorder, html: str | None, table: Callable[[Results], str] = render) -> None:
    """Prints a run's tables and where they are written, and writes the page that was asked for."""
    print((table(recorder.results) or render(recorder.results)).rstrip("\n"))
    if recorder.path is None:
        print("\nNot written: figures from a CPU are not results (--json FILE writes them).")
    else:
        print(f"\nWritten to {recorder.path}")
    if html is not None:
        from .report.html_page import write_html

        print(f"Written to {write_html(recorder.results, html)}")


@dataclass
class Budget:
    """Seconds after which no new case starts; None is unbounded."""

    seconds: float | None
    clock: Callable[[], float] = time.monotonic
    _begin: float = field(init=False)

    def __post_init__(self) -> None:
        self._begin = self.clock()

    @property
    def spent(self) -> float:
        return self.clock() - self._begin

    @property
    def over(self) -> bool:
        return self.seconds is not None and self.spent >= self.seconds


@dataclass
class Run:
    """What a benchmark measures with and where it writes."""

    timer: Timer
    recorder: Recorder
    implementations: Sequence[Implementation]
    repeats: int
    budget: Budget

    @classmethod
    def of(
        cls, options: argparse.Namespace, ranks: Ranks, recorder: Recorder,
        implementations: Sequence[Implementation] = (),
    ) -> Run:  # fmt: skip
        """As a command line asks for it."""
        budget = Budget(options.budget_s)
        return cls(Timer(ranks.device), recorder, implementations, options.repeats, budget)

    def cases(
        self,
        cases: Sequence[Case],
        measure: Callable[[Case, Sequence[Implementation]], None],
        floors: Sequence[str] = (),
    ) -> None:
        """Calls `measure` for each case with the implementations that can run here."""
        usable: list[Implementation] = []
        for impl in self.implementations:
            reason = impl.available(self.timer.device)
            if reason is None:
                usable.append(impl)
            else:
                for case in cases:
                    self.recorder.error(case.name, impl.name, f"not available: {reason}")
        usable_names = [*floors, *(impl.name for impl in usable)]
        self.recorder.expect((case.name for case in cases), usable_names)
        self.recorder.save()
        stop: str | None = None
        for case in cases:
            if stop is None and self.budget.over:
                stop = f"budget of {self.budget.seconds:g} s was spent"
            if stop is not None:
                self.recorder.came(case.name)
                for name in usable_names:
                    self.recorder.not_measured(case.name, name, stop)
                continue
            begin = self.budget.spent
            try:
                measure(case, usable)
            except DeviceLost as lost:
                stop = f"device lost in {case.name}: {describe(lost)}"
            except Exception as failure:
                for name in usable_names:
                    self.recorder.error(case.name, name, f"case: {describe(failure)}")
            if stop is None:
                release(self.timer.device)
            self.recorder.came(case.name)
            self.recorder.save()
            taken = self.budget.spent - begin
            print(f"{case.name}: {taken:.1f} s", file=sys.stderr, flush=True)
        self.recorder.save()

    def guard(self, case: str, impl: str, step: str) -> contextlib.AbstractContextManager[None]:
        """Turns a failure inside into an error row; raises DeviceLost where nothing can go on."""
        return self.recorder.guard(case, impl, step, self.timer.check_device)

    def record(
        self, case: str, metric: str, samplers: Mapping[str, Callable[[], float]],
        as_value: Callable[[float], float] = lambda median: median,
    ) -> dict[str, Sample]:  # fmt: skip
        """Takes samples in turns and adds their medians' values; failures become error rows."""
        samples, failures = interleave(samplers, self.repeats)
        for name, failure in failures.items():
            self.recorder.error(case, name, f"{metric}: {describe(failure)}")
            self.timer.check_device(failure)
        for name, sample in samples.items():
            value = as_value(sample.median)
            self.recorder.add_sample(case, name, metric, value, sample.spread)
        return samples
