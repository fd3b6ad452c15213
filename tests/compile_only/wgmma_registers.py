"""Registers that a wgmma still reads or writes while other instructions write them, in Hopper's machine code.

ptxas of CUDA 12.8 and 12.9 gave the registers of a left operand away before the product had read them (triton-lang/triton
issues 9433 and 11781); what comes out then is wrong now and then.
"""

from __future__ import annotations

import re

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_REGISTER = re.compile(r"\bR(\d+)\b")
#: That write no register, or none that is named first.
_NO_RESULT = ("ST", "RED", "SYNCS", "BAR", "BRA", "EXIT", "R2UR", "UTMA", "FENCE", "WARP", "NOP", "MEMBAR", "DEPBAR", "BSYNC")  # fmt: skip


def early_writes(sass: str) -> list[str]:
    """Instructions that write a register of a wgmma which is not waited for yet, in the order of the text.

    A wgmma with `gsb0` ends a group; `WARPGROUP.DEPBAR.LE gsb0, n` waits for all groups but the last n.
    """
    found, groups, current = [], [], set()
    for opcode, operands in _INSTRUCTION.findall(sass):
        if "GMMA" in opcode:
            current |= _used(opcode, operands)
            if "gsb0" in operands:
                groups.append(current)
                current = set()
        elif opcode.startswith("WARPGROUP.DEPBAR"):
            pending = int(operands.split(",")[1], 16)
            groups = groups[len(groups) - pending :] if pending else []
        elif opcode == "EXIT":  # what follows is another path
            groups, current = [], set()
        elif _written(opcode, operands) & current.union(*groups):
            found.append(f"{opcode} {operands}")
    return found


def _used(opcode: str, operands: str) -> set[int]:
    """Of a product of 64 rows by N columns: N / 2 registers of float32, and 4 of a left operand in registers."""
    columns = int(re.search(r"\.64x(\d+)x", opcode)[1])
    first, left = (_REGISTER.match(x.strip()) for x in operands.split(",")[:2])
    used = set(range(int(first[1]), int(first[1]) + columns // 2))
    if left:
        used |= set(range(int(left[1]), int(left[1]) + 4))
    return used


def _written(opcode: str, operands: str) -> set[int]:
    first = _REGISTER.match(operands.split(",")[0].strip())
    if first is None or opcode.startswith(_NO_RESULT):
        return set()
    count = 1
    if ".128" in opcode or (opcode.startswith("LDSM") and opcode.endswith(".4")):
        count = 4
    elif ".64" in opcode or ".WIDE" in opcode or opcode == "CS2R":
        count = 2
    return set(range(int(first[1]), int(first[1]) + count))
