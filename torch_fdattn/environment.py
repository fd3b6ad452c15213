"""How environment variables are read: without torch, since the doctor reads them where torch is broken."""

from __future__ import annotations

import os
from collections.abc import Mapping


def interpreting(env: Mapping[str, str]) -> bool:
    """Whether TRITON_INTERPRET asks for the interpreter, as triton's own `knobs` read it."""
    return env.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


#: Triton reads the variable when a kernel is decorated, so it must be set before the first import of the package.
INTERPRET = interpreting(os.environ)


def parse_integer(text: str) -> int | None:
    """An integer of up to nine digits, written in ASCII; None for anything else.

    int() and \\d take digits of every script, and int() underscores too.
    """
    digits = text.strip().removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 9):
        return None
    return int(text)
