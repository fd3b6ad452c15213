"""The backward of what ran inside `context_parallel`: activation checkpoints call attention again in it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

import torch
from torch.overrides import TorchFunctionMode

BACKWARDS = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


@contextlib.contextmanager
def engine_in(mode: TorchFunctionMode) -> Iterator[None]:
    """A backward runs in the mode, as the call of it stood there.

    Modes are off while one handles a call, and the engine runs with the modes of its caller; nothing but its call
    stands between.
    """
    run, thread, under_way = torch.autograd._engine_run_backward, threading.get_ident(), [True]

    def run_in_mode(*args, **kwargs):
        if under_way and threading.get_ident() == thread:
            with mode:
                return run(*args, **kwargs)
        return run(*args, **kwargs)

    torch.autograd._engine_run_backward = run_in_mode
    try:
        yield
    finally:
        under_way.clear()
        torch.autograd._engine_run_backward = run


class _Recomputations(threading.local):
    """Of this thread, outermost first: what the attention calls of each were told by their `context_parallel`."""

    def __init__(self) -> None:
        self.under_way: list[list[dict]] = []


_recomputations = _Recomputations()


class RecomputedFunction:
    """A reentrant checkpoint's function, which the backward must call under the contexts that its forward saw.

    Attention outside of them would attend to this rank's tokens, and only gradients would show it. (Checkpoints that are
    not reentrant compare the tensors that they save.)
    """

    def __init__(self, function: Callable) -> None:
        self._function = function
        #: a `context_parallel`'s options for each attention call of the forward
        self.contexts: list[dict] = []

    def __call__(self, *args, **kwargs):
        seen: list[dict] = []
        _recomputations.under_way.append(seen)
        try:
            results = self._function(*args, **kwargs)
        finally:
            _recomputations.under_way.pop()
        if seen != self.contexts:
            raise RuntimeError(
                "the backward of an activation checkpoint (use_reentrant=True) must be inside of the context_parallel that "
                f"its forward was in: of {len(self.contexts)} attention calls over all ranks {len(seen)} were recomputed "
                "inside of one, or with other arguments of it, and others would attend to this rank's tokens only; call "
                "backward inside of the same context_parallel"
            )
        return results


def record_attention(context: dict) -> None:
    """An attention call over all ranks, with the options of its `context_parallel`.

    Forwards of reentrant checkpoints are found among the callers: what they return has no trace of attention, since they
    run without gradients. Others than torch's are known if they keep their function as it does, in ctx.run_function.
    """
    for seen in _recomputations.under_way:
        seen.append(context)
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and "run_function" in code.co_varnames:
            ctx = frame.f_locals.get("ctx")
            function = getattr(ctx, "run_function", None)
            if function is not None:
                if not isinstance(function, RecomputedFunction):
                    function = ctx.run_function = RecomputedFunction(function)
                function.contexts.append(context)
        frame = frame.f_back
