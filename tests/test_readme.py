"""The README's Python snippets run, one after the other, as a newcomer would paste them."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_snippets_run_in_order() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 3
    names: dict = {}
    for block in blocks:
        exec(block, names)
    assert names["out"].shape == (2, 32, 64, 128)
