""".ci/run with commands that only say that they were called: what it runs, and where Chromium comes from."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / ".ci" / "run"
NEEDED = ("bash", "dirname", "mktemp", "rm", "env")
MAKE = "make lint test", "make test-browser"


def ci(folder: Path, user: int = 0, **commands: str) -> tuple[int, list[str], str]:
    """(exit code, calls, the errors); commands: those that there are, with what each does besides."""
    for name in NEEDED:
        os.symlink(shutil.which(name), folder / name)
    for key, work in {"make": "", "id": f"echo {user}", **commands}.items():
        command = folder / key.replace("_", "-")
        command.write_text(f'#!/bin/sh\necho "{command.name} $*" >> "{folder}/calls"\n{work}\n')
        command.chmod(0o755)
    done = subprocess.run([str(RUN)], env={"PATH": str(folder)}, capture_output=True, text=True)
    calls = (folder / "calls").read_text().splitlines()
    return (
        done.returncode,
        [x.partition(" VENV=")[0] for x in calls if not x.startswith("id")],
        done.stderr,
    )


@pytest.mark.parametrize("name", ["chromium", "google-chrome"])
def test_a_browser_that_is_there_is_taken(tmp_path, name):
    assert ci(tmp_path, **{name: ""}, apt_get="") == (0, [*MAKE], "")


def test_chromium_is_installed(tmp_path):
    code, calls, errors = ci(tmp_path, apt_get="")
    assert (code, errors) == (0, "")
    assert calls == [
        MAKE[0], "apt-get -q -o Acquire::Retries=3 update",
        "apt-get -q -o Acquire::Retries=3 install -y chromium", MAKE[1],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"apt_get": "exit 100"}, "which apt-get could not install"),
        ({"apt_get": 'case "$*" in *install*) exit 100;; esac'}, "which apt-get could not install"),
        ({"apt_get": "", "user": 1000}, "and apt-get needs root"),
        ({}, "and apt-get is not here"),
    ],
)
def test_where_it_cannot_be_installed_it_fails_in_a_sentence(tmp_path, given, reason):
    code, calls, errors = ci(tmp_path, **given)
    assert code == 1
    assert errors == (
        f".ci/run: the page's test needs Chromium, {reason}: install Chromium, or name one by "
        "FDATTN_CHROMIUM=/its/path\n"
    )
    assert calls[0] == MAKE[0]
    assert MAKE[1] not in calls


def test_what_fails_before_ends_it(tmp_path):
    assert ci(tmp_path, make="exit 2", chromium="")[:2] == (2, [MAKE[0]])
