"""What the doctor found, and how it is shown: one screen of text or JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass

WIDTH = 100
LEVELS = ("ok", "note", "warn", "fail")
_INDENT = " " * 17


@dataclass(frozen=True)
class Finding:
    """One line of the screen. `fail` means that the user must mend something; `remedy` says how."""

    level: str
    topic: str
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"level must be one of {LEVELS}, got {self.level!r}")


def failures(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level == "fail"]


def lines(finding: Finding) -> list[str]:
    """`level topic text`, wrapped to WIDTH columns, and the remedy on lines of its own."""
    level = finding.level.upper() if finding.level in ("warn", "fail") else finding.level
    head = f"{level:<5}{finding.topic:<11} "
    shown = _wrap(head, finding.text)
    if finding.remedy:
        shown += _wrap(f"{_INDENT}fix: ", finding.remedy)
    return shown


def screen(findings: list[Finding]) -> str:
    warnings = sum(finding.level == "warn" for finding in findings)
    broken = len(failures(findings))
    verdict = "torch_fdattn is usable here" if not broken else "something here must be mended"
    shown = [f"fdattn doctor: {verdict} ({broken} to mend, {warnings} warnings)"]
    for finding in findings:
        shown += lines(finding)
    return "\n".join(shown)


def as_json(findings: list[Finding]) -> str:
    document = {"usable": not failures(findings), "findings": [asdict(f) for f in findings]}
    return json.dumps(document, indent=2)


def _wrap(head: str, text: str) -> list[str]:
    # An error text from a library may hold line breaks; the screen shows it as one paragraph.
    return textwrap.wrap(
        " ".join(text.split()), WIDTH, initial_indent=head, subsequent_indent=_INDENT
    )
