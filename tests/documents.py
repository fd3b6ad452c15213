"""The documents' examples: what tests/test_readme.py and tests/test_docs.py run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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


#: gloo's threads are there until nothing refers to their group; a tensor that one frees while Python ends aborts the process.
_NO_GROUP_IS_LEFT = """
from pathlib import Path as _Path

_threads = [x.read_text() for x in _Path("/proc/self/task").glob("*/comm")]
assert not any("gloo" in x for x in _threads), _threads
"""


def run_on_two_ranks(name: str, script: str, folder: Path) -> str:
    """Runs a script with torchrun on two CPU ranks; its output. It must end its process group."""
    (folder / name).write_text(script + _NO_GROUP_IS_LEFT, encoding="utf-8")
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"
    command = [sys.executable, *torchrun, str(folder / name)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
