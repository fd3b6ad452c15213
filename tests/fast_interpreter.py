"""Triton's interpreter without work whose result it throws away: the same numbers in a third of the time.

- Every call of a device function replaces the members of `tl` that its launch has replaced already.
- Every sum, difference and product of integers is computed in int64 too, for an assertion of debug mode, which is off.
- Every operation builds the table of numpy's types anew.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

from torch_fdattn.ops.library import INTERPRET

#: What `install` has replaced: an object, an attribute's name and its value before.
ORIGINALS: list[tuple[object, str, object]] = []


def _patch_lang(interpreter: ModuleType) -> Callable:
    """Replaces what no launch in progress has replaced."""
    patch, replaced = interpreter._patch_lang, set()
    languages = interpreter.tl, interpreter.tl.core

    class Scope(interpreter._LangPatchScope):
        """Of a launch: a device function's is never restored."""

        def restore(self) -> None:
            replaced.clear()
            super().restore()

    @functools.cache
    def modules(function: Callable) -> frozenset[str]:
        found = (x for x in function.__globals__.values() if inspect.ismodule(x))
        return frozenset(x.__name__ for x in found if x in languages)

    def patch_lang(function: Callable):
        scope = Scope()
        if not modules(function) <= replaced:
            scope._changes = patch(function)._changes
            replaced.update(modules(function))
        return scope

    return patch_lang


def _get_np_dtype(interpreter: ModuleType) -> Callable:
    """numpy's type of Triton's; it depends on the scalar type alone."""
    of_scalar = functools.cache(interpreter._get_np_dtype)
    pointer = interpreter.np.dtype("uint64")
    return lambda kind: pointer if kind.scalar.is_ptr() else of_scalar(kind.scalar)


def install() -> None:
    """Before the first launch of this process; nothing without TRITON_INTERPRET=1, or of another Triton's interpreter."""
    if not INTERPRET or ORIGINALS:
        return
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return
    builder = interpreter.interpreter_builder
    quick = replace(builder.options, sanitize_overflow=builder.options.debug)
    for owner, name, value in (
        (interpreter, "_patch_lang", _patch_lang(interpreter)),
        (interpreter, "_get_np_dtype", _get_np_dtype(interpreter)),
        (builder, "options", quick),
    ):
        ORIGINALS.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)
