"""Makes the calls of `calls/` and records what they launch."""

from __future__ import annotations

from tests.golden import device, recorder
from tests.golden.book import Book
from tests.golden.calls import Call, all_calls
from tests.golden.recorder import Launch, Names

_installed: list[bool] = []


def launches(containing: str = "") -> Book:
    """The launches of all calls, or those whose name contains this; for a process of its own.

    All are made twice, with new tensors and in the opposite order: caches must neither change what is launched nor take one
    call for another.
    """
    if not _installed:
        device.install()
        _installed.append(True)
    book, again = {}, {}
    for found, backwards in ((book, False), (again, True)):
        calls = [call for call in all_calls() if containing in call.name]
        for call in reversed(calls) if backwards else calls:
            if call.name in found:
                raise ValueError(f"two calls are named {call.name}")
            found[call.name] = _made(call)
    if book != again:
        wrong = [name for name in book if book[name] != again[name]]
        raise AssertionError(f"a second call launches something else: {', '.join(wrong)}")
    return book


def _made(call: Call) -> list[Launch]:
    names = Names()
    names.add(call.arguments)
    device.now.device, device.now.world, device.now.names = call.device, call.world, names
    recorder.take()
    with call.setting():
        results = call.op(**call.arguments)
    if results is not None:
        if not isinstance(results, dict):
            results = results if isinstance(results, (tuple, list)) else (results,)
            results = dict(zip(call.results, results, strict=True))
        names.add(results)
    raw = recorder.take()
    return [recorder.described(x, names) for x in raw]
