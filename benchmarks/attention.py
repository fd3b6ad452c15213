"""Prefill and training attention: forward and backward TFLOP/s, and errors against fp64.

FLOPs by the usual convention (shapes.py); times alone where a case has a feature (features.py). Forward runs
without gradients, except for peers that would compile a second time for it. Backward is timed alone:
`torch.autograd.grad` on one saved graph. Both by event timing behind a flushed L2. Errors are of the last
sequence's last KV head (exact.py).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from . import features, peers
from .exact import Exact, HeadSlice, exact_attention, max_abs_err
from .floors import record_matmul
from .peers import Attention, Implementation
from .peers.tiled import swept
from .ranks import Ranks
from .registry import FEATURE_PEERS, PEERS, TILE_SIZES, comma_separated
from .results import Recorder
from .runner import DTYPES, Run, chosen_cases, generator
from .shapes import AttentionCase

Inputs = tuple[Tensor, Tensor, Tensor]
PASSES = ("forward", "backward")


def run(options: argparse.Namespace, ranks: Ranks, recorder: Recorder) -> bool:
    from torch_fdattn.environment import interpreting

    passes = comma_separated(options.passes)
    if not set(passes) <= set(PASSES):
        raise ValueError(f"--passes must be of {', '.join(PASSES)}, got {options.passes!r}")
    sizes, unasked = _tile_sizes(options), options.vs == PEERS["attention"]
    if options.features:
        ours, *others = peers.chosen(FEATURE_PEERS if unasked else options.vs, peers.FEATURED)
    else:  # a sweep over tiles compares ours with ours, unless peers are named
        ours, *others = peers.chosen("none" if sizes and unasked else options.vs)
    tiled = swept(ours, sizes)
    if tiled and options.device == "cpu" and not interpreting(os.environ):
        raise ValueError(
            "tile sizes need kernels: a GPU or TRITON_INTERPRET=1, got --device cpu alone"
        )
    implementations = (ours, *tiled, *others)
    measure(Run.of(options, ranks, recorder, implementations), chosen_cases(options), passes)
    return True


def _tile_sizes(options: argparse.Namespace) -> dict[str, list[int]]:
    """The sizes of a sweep over tiles, empty where none is asked for."""
    return {name: x for name in TILE_SIZES if (x := getattr(options, name)) is not None}


def file_name(options: argparse.Namespace) -> str:
    """The documents show the newest file of each name: no other run takes the baselines' place."""
    name = "attention-features" if options.features else "attention"
    return f"{name}-tiles" if _tile_sizes(options) else name


def measure(run: Run, cases: Sequence[AttentionCase], passes: Sequence[str]) -> None:
    """Measures `cases`; `passes` are of PASSES."""
    if run.timer.device.type == "cuda":
        record_matmul(run.recorder, run.timer, run.repeats)
    run.cases(cases, lambda case, impls: _Measurement(run, case, passes).measure(impls))


