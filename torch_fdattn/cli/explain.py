"""`fdattn explain`: what the compile backend makes of each attention that a function calls, as a table."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from torch_fdattn.cli.errors import UsageError
from torch_fdattn.compile_backend.report import Report, Site

_HEAD = ("source line", "written as", "becomes", "mask and notes, or why it stays")


def load_case(target: str) -> tuple[Callable, tuple, dict[str, Any]]:
    """From FILE.py:NAME or MODULE:NAME, what NAME() returns: a function or module, and example arguments."""
    source, colon, name = target.rpartition(":")
    if not (source and colon and name.isidentifier()):
        raise UsageError(f"TARGET must be FILE.py:NAME or MODULE:NAME, got {target}")
    module = _module(source)
    if not hasattr(module, name):
        cases = ", ".join(_cases(module)) or "none"
        raise UsageError(f"{source} has no function {name}; without arguments it has: {cases}")
    if not callable(make := getattr(module, name)):
        raise UsageError(f"{target} must be a function, got {type(make).__name__}")
    if needed := _needed(make):
        given = ", ".join(needed)
        case = f"{name}({given}), (tensors,)" if inspect.isclass(make) else f"{name}, ({given},)"
        raise UsageError(
            f"{target} must be a function without arguments that returns (function or module, example arguments), got "
            f"one that takes {given}: add `def case(): return {case}` to {source}, with values for {given}, and "
            f"explain {source}:case"
        )
    found = make()
    if isinstance(found, tuple) and len(found) in (2, 3):
        fn, args, *rest = found
        kwargs = rest[0] if rest else {}
        if callable(fn) and isinstance(args, tuple | list) and isinstance(kwargs, dict):
            return fn, tuple(args), kwargs
    shown = (
        tuple(type(x).__name__ for x in found) if isinstance(found, tuple) else type(found).__name__
    )
    one_alone = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], torch.Tensor)
    raise UsageError(
        f"{target} must return (function, arguments) or (function, arguments, keywords), got {shown}"
        + "; arguments is a tuple: (tensor,)" * one_alone
    )


def _cases(module: object) -> list[str]:
    """The functions that a file or module itself has and that can be called without arguments."""
    return [
        name
        for name, x in vars(module).items()
        if inspect.isfunction(x) and x.__module__ == module.__name__ and not _needed(x)
    ]


def _needed(make: Callable) -> list[str]:
    """The names of the arguments that it cannot be called without."""
    try:
        function = make.forward if isinstance(make, torch.nn.Module) else make
        given = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have none
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [x.name for x in given if x.default is x.empty and x.kind not in optional]


def _module(source: str) -> object:
    """A file or a module of that name; what it imports may lie next to it, or in the current folder."""
    if source.endswith(".py"):
        if not os.path.isfile(source):
            raise UsageError(f"{source}: no such file")
        name = os.path.splitext(os.path.basename(source))[0]
        spec = importlib.util.spec_from_file_location(name, source)
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, os.path.dirname(os.path.abspath(source)))
        spec.loader.exec_module(module)
        return module
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not (source == error.name or source.startswith(f"{error.name}.")):
            raise  # something that the module itself imports
        raise UsageError(f"{source}: no such module") from None


def _row(site: Site) -> tuple[str, str, str, str]:
    if site.op is None:
        return site.where, site.form, "left", f"{site.reason}: {site.detail}"
    return site.where, site.form, f"fdattn.{site.op}", ", ".join(site.notes)


def table(report: Report) -> str:
    """A line for each site under a head, and a line that counts them."""
    here = os.getcwd() + os.sep
    rows = [tuple(x.removeprefix(here) for x in _row(site)) for site in report]
    lines = []
    if rows:
        rows = [_HEAD, *rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, report.head])
