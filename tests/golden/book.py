"""The file of launches: what is usual of a kernel once, then each call with what differs from that.

    kernel NAME
      PARAMETER=VALUE           what most launches of the kernel are given; grid and options before the parameters

    call NAME
      kernel NAME
        PARAMETER=VALUE         where it is not the usual value; "-" where the usual option is not given

A line holds one value, which has no spaces. Tensors are written as NAME+OFFSET:DTYPE, by the argument or the result that
they lie in; new1, new2, … is other memory, with its sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.golden.recorder import Launch

HEAD = "# Written by `python -m tests.golden --write`; what it is: tests/golden/__init__.py, how to read it: book.py there."
Book = dict[str, list[Launch]]
_ABSENT = "-"


def written(book: Book) -> str:
    usual = _usual(book)
    lines = [HEAD]
    for kernel, values in sorted(usual.items()):
        lines += ["", f"kernel {kernel}", *(f"  {name}={value}" for name, value in values.items())]
    for name, launches in sorted(book.items()):
        lines += ["", f"call {name}"]
        for launch in launches:
            lines.append(f"  kernel {launch.kernel}")
            lines += [f"    {x}" for x in _unusual(launch, usual[launch.kernel])]
    return "\n".join(lines) + "\n"


def read(text: str) -> Book:
    usual: dict[str, dict[str, str]] = {}
    book: Book = {}
    launches: list[Launch] = []
    for line in text.splitlines():
        depth, words = len(line) - len(line.lstrip()), line.split()
        if not words or line.startswith("#"):
            continue
        if words[0] == "call":
            launches = book[words[1]] = []
        elif words[0] == "kernel" and not depth:
            values = usual[words[1]] = {}
        elif words[0] == "kernel":
            launches.append(Launch(words[1], dict(usual[words[1]])))
            values = launches[-1].values
        else:
            name, _, value = words[0].partition("=")
            values[name] = value
            if value == _ABSENT:
                del values[name]
    return book


def differences(golden: Book, today: Book) -> Iterator[str]:
    """A line for each difference, from what the file has to what is launched."""
    for name in sorted(golden.keys() | today.keys()):
        if name not in today or name not in golden:
            where = "the list of calls" if name not in today else "the file"
            yield f"{name}: is not in {where}"
            continue
        before, after = golden[name], today[name]
        if [x.kernel for x in before] != [x.kernel for x in after]:
            kernels = (
                ", ".join(x.kernel for x in launches) or "nothing" for launches in (before, after)
            )
            yield "{}: launches\n    {}\n -> {}".format(name, *kernels)
            continue
        for i, (old, new) in enumerate(zip(before, after, strict=True), 1):
            for key in dict.fromkeys((*old.values, *new.values)):
                pair = old.values.get(key, _ABSENT), new.values.get(key, _ABSENT)
                if pair[0] != pair[1]:
                    yield f"{name}: launch {i}, {old.kernel}: {key} {pair[0]} -> {pair[1]}"


def _usual(book: Book) -> dict[str, dict[str, str]]:
    """By kernel the most frequent value of each parameter, of equally frequent ones the first in the alphabet."""
    counts: dict[str, dict[str, Counter[str]]] = {}
    launches = [launch for _, made in sorted(book.items()) for launch in made]
    for kernel, values in launches:
        of_kernel = counts.setdefault(kernel, {})
        for name in (*of_kernel, *values):
            of_kernel.setdefault(name, Counter())
    for kernel, values in launches:
        for name, counter in counts[kernel].items():
            counter[values.get(name, _ABSENT)] += 1
    usual = {}
    for kernel, of_kernel in counts.items():
        # In the order of a launch: options that the first launch did not have come before the parameters.
        order = max((x.values for x in launches if x.kernel == kernel), key=len)
        names = sorted(of_kernel, key=lambda name, order=order: _place(name, order))
        best = {
            name: min(of_kernel[name].items(), key=lambda x: (-x[1], x[0]))[0] for name in names
        }
        usual[kernel] = {name: value for name, value in best.items() if value != _ABSENT}
    return usual


def _place(name: str, order: dict[str, str]) -> int:
    return list(order).index(name) if name in order else 1


def _unusual(launch: Launch, usual: dict[str, str]) -> Iterator[str]:
    for name in dict.fromkeys((*launch.values, *usual)):
        value = launch.values.get(name, _ABSENT)
        if value != usual.get(name, _ABSENT):
            yield f"{name}={value}"
