"""Packages, or other versions of them, that the tests' own environment is not to have: each in a folder of its own.

transformers behaves differently where `kernels` is installed, and has one version at a time. A test marked `overlay`
has pip install what it needs into build/overlays, once, and runs a process with that folder first on its path;
`make test-overlays` runs them, and needs a package index. `make test-triton` has another Triton installed so.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "overlays"


def overlay(*requirements: str) -> Path:
    """The folder that has these packages, without what they depend on: pinned, "name==version"."""
    target = FOLDER / "+".join(requirements)
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / f"{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
                made = Path(folder) / "made"
                pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
                subprocess.run([*pip, "--target", str(made), *requirements], check=True)
                made.rename(target)
    return target


def run(*arguments: str, over: Path | None = None, cwd: Path = ROOT, **variables: str) -> str:
    """What a process of Python prints, in which `over` comes before all other packages."""
    path = [str(x) for x in (over, ROOT) if x is not None]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path),
        **variables,
    }
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
