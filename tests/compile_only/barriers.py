"""A check of compiled kernels: each barrier that a kernel makes in shared memory is one that it uses.

Triton gives the memory of what is not used any more to something else, and a barrier's is undefined for that until
`mbarrier.inval` (PTX ISA). The program's next tile lay there in a launch of dV, and was the barrier again, once in some hundred
launches, after the GPU had changed between processes (docs/notes/hopper-backward.md).
"""

from __future__ import annotations

import re

_INDEX = re.compile(r"(%\w+) = ttg\.memdesc_index (%\w+)\[")
_INIT = re.compile(r"ttng\.init_barrier (%\w+),")


def unused_barriers(ttgir: str) -> list[str]:
    """The allocations of barriers that are initialised and, of the kernel's own lines, nothing more."""
    source = dict(_INDEX.findall(ttgir))
    made = {source.get(x, x) for x in _INIT.findall(ttgir)}
    views = {x: {x} | {y for y, of in source.items() if of == x} for x in made}
    others = [
        line for line in ttgir.splitlines() if not _INIT.search(line) and not _INDEX.search(line)
    ]
    others = "\n".join(x.partition("=")[2] if "local_alloc" in x else x for x in others)
    named = set(re.findall(r"%\w+", others))
    return sorted(x for x in made if not views[x] & named)
