"""The options of `backend="fdattn"`: which are ours, which are Inductor's, and what ours may be."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch._inductor

from torch_fdattn.compile_backend.context_parallel import options as context_parallel
from torch_fdattn.compile_backend.context_parallel.options import ContextParallel
from torch_fdattn.compile_backend.tensor_parallel import passes

_LOWERINGS = ("inductor", "aot_eager", "eager")


class Options(NamedTuple):
    """Ours; plain values, for they are part of the caches' keys."""

    dryrun: bool = False
    require_all: bool = False
    no_fully_masked_rows: bool = False
    lower: str = "inductor"
    context_parallel: ContextParallel | None = None
    tensor_parallel: str = "auto"


def split(
    options: dict[str, Any] | None, mode: str | None, inputs: Sequence[Any] = ()
) -> tuple[Options, dict[str, Any]]:
    """(ours, Inductor's) of what `torch.compile` is given; inputs: those of the graph that is compiled.

    Raises:
        TypeError, ValueError, RuntimeError: naming the option, what was expected and what came.
    """
    others = dict(options or {})
    given = {name: others.pop(name) for name in Options._fields if name in others}
    own = Options(**given)
    for name in ("dryrun", "require_all", "no_fully_masked_rows"):
        if not isinstance(getattr(own, name), bool):
            raise TypeError(f'options["{name}"] must be a bool, got {getattr(own, name)!r}')
    if own.lower not in _LOWERINGS:
        raise ValueError(f'options["lower"] must be one of {_LOWERINGS}, got {own.lower!r}')
    own = own._replace(
        context_parallel=context_parallel.parse(
            own.context_parallel, None if own.dryrun else inputs
        ),
        tensor_parallel=passes.parse(own.tensor_parallel),
    )
    _check_names(others)
    if own.lower != "inductor" and (mode not in (None, "default") or others):
        raise ValueError(
            f'options["lower"] must be "inductor" where mode or Inductor\'s options are given, got '
            f'"{own.lower}" with mode={mode!r} and options {sorted(others)}'
        )
    return own, others


def _check_names(others: dict[str, Any]) -> None:
    """Before Inductor does, whose own error lists all of its options and none of ours."""
    names = {*Options._fields, *torch._inductor.list_options()}
    for name in others:
        if name in names or name.replace("-", "_") in names:
            continue
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f'options must be of backend="fdattn" ({", ".join(Options._fields)}) or of Inductor '
            f"(torch._inductor.list_options() lists them), got {name!r}.{hint}"
        )
