"""Prefill and training attention: forward and backward TFLOP/s, and errors against fp64.

FLOPs by the usual convention (cases.py); times alone where a case has a feature (features.py). Forward runs without gradients, except for peers that
would compile a second time for it. Backward is timed alone: `torch.autograd.grad` on one saved
graph. Both by event timing behind a flushed L2. Errors are of the last sequence's last KV head
(exact.py).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from . import features
from .exact import Exact, HeadSlice, exact_attention, max_abs_err
from .floors import record_matmul
from .peers import Attention, Implementation
from .runner import DTYPES, Run, generator
from .shapes import AttentionCase

Inputs = tuple[Tensor, Tensor, Tensor]
PASSES = ("forward", "backward")


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
            with self._guard(impl, "first call"), impl.session():
                call = impl.attention(self.case, self.device)
                with self._forward_grad(impl):
                    out = call(*self.inputs(impl))
                if self.exact is not None:
                    pairs = [(self.slice.queries(out), self.exact.out)]
                    self._record_error(impl, "max_abs_err", pairs)
                self._record_peak(impl, call)
                prepared.append((impl, call))
        if "forward" in self.passes:
            samplers = self._samplers("forward", prepared, self._forward_call)
            self._speeds("fwd", self.case.forward_flops, samplers)
        if self.backward:
            samplers = self._samplers("backward", prepared, self._backward_call)
            self._speeds("bwd", self.case.backward_flops, samplers)

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
            turned = [
                x.detach().transpose(1, 2).contiguous().transpose(1, 2)
                for x in self._inputs["BHSD"]
            ]
            self._inputs[impl.memory] = self._leaves(turned)
        return self._inputs[impl.memory]

    def _leaves(self, tensors: Sequence[Tensor]) -> Inputs:
        q, k, v = (x.requires_grad_(self.backward) for x in tensors)
        return q, k, v

    def _exact(self, q: Tensor, k: Tensor, v: Tensor) -> Exact:
        part = self.slice
        dout = part.queries(self.dout) if self.backward else None
        q, k, v = part.queries(q), part.keys(k), part.keys(v)
        if self.extras is None:
            return exact_attention(q, k, v, dout, causal=self.case.causal)
        return exact_attention(
            q, k, v, dout, **features.exact_options(self.case, self.extras, part.group)
        )

    def _guard(self, impl: Implementation, step: str) -> contextlib.AbstractContextManager[None]:
        return self.recorder.guard(self.case.name, impl.name, step, self.run.timer.check_device)

    def _forward_grad(self, impl: Implementation) -> torch.set_grad_enabled:
        return torch.set_grad_enabled(self.backward and impl.forward_with_grad)

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
            with self._guard(impl, step):
                call, grad = make(impl, attention)
                with self._timed(impl, grad):
                    sample = self.run.timer.sampler(call)
                samplers[impl.name] = self._in_session(impl, grad, sample)
        return samplers

    def _in_session(
        self, impl: Implementation, grad: bool, sample: Callable[[], float]
    ) -> Callable[[], float]:
        def sampled() -> float:
            with self._timed(impl, grad):
                return sample()

        return sampled

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

            def call() -> tuple[Tensor, ...]:
                wanted = (*inputs, *self.trained)
                return torch.autograd.grad(out, wanted, self.dout, retain_graph=True)

            dq, dk, dv, *_ = call()
        if self.exact is None:
            return call, True
        exact, part = self.exact, self.slice
        pairs = [
            (part.queries(dq), exact.dq),
            (part.keys(dk), exact.dk),
            (part.keys(dv), exact.dv),
        ]
        self._record_error(impl, "grad_max_abs_err", pairs)
        return call, True

    def _record_error(
        self, impl: Implementation, metric: str, pairs: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        error = max(max_abs_err(value.detach(), exact) for value, exact in pairs)
        self.recorder.add(self.case.name, impl.name, metric, error)

    def _speeds(self, way: str, flops: float, samplers: dict[str, Callable[[], float]]) -> None:
        metric = f"{way}_us" if self.case.feature else f"{way}_TFLOPs"
        for name, sample in self.run.interleave(self.case.name, samplers, metric).items():
            value = sample.median if self.case.feature else flops / sample.median / 1e6
            self.recorder.add_sample(self.case.name, name, metric, value, sample.spread)