class _Measurement:
    """One case: inputs, the exact answer, and the implementations prepared so far."""

    def __init__(self, run: Run, case: AttentionCase, passes: Sequence[str]) -> None:
        self.run, self.case, self.passes = run, case, passes
        self.recorder, self.device = run.recorder, run.timer.device
        self.guard = functools.partial(run.guard, case.name)
        self.backward = "backward" in passes
        made = generator(self.device, 0)
        q_shape = (case.batch, case.heads, case.seq_len, case.head_dim)
        kv_shape = (case.batch, case.kv_heads, case.seq_len, case.head_dim)
        self.dout, *qkv = (
            torch.randn(shape, generator=made, device=self.device, dtype=DTYPES[case.dtype])
            for shape in (q_shape, q_shape, kv_shape, kv_shape)
        )
        self.slice = HeadSlice(case.heads // case.kv_heads)
        self.extras = features.extras_of(case, self.device) if case.feature else None
        self.trained = self.extras.trained if self.extras and self.backward else ()
        self.exact = None if case.feature == "dropout" else self._exact(*qkv)
        self._inputs = {"BHSD": self._leaves(qkv)}

    def measure(self, implementations: Sequence[Implementation]) -> None:
        prepared: list[tuple[Implementation, Attention]] = []
        for impl in implementations:
            with self.guard(impl.name, "first call"), impl.session():
                call = impl.attention(self.case, self.device)
                with torch.set_grad_enabled(self.backward and impl.forward_with_grad):
                    out = call(*self.inputs(impl))
                if self.exact is not None:
                    pairs = [(self.slice.queries(out), self.exact.out)]
                    self._record_error(impl, "max_abs_err", pairs)
                self._record_peak(impl, call)
                prepared.append((impl, call))
        for step, make, flops in (
            ("forward", self._forward_call, self.case.forward_flops),
            ("backward", self._backward_call, self.case.backward_flops),
        ):
            if step in self.passes:
                self._speeds(step, flops, self._samplers(step, prepared, make))

    def _record_peak(self, impl: Implementation, attention: Attention) -> None:
        """What a call, with its backward where that is measured, allocates at most besides its inputs."""
        if self.device.type != "cuda":
            return
        inputs, backward = self.inputs(impl), self.backward and impl.differentiable
        with self._timed(impl, backward):
            gc.collect()  # what another left in cycles must not go while this one's is counted
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            out = attention(*inputs)
            if backward:
                torch.autograd.grad(out, (*inputs, *self.trained), self.dout)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        self.recorder.add(self.case.name, impl.name, "peak_MiB", peak / 2**20)

    def inputs(self, impl: Implementation) -> Inputs:
        """Leaves in the memory order that the implementation is meant for."""
        if impl.memory not in self._inputs:
            turned = (x.detach().transpose(1, 2).contiguous() for x in self._inputs["BHSD"])
            self._inputs[impl.memory] = self._leaves([x.transpose(1, 2) for x in turned])
        return self._inputs[impl.memory]

    def _leaves(self, tensors: Sequence[Tensor]) -> Inputs:
        q, k, v = (x.requires_grad_(self.backward) for x in tensors)
        return q, k, v

    def _exact(self, q: Tensor, k: Tensor, v: Tensor) -> Exact:
        part, options = self.slice, dict(causal=self.case.causal)
        if self.extras is not None:
            options = features.exact_options(self.case, self.extras, part.group)
        dout = part.queries(self.dout) if self.backward else None
        return exact_attention(part.queries(q), part.keys(k), part.keys(v), dout, **options)

    @contextlib.contextmanager
    def _timed(self, impl: Implementation, grad: bool) -> Iterator[None]:
        with impl.session(), torch.set_grad_enabled(grad):
            yield

    def _samplers(
        self,
        step: str,
        prepared: Sequence[tuple[Implementation, Attention]],
        make: Callable[[Implementation, Attention], tuple[Callable[[], object], bool]],
    ) -> dict[str, Callable[[], float]]:
        """Samplers by implementation; `make` gives the call to time and its gradient mode."""
        samplers = {}
        for impl, attention in prepared:
            with self.guard(impl.name, step):
                call, grad = make(impl, attention)
                with self._timed(impl, grad):
                    sample = self.run.timer.sampler(call)
                samplers[impl.name] = functools.partial(self._sampled, impl, grad, sample)
        return samplers

    def _sampled(self, impl: Implementation, grad: bool, sample: Callable[[], float]) -> float:
        with self._timed(impl, grad):
            return sample()

    def _forward_call(
        self, impl: Implementation, attention: Attention
    ) -> tuple[Callable[[], object], bool]:
        inputs = self.inputs(impl)
        return lambda: attention(*inputs), self.backward and impl.forward_with_grad

    def _backward_call(
        self, impl: Implementation, attention: Attention
    ) -> tuple[Callable[[], object], bool]:
        """The backward of one saved graph; its first result is checked."""
        if not impl.differentiable:
            raise NotImplementedError(f"{impl.name} is forward only")
        inputs = self.inputs(impl)
        with self._timed(impl, True):
            out = attention(*inputs)
            leaves = (*inputs, *self.trained)
            call = functools.partial(torch.autograd.grad, out, leaves, self.dout, retain_graph=True)
            dq, dk, dv, *_ = call()
        if self.exact is not None:
            exact, part = self.exact, self.slice
            found = (part.queries(dq), part.keys(dk), part.keys(dv))
            pairs = zip(found, (exact.dq, exact.dk, exact.dv), strict=True)
            self._record_error(impl, "grad_max_abs_err", list(pairs))
        return call, True

    def _record_error(
        self, impl: Implementation, metric: str, pairs: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        error = max(max_abs_err(value.detach(), exact) for value, exact in pairs)
        self.recorder.add(self.case.name, impl.name, metric, error)

    def _speeds(self, step: str, flops: float, samplers: dict[str, Callable[[], float]]) -> None:
        short = {"forward": "fwd", "backward": "bwd"}[step]
        if self.case.feature:
            self.run.record(self.case.name, f"{short}_us", samplers)
        else:
            rate = lambda us: flops / us / 1e6  # noqa: E731
            self.run.record(self.case.name, f"{short}_TFLOPs", samplers, rate)
