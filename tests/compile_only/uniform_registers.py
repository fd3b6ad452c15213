"""A check of machine code: no uniform register is read before an instruction above it has written it.

ptxas of triton 3.6 and 3.7 lost the first half of a 64-bit sum in a decode kernel for sm_90: descriptors of shared
memory were made from a register that nothing had written, and values came from wherever it pointed. Its
two tiles in shared memory, of K and then V, had one address and different swizzles (`ops/decode/launch.py`).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;")
_REGISTER = re.compile(r"\bUR(\d+)\b")
#: Opcodes whose first operand is the uniform register that they write; U… but for those that write predicates.
_WRITES = re.compile(r"(?!UISETP|UPLOP3|UFSETP)(U[A-Z]|S2UR|R2UR|VOTEU|REDUX|CREDUX|LDCU)")


def disassembled(cubin: bytes) -> str:
    """SASS."""
    nvdisasm = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [nvdisasm, "-c", file.name], capture_output=True, text=True, check=True
        ).stdout


def read_before_written(sass: str) -> list[str]:
    """The instructions, in the order of addresses, that read a uniform register which none above has written."""
    written: set[int] = set()
    found = []
    for address, opcode, text in _LINE.findall(sass):
        operands = [operand.strip() for operand in text.split(",")]
        wide = 4 if ".128" in opcode else 2 if ".64" in opcode else 1
        # What goes to URZ is written nowhere.
        target = bool(_WRITES.match(opcode)) and bool(_REGISTER.match(operands[0]))
        needed: set[int] = set()
        for position, operand in enumerate(operands):
            for number in map(int, _REGISTER.findall(operand)):
                if not (target and position == 0):
                    needed |= {number + i for i in _parts(opcode, operands, position, wide)}
        if needed - written:
            found.append(f"{address}: {opcode} {text}")
        if target:
            first = int(_REGISTER.match(operands[0])[1])
            written |= {first + i for i in range(2 if ".WIDE" in opcode else wide)}
    return found


def _parts(opcode: str, operands: list[str], position: int, wide: int) -> range:
    """Which registers from the named one on an operand reads."""
    operand = operands[position]
    if operand.startswith("gdesc["):
        # Descriptors of A and B; where A is in registers (before this operand), B's alone.
        a_in_registers = re.match(r"R\d+", operands[position - 1]) and position == 2
        return range(2, 4) if a_in_registers else range(4)
    if operand.startswith("desc["):
        return range(2)
    return range(wide if opcode.startswith("U") else 1)
