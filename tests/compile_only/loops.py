"""The loops of machine code, by its branches backward."""

from __future__ import annotations

import re

_LABEL = re.compile(r"(\.L_x_\d+):")
_BRANCH = re.compile(r"\bBRA `\((\.L_x_\d+)\)")


def innermost_loops(sass: str) -> list[str]:
    """The text of each, from its first instruction to its branch backward; loops of a wait, which multiply nothing, too."""
    begins, found = {}, []
    for i, line in enumerate(lines := sass.splitlines()):
        if label := _LABEL.match(line):
            begins[label[1]] = i
        elif (branch := _BRANCH.search(line)) and branch[1] in begins:
            found.append((begins[branch[1]], i))
    inner = [
        (a, b)
        for a, b in found
        if not any((c, d) != (a, b) and a <= c and d <= b for c, d in found)
    ]
    return ["\n".join(lines[a : b + 1]) for a, b in inner]


def step_loops(sass: str) -> list[str]:
    """Those that multiply."""
    return [x for x in innermost_loops(sass) if "GMMA" in x]


def spilled(text: str) -> int:
    """How many instructions read or write memory of a thread's own."""
    return len(re.findall(r"\b(?:LDL|STL)\b", text))
