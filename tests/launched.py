"""What a test has launched on a GPU, whichever row of the dispatch table has run it."""

from __future__ import annotations

from collections import Counter

from torch_fdattn.ops.library import launches


def launched() -> Counter[str]:
    """The launches of our GPU kernels so far by op and direction: ``{"attention_forward": 1}``."""
    assert not [name for name in launches if name.endswith("/cpu")]
    counted: Counter[str] = Counter()
    for name, times in launches.items():
        counted[name.partition("/")[0]] += times
    return counted
