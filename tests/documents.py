"""The documents' examples: what tests/test_readme.py and tests/test_docs.py run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SCRIPT = re.compile(r"# (\w+\.py)\n")  # the first line of an example for torchrun


def python_blocks(path: Path) -> tuple[list[str], dict[str, str]]:
    """(examples for one process, in order; scripts for torchrun by name)."""
    snippets, scripts = [], {}
    for block in _PYTHON.findall(path.read_text(encoding="utf-8")):
        name = _SCRIPT.match(block)
        if name:
            scripts[name[1]] = block
        else:
            snippets.append(block)
    return snippets, scripts


def run_each(snippets: list[str], name: str) -> dict:
    """Runs the examples of one document, each as a file of its own; gives back what they named."""
    names: dict = {}
    for index, snippet in enumerate(snippets):
        namespace: dict = {"__name__": "__main__"}
        exec(compile(snippet, f"{name}#{index}", "exec"), namespace)
        names |= namespace
    return names


#: Seen rarely with torch 2.13 and gloo: a process aborts behind its last line, cause not known (gloo's threads?). torchrun's
#: report then says this.
TEARDOWN = "(SIGABRT)"


def run_again_where_it_aborts(
    command: Sequence[str], **options
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of what prints text, up to three times where a process aborts behind its last line."""
    for _ in range(3):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, **options)  # fmt: skip
        if not (done.returncode and TEARDOWN in done.stderr):
            break
    return done


def run_on_two_ranks(name: str, script: str, folder: Path) -> str:
    """Runs a script with torchrun on two CPU ranks; its output."""
    (folder / name).write_text(script, encoding="utf-8")
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    command = [sys.executable, *torchrun, str(folder / name)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = run_again_where_it_aborts(command, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
