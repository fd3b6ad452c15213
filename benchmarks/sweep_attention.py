"""Sweeps the tile configs of torch_fdattn's attention kernels and prints the best of each case.

    python -m benchmarks.sweep_attention --cases "hd128 4k causal,hd128 16k causal" \
        [--kernels forward,dkdv,dq] [--configs 128x64w8s3,64x128w8s2] [--budget-s 200]

A config reads BLOCK_M x BLOCK_N w num_warps s num_stages; without --configs those of candidates.py
are tried. Each kernel is timed alone: the backward's other sweep is left out, and the time of the delta
kernel, which both need, is taken off. All configs of a case compile first, in threads. A config
that does not fit, or whose result differs from the default's by more than rounding, is reported and
cannot win. For tuning: what it prints are no results, and configs.py records what was chosen and
why.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from torch_fdattn.ops.attention.candidates import candidates, parse_configs
from torch_fdattn.ops.attention.configs import TileConfig
from torch_fdattn.ops.attention.trials import difference

from .cases import ATTENTION_CASES, select
from .results import describe
from .runner import DTYPES, Budget, generator
from .shapes import AttentionCase
from .timing import Timer

KERNELS = ("forward", "dkdv", "dq")


class Problem(NamedTuple):
    """One kernel on one case: `launch(config)` runs it into `outputs`."""

    flops: float
    default: TileConfig
    launch: Callable[[TileConfig], None]
    outputs: tuple[Tensor, ...]
    overhead_us: float = 0.0  # of what `launch` runs besides the kernel


class Measured(NamedTuple):
    config: TileConfig
    us: float
    rate: float  # TFLOP/s of this kernel alone


@contextlib.contextmanager
def problem(kernel: str, case: AttentionCase, timer: Timer) -> Iterator[Problem]:
    """The named kernel with inputs of the case; valid inside the context."""
    from torch_fdattn.ops.attention import backward, configs, forward
    from torch_fdattn.ops.options import AttentionOptions
    from torch_fdattn.ops.positions import Mask

    made = generator(timer.device, 0)
    q_shape = (case.batch, case.heads, case.seq_len, case.head_dim)
    kv_shape = (case.batch, case.kv_heads, case.seq_len, case.head_dim)
    q, dout, k, v = (
        torch.randn(shape, generator=made, device=timer.device, dtype=DTYPES[case.dtype])
        for shape in (q_shape, q_shape, kv_shape, kv_shape)
    )
    mask = Mask(window_right=0 if case.causal else -1)
    options = AttentionOptions(mask, case.head_dim**-0.5)
    like = (case.head_dim, q.dtype, configs.device_capability(timer.device))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    def launch_forward(config: TileConfig) -> None:
        forward.launch_forward(q, k, v, options, out, lse, config=config)

    if kernel == "forward":
        default = configs.forward_config(*like, forward.has_borders(mask, case.seq_len))
        yield Problem(case.forward_flops, default, launch_forward, (out, lse))
        return

    launch_forward(configs.forward_config(*like))
    both = configs.backward_config(*like)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))

    def launch_backward(config: TileConfig) -> None:
        chosen = dataclasses.replace(both, **{kernel: config})
        backward.launch_backward(dout, None, q, k, v, out, lse, options, dq, dk, dv, config=chosen)

    default = getattr(both, kernel)
    with _left_out(backward, "_dq_kernel", "_dkdv_kernel"):
        overhead = timer.sampler(lambda: launch_backward(default), target_us=20e3)()
    # Of the seven matmuls of the two sweeps (forward has two), dK/dV takes four and dQ three.
    flops = case.forward_flops * (2 if kernel == "dkdv" else 1.5)
    outputs, other = ((dk, dv), "_dq_kernel") if kernel == "dkdv" else ((dq,), "_dkdv_kernel")
    with _left_out(backward, other):
        yield Problem(flops, default, launch_backward, outputs, overhead)


def _left_out(module: object, *kernels: str) -> contextlib.AbstractContextManager:
    """Launching these kernels does nothing meanwhile."""
    return mock.patch.multiple(module, **{name: mock.MagicMock() for name in kernels})


def compile_all(
    launch: Callable[[TileConfig], None], configs: Sequence[TileConfig], jobs: int
) -> dict[TileConfig, str]:
    """Compiles by launching each once, in threads; gives why the ones that failed did."""

    def attempt(config: TileConfig) -> str | None:
        try:
            launch(config)
        except Exception as failure:
            return describe(failure)
        return None

    with ThreadPoolExecutor(jobs) as pool:
        reasons = dict(zip(configs, pool.map(attempt, configs), strict=True))
    return {config: reason for config, reason in reasons.items() if reason is not None}


def sweep(
    given: Problem, configs: Sequence[TileConfig], timer: Timer, jobs: int, budget: Budget
) -> tuple[list[Measured], dict[TileConfig, str]]:
    """(what was measured, fastest first; why the others were not)."""
    configs = list(dict.fromkeys([given.default, *configs]))
    given.launch(given.default)
    expected = [x.clone() for x in given.outputs]
    rejected = compile_all(given.launch, configs[1:], jobs)
    timer.synchronize()
    measured = []
    for config in configs:
        if config in rejected:
            continue
        if budget.over:
            rejected[config] = f"not measured: budget of {budget.seconds:g} s was spent"
            continue
        for output in given.outputs:
            output.fill_(float("nan"))
        given.launch(config)
        if (wrong := difference(given.outputs, expected)) is not None:
            rejected[config] = wrong
            continue
        taken = (
            timer.sampler(functools.partial(given.launch, config), target_us=30e3)()
            - given.overhead_us
        )
        measured.append(Measured(config, taken, given.flops / max(taken, 1e-3) / 1e6))
    return sorted(measured, key=lambda m: m.us), rejected


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sweep_attention", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--cases", default="hd128 4k causal", metavar="TEXT")
    parser.add_argument("--kernels", default=",".join(KERNELS), metavar="A,B")
    parser.add_argument("--configs", metavar="A,B", help="instead of the built-in lists")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=8, help="threads that compile (default: 8)")
    parser.add_argument("--budget-s", type=float, metavar="S")
    options = parser.parse_args(arguments)
    kernels = options.kernels.split(",")
    if unknown := set(kernels) - set(KERNELS):
        parser.error(f"--kernels must be of {', '.join(KERNELS)}, got {', '.join(sorted(unknown))}")
    device = torch.device(options.device)
    # On a CPU the kernels run in Triton's interpreter, which is not safe for threads.
    jobs = 1 if device.type == "cpu" else options.jobs
    timer, budget = Timer(device), Budget(options.budget_s)
    try:
        cases = select(ATTENTION_CASES, options.cases, tiny_only=device.type == "cpu")
    except ValueError as failure:
        parser.error(str(failure))
    best = []
    for kernel in kernels:
        for case in cases:
            if budget.over:
                best.append(f"{case.label:24} {kernel:8} not measured: budget spent")
                continue
            with problem(kernel, case, timer) as given:
                configs = candidates(kernel, case.head_dim, DTYPES[case.dtype])
                if options.configs:
                    configs = parse_configs(options.configs)
                measured, rejected = sweep(given, configs, timer, jobs, budget)
            print(f"{case.label} {kernel}", flush=True)
            for m in measured:
                default = "  (default)" if m.config == given.default else ""
                print(f"  {m.config!s:14} {m.us:9.1f} µs {m.rate:7.1f} TFLOP/s{default}")
            for config, reason in rejected.items():
                print(f"  {config!s:14} {reason}")
            if measured:
                default_us = next((m.us for m in measured if m.config == given.default), None)
                gain = f"{default_us / measured[0].us:.2f}× the default" if default_us else ""
                best.append(
                    f"{case.label:24} {kernel:8} {measured[0].config!s:14} "
                    f"{measured[0].us:9.1f} µs {measured[0].rate:7.1f} TFLOP/s {gain}"
                )
    print("\nbest:\n" + "\n".join(best))
    return 0


if __name__ == "__main__":
    sys.exit(main())
