"""`fdattn tune`: measures, says what changed against the shipped tables, and writes the file on rank 0."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from torch_fdattn import tables
from torch_fdattn.cli.errors import UsageError
from torch_fdattn.cli.terminal import note
from torch_fdattn.cli.world import World
from torch_fdattn.environment import INTERPRET
from torch_fdattn.tune import ONE_DEVICE, OVER_RANKS, Measurement, Session, tune

#: Columns where stdout is no terminal.
_WIDTH = 160
_HEAD = ("section", "case", "shipped", "tuned", "shipped µs", "tuned µs")


def run(world: World, out: Path | None, sections: str | None, minutes: float, quick: bool) -> None:
    """Everything behind the options; all ranks call it."""
    if world.device.type == "cpu" and not (INTERPRET and quick):
        raise UsageError(
            "nothing is to be tuned on a CPU, which runs no kernel: use a machine with a GPU, or both TRITON_INTERPRET=1 "
            "and --quick to see it run"
        )
    names, path = _sections(sections, world), _path(out)
    measured: list[Measurement] = []

    def report(found: Measurement) -> None:
        measured.append(found)
        note(f"{found.section}: {found.case}: {found.chosen}, {found.us:.1f} µs", world)

    session = Session(
        world.device, world.group, quick=quick, report=report, note=lambda text: note(text, world)
    )
    record = tune(session, names, 60 * minutes)
    if world.rank > 0:
        return
    wide = None if sys.stdout.isatty() else _WIDTH
    console = Console(highlight=False, soft_wrap=True, width=wide)
    console.print(_changes(measured), markup=False)
    if not any(record[name] for name in names):
        raise UsageError(f"nothing was measured of {', '.join(names)}, so {path} is as it was")
    tables.write(path, record)
    console.print(f"{path}: {_counts(record, names)}", markup=False)


def _sections(given: str | None, world: World) -> Sequence[str]:
    mine, others = (ONE_DEVICE, OVER_RANKS) if world.group is None else (OVER_RANKS, ONE_DEVICE)
    if given is None:
        return list(mine)
    names = [name.strip() for name in given.split(",") if name.strip()]
    if not names or not {*names} <= {*mine, *others}:
        every = ", ".join((*ONE_DEVICE, *OVER_RANKS))
        raise UsageError(f"--section must be of {every}, got {given!r}")
    for name in names:
        if name in OVER_RANKS and world.group is None:
            raise UsageError(f"--section {name} is measured over ranks: start it with torchrun, a rank a GPU")  # fmt: skip
        if name in ONE_DEVICE and world.group is not None:
            raise UsageError(f"--section {name} is measured on one device: start it without torchrun")  # fmt: skip
    return list(dict.fromkeys(names))


def _path(out: Path | None) -> Path:
    """Where to write, which is found out before anything is measured: what is there must be a tuned table."""
    path = out or tables.default_path()
    if path is None:
        raise UsageError("--out must name a file, as TORCH_FDATTN_TABLES is empty")
    try:
        tables.read(path)
        path.parent.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        raise UsageError(f"--out {path}: {error}") from None
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"--out {path}: nothing can be written in {path.parent}")
    return path


def _changes(measured: Sequence[Measurement]) -> Table | str:
    """A row for each case in which another choice than the shipped one was taken."""
    changed = [x for x in measured if x.chosen != x.shipped]
    if not changed:
        return f"The shipped tables' choices stand in all {len(measured)} cases."
    title = f"{len(changed)} of {len(measured)} choices are not the shipped ones"
    table = Table(*(Column(name, overflow="fold") for name in _HEAD), title=title)  # fmt: skip
    for x in changed:
        table.add_row(*x[:4], f"{x.shipped_us:.1f}", f"{x.us:.1f}")
    return table


def _counts(record: dict, names: Sequence[str]) -> str:
    counts = (f"{len(record[name])} entries of {name}" for name in names if record[name])
    return ", ".join(counts)
