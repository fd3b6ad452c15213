"""Bounds of what a chat template may compute: a template is a program of whoever published the model.

jinja2's sandbox keeps it from the machine, not from `'%2000000000s' % 'a'` or loops in loops. Here a render has a budget of
steps, characters and processor time: loops, calls and filters take from it, and what makes long values asks it first.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import wraps
from typing import Any

from torch_fdattn.models.errors import ModelError

#: Of one render. A conversation of 4 MiB takes a few percent of each.
MAX_STEPS = 4_000_000  # passes of loops, calls, filters, and elements of what is made into text
MAX_CHARACTERS = 2**28  # of all values that it makes together
MAX_SECONDS = 10.0  # of its thread's processor time
MAX_BITS = 4096  # of a product or power of integers

_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0_^EO]*(\d*)(?:\.(\d*))?")
_BRACES = re.compile(r":[^{}]*")
_DIGITS = re.compile(r"\d+")


class Budget:
    """What is left of a render's limits."""

    def __init__(self) -> None:
        self._steps, self._characters = MAX_STEPS, MAX_CHARACTERS
        self._end = time.thread_time() + MAX_SECONDS

    def step(self, count: int = 1) -> None:
        self._steps -= count
        if self._steps < 0:
            raise _refusal(f"{MAX_STEPS} steps")
        if time.thread_time() > self._end:
            raise _refusal(f"{MAX_SECONDS:g} seconds")

    def take(self, count: int) -> None:
        """Before a value of so many characters or elements is made."""
        self._characters -= max(count, 0)
        if self._characters < 0:
            raise _refusal(f"{MAX_CHARACTERS} characters")

    def text_of(self, *values: Any) -> int:
        """Characters, about, of values with all that is in them."""
        total, left = 0, list(values)
        while left:
            value = left.pop()
            total += 1
            if isinstance(value, (str, bytes)):
                total += len(value)
            elif isinstance(value, dict):
                self.step(2 * len(value))
                left += [*value.keys(), *value.values()]
            elif isinstance(value, (list, tuple, set, frozenset)):
                self.step(len(value))
                left += value
        return total


def _refusal(limit: str) -> ModelError:
    return ModelError(
        f"the chat template must take at most {limit}, got one that takes more for these messages: shorten the "
        "conversation, or use another template"
    )


_current: ContextVar[Budget | None] = ContextVar("budget of a template", default=None)


def within_limits(run: Callable[[], Any]) -> Any:
    """run() with a budget of its own."""
    token = _current.set(Budget())
    try:
        return run()
    finally:
        _current.reset(token)


def _budget() -> Budget:
    return _current.get() or Budget()


def check_binary(operator: str, left: Any, right: Any) -> None:
    """Before `left operator right`."""
    budget = _budget()
    budget.step()
    texts = (str, bytes, list, tuple)
    if operator == "%" and isinstance(left, (str, bytes)):
        check_percent(left, right)
    elif operator == "+" and isinstance(left, texts):
        budget.take(size(left) + size(right))
    elif operator == "*":
        for many, count in ((left, right), (right, left)):
            if isinstance(many, texts) and isinstance(count, int):
                budget.take(len(many) * count)
        if isinstance(left, int) and isinstance(right, int):
            _expect_bits(left.bit_length() + right.bit_length())
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _expect_bits(left.bit_length() * abs(right))


def _expect_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise _refusal(f"{MAX_BITS} bits of an integer")


def check_percent(layout: str | bytes, values: Any = ()) -> None:
    """Before `layout % values`, and what reads such a layout."""
    text = layout.decode("latin-1") if isinstance(layout, bytes) else layout
    widths = [number for found in _PERCENT.findall(text) for number in found]
    _check_layout(widths, text.count("%"), "*" in text, values)


def _check_braces(layout: str, values: Any) -> None:
    widths = _DIGITS.findall(" ".join(_BRACES.findall(layout)))
    nested = re.search(r"\{[^}]*\{", layout) is not None
    _check_layout(widths, layout.count("{"), nested, values)


def _check_layout(widths: Iterable[str], fields: int, widths_given: bool, values: Any) -> None:
    budget = _budget()
    budget.take(sum(int(x[:12]) for x in widths if x))
    if widths_given:
        budget.take(fields * _largest(values if isinstance(values, (tuple, list)) else [values]))
    budget.take(budget.text_of(values) * fields)


def _largest(values: Iterable[Any]) -> int:
    return max((abs(x) for x in values if isinstance(x, int)), default=0)


def size(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict, set)) else 0


