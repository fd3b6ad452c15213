"""Times torch_fdattn's attention kernels, each alone, at lists of tile configs.

    python -m benchmarks.sweep_attention --cases "hd128 4k causal,hd128 16k causal" \
        [--kernels forward,dkdv,dq] [--configs 128x64w8s3,64x128w8s2] [--budget-s 200]

A config reads BLOCK_M x BLOCK_N w num_warps s num_stages; without --configs those of candidates.py are tried. The
backward's other sweep is left out, and the time of its first kernel, which both need, is taken off. All configs of a
case compile first, in threads. A config that does not fit, or whose result differs from the default's by more than
rounding, is reported and cannot win. For tuning: what it prints are no results, and configs.py records what was chosen.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn.ops.attention.candidates import candidates, parse_configs
from torch_fdattn.ops.attention.configs import TileConfig
from torch_fdattn.ops.attention.trials import difference

from .ranks import Ranks
from .registry import comma_separated
from .report.tables import failures, heading, join, markdown_table, values_of
from .results import Recorder, Results
from .runner import DTYPES, Run, chosen_cases, generator
from .shapes import AttentionCase

KERNELS = ("forward", "dkdv", "dq")
#: Of the seven matmuls of the two sweeps (forward has two), dK/dV takes four and dQ three.
WORK = {"forward": 1.0, "dkdv": 2.0, "dq": 1.5}
METRIC, DEFAULT = "TFLOPs_per_gpu", "fdattn"


class Problem(NamedTuple):
    """One kernel on one case: `launch(config)` runs it into `outputs`."""

    flops: float
    default: TileConfig
    launch: Callable[[TileConfig], None]
    outputs: tuple[Tensor, ...]
    overhead_us: float = 0.0  # of what `launch` runs besides the kernel


def run(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    kernels = comma_separated(options.kernels)
    if unknown := set(kernels) - set(KERNELS):
        raise ValueError(
            f"--kernels must be of {', '.join(KERNELS)}, got {', '.join(sorted(unknown))}"
        )
    asked = parse_configs(options.configs) if options.configs else None
    run = Run.of(options, ranks, recorder)
    # The kernel is the case's feature: part of its name.
    cases = [dataclasses.replace(x, feature=k) for k in kernels for x in chosen_cases(options)]

    def measured(case: AttentionCase, _: Sequence) -> None:
        configs = asked or candidates(str(case.feature), case.head_dim, DTYPES[case.dtype])
        # On a CPU the kernels run in Triton's interpreter, which is not safe for threads.
        jobs = 1 if ranks.device.type == "cpu" else options.jobs
        sweep(run, case.name, problem(case, run), configs, jobs)

    run.cases(cases, measured)
    return True


def file_name(options: argparse.Namespace) -> str:
    return "attention-sweep"


def default_path(options: argparse.Namespace) -> str:
    """In the current folder: these are no results."""
    return "attention-sweep.json"


def problem(case: AttentionCase, run: Run) -> Problem:
    """The kernel that the case's feature names, with inputs of the case."""
    from torch_fdattn.launch import launches
    from torch_fdattn.ops.attention import backward, configs, forward
    from torch_fdattn.ops.options import AttentionOptions
    from torch_fdattn.ops.positions import Mask

    kernel, device = str(case.feature), run.timer.device
    made = generator(device, 0)
    q_shape = (case.batch, case.heads, case.seq_len, case.head_dim)
    kv_shape = (case.batch, case.kv_heads, case.seq_len, case.head_dim)
    q, dout, k, v = (
        torch.randn(shape, generator=made, device=device, dtype=DTYPES[case.dtype])
        for shape in (q_shape, q_shape, kv_shape, kv_shape)
    )
    mask = Mask(window_right=0 if case.causal else -1)
    options = AttentionOptions(mask, case.head_dim**-0.5)
    like = (case.head_dim, q.dtype, configs.device_capability(device))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    flops = WORK[kernel] * case.forward_flops

    def launch_forward(config: TileConfig) -> None:
        forward.launch_forward(q, k, v, options, out, lse, config=config)

    if kernel == "forward":
        default = configs.forward_config(*like, forward.has_borders(mask, case.seq_len))
        return Problem(flops, default, launch_forward, (out, lse))

    launch_forward(configs.forward_config(*like))
    both = configs.backward_config(*like)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    sweeps = {"dkdv": backward._dkdv_kernel, "dq": backward._dq_kernel}

    def launch_backward(config: TileConfig, kernel: str | None) -> None:
        """Without any sweep but the kernel's."""
        left_out = {id(x) for name, x in sweeps.items() if name != kernel}
        chosen = both if kernel is None else dataclasses.replace(both, **{kernel: config})
        made = backward.backward_launches(
            dout, None, q, k, v, out, lse, options, dq, dk, dv, config=chosen
        )
        launches.run(x for x in made if id(x.kernel) not in left_out)

    default = getattr(both, kernel)
    overhead = run.timer.sampler(lambda: launch_backward(default, None), target_us=20e3)()
    outputs = (dk, dv) if kernel == "dkdv" else (dq,)
    return Problem(
        flops, default, functools.partial(launch_backward, kernel=kernel), outputs, overhead
    )


def sweep(run: Run, case: str, given: Problem, configs: Sequence[TileConfig], jobs: int) -> None:
    """Times the configs in turns; `fdattn` is the default, errors say why others were not timed."""
    given.launch(given.default)
    expected = [x.clone() for x in given.outputs]
    names = {given.default: DEFAULT} | {x: f"{DEFAULT}/{x}" for x in configs if x != given.default}
    with ThreadPoolExecutor(jobs) as pool:  # compiles by launching each once
        for config in names:
            pool.submit(given.launch, config)
    run.timer.synchronize()
    samplers = {}
    for config, name in names.items():
        for output in given.outputs:
            output.fill_(float("nan"))
        with run.guard(case, name, "first call"):
            given.launch(config)
            if (wrong := difference(given.outputs, expected)) is not None:
                raise ValueError(wrong)
            samplers[name] = run.timer.sampler(functools.partial(given.launch, config), 30e3)
    rate = lambda us: given.flops / max(us - given.overhead_us, 1e-3) / 1e6  # noqa: E731
    run.record(case, METRIC, samplers, rate)


def table(results: Results) -> str:
    """Each case's configs, fastest first."""
    parts = [heading(results, note="")]
    for case, rates in values_of(results, METRIC).items():
        ordered = sorted(rates, key=rates.__getitem__, reverse=True)
        rows = [
            [
                name.partition("/")[2] or "default",
                f"{rates[name]:.1f}",
                f"{rates[name] / rates[DEFAULT]:.2f}",
            ]
            for name in ordered
            if DEFAULT in rates
        ]
        parts.append(
            f"### {case}\n\n" + markdown_table(["config", "TFLOP/s", "of the default"], rows)
        )
    return join(*parts, failures(results))


if __name__ == "__main__":
    from .__main__ import main

    sys.exit(main(["sweep_attention", *sys.argv[1:]]))