def check_call(function: Any, args: list[Any], named: dict[str, Any]) -> None:
    """Before function(*args, **named); an iterator that is joined becomes a list in `args`."""
    budget = _budget()
    budget.step()
    function = getattr(function, "__wrapped__", function)  # the sandbox's own str.format
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    given = [*args, *named.values()]
    if name == "to_bytes" and isinstance(owner, int):
        budget.take(_largest(given))
    if not isinstance(owner, (str, bytes)):
        return
    if name in ("center", "ljust", "rjust", "zfill"):
        budget.take(_largest(given))
    elif name == "expandtabs":
        budget.take(len(owner) * _largest(given))
    elif name == "replace":
        _check_replaced(owner, args)
    elif name == "join":
        _check_joined(owner, args)
    elif name == "translate":
        longest = max((size(x) for x in given[0].values()), default=1) if given and isinstance(given[0], dict) else 1  # fmt: skip
        budget.take(len(owner) * longest)
    elif name in ("format", "format_map"):
        _check_braces(owner, given)


def _check_replaced(text: Any, args: list[Any]) -> None:
    budget = _budget()
    budget.take(budget.text_of(text, *args))
    if len(args) < 2:
        return
    if not isinstance(text, bytes):
        text, *args = map(str, (text, *args))
    if isinstance(args[0], type(text)):
        budget.take(text.count(args[0]) * size(args[1]))


def _check_joined(separator: Any, args: list[Any]) -> None:
    budget = _budget()
    if args and not isinstance(args[0], (str, bytes, dict)):
        args[0] = list(args[0])
        budget.take(budget.text_of(args[0]) + size(separator) * len(args[0]))


#: Filters that look at a value's elements at most.
_SHALLOW = frozenset(
    {
        "abs", "attr", "count", "d", "default", "first", "float", "groupby", "int", "items", "last", "length", "list",
        "map", "max", "min", "random", "reject", "rejectattr", "reverse", "safe", "select", "selectattr", "sort",
        "dictsort", "unique", "round", "sum", "batch", "slice", "replace", "join", "tojson", "format",
    }
)  # fmt: skip


def bounded_filter(name: str, function: Callable) -> Callable:
    """A filter of jinja2's, within the budget."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function, updated=())
    def run(*args: Any, **named: Any) -> Any:
        budget = _budget()
        budget.step()
        if len(args) > skipped:
            given = list(args[skipped:])
            _check_filter(budget, name, given, named)
            args = (*args[:skipped], *given)
        result = function(*args, **named)
        budget.take(size(result))
        return result

    if skipped:
        run.jinja_pass_arg = function.jinja_pass_arg
    return run


def _check_filter(budget: Budget, name: str, args: list[Any], named: dict[str, Any]) -> None:
    value, rest = args[0], [*args[1:], *named.values()]
    if name not in _SHALLOW:
        budget.take(budget.text_of(value))
    if name in ("center", "batch", "slice"):
        budget.take(_largest(rest))
    elif name in ("indent", "wordwrap"):
        inserted = sum(map(size, rest)) + (_largest(rest) if name == "indent" else 0)
        lines = value.count("\n") + 1 if name == "indent" and isinstance(value, str) else size(value)  # fmt: skip
        budget.take(lines * inserted)
    elif name == "replace":
        _check_replaced(value, rest)
    elif name == "join":
        _check_joined(next((x for x in rest if isinstance(x, str)), ""), args)
    elif name == "tojson":
        length = budget.text_of(value)
        inserted = sum(budget.text_of(x) for x in rest) + 10 * _largest(rest)
        budget.take(length * (1 + inserted) if rest else length)
    elif name == "format":
        check_percent(str(value), tuple(rest))
    elif name == "round":
        _expect_bits(4 * _largest(rest))
    elif name == "sum" and any(isinstance(x, (list, tuple)) for x in rest):
        args[0] = list(value)
        budget.take(len(args[0]) * budget.text_of(args[0]))


def bounded_concat(parts: Iterable[str]) -> str:
    """What templates, macros and blocks put their text together by."""
    budget = _budget()

    def counted() -> Iterable[str]:
        for part in parts:
            budget.take(len(part))
            yield part

    return "".join(counted())


def check_output(value: Any) -> Any:
    """Before a value becomes text of the output."""
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        budget = _budget()
        budget.take(budget.text_of(value))
    return value


def step(*_: Any) -> None:
    """One pass of a loop."""
    _budget().step()


def sized(value: Any) -> Any:
    """A slice, which has been made."""
    _budget().take(size(value))
    return value


def check_parts(parts: list[Any]) -> None:
    """Before these are put one behind the other by `~`."""
    budget = _budget()
    budget.step()
    budget.take(budget.text_of(*parts))
