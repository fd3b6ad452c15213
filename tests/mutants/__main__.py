"""Plants faults one by one in a copy of the tree; the suite must fail for each.

    python -m tests.mutants [NAME …] [--shard I/N] [--resume] [--state FILE] [--limit SECONDS]

Faults whose tests need a GPU of sm_90 are left out, and named, where there is none. Each result is written to the state file at once; --resume takes what it has of the same sources from there. The
unmodified copy must pass the tests first. Ends with a table; exits 1 where a fault survives, or its tests neither
pass nor fail (a time-out, an error), which --resume tries again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.mutants import running, sources
from tests.mutants.faults import FAULTS, Fault, Tests
from tests.mutants.running import Outcome
from tests.mutants.state import STATE, State


def shard_of(faults: Sequence[Fault], number: int, count: int) -> list[Fault]:
    """Part `number` of `count`, from 1 on; faults of the same tests stay together, which must pass unmodified once."""
    order = {tests: i for i, tests in enumerate(dict.fromkeys(fault.tests for fault in faults))}
    ordered = sorted(faults, key=lambda fault: order[fault.tests])
    begin, end = ((i * len(ordered)) // count for i in (number - 1, number))
    return ordered[begin:end]


def _shard(text: str) -> tuple[int, int]:
    try:
        number, count = map(int, text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be I/N, as 1/4, got {text!r}") from None
    if not 1 <= number <= count:
        raise argparse.ArgumentTypeError(f"must be one of 1/{count} to {count}/{count}, got {text!r}")  # fmt: skip
    return number, count


def arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults whose names have one of these in them")  # fmt: skip
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N", help="one of N parts")  # fmt: skip
    parser.add_argument("--resume", action="store_true", help="keep results of the same sources")
    parser.add_argument("--state", type=Path, default=STATE, metavar="FILE", help="%(default)s")
    parser.add_argument("--limit", type=float, default=running.LIMIT_S, metavar="SECONDS", help="of a run; %(default)s")  # fmt: skip
    return parser.parse_args(given)


def tried(
    name: str, tests: Tests, fault: Fault | None, state: State, options: argparse.Namespace
) -> Outcome:
    """The outcome of a run, or of an earlier one of the same sources."""
    key = sources.key(tests, fault)
    found = state.find(name, key) if options.resume else None
    if found is None:
        found = running.run(tests, fault, options.limit)
        state.keep(name, key, found)
    return found


def row(name: str, word: str, outcome: Outcome) -> str:
    return f"{name:64} {word:8} {outcome.seconds:5.0f} s"


def main(given: Sequence[str]) -> int:
    options = arguments(given)
    named = [f for f in FAULTS if not options.names or any(word in f.name for word in options.names)]  # fmt: skip
    if not named:
        print(f"no fault's name contains any of {options.names}")
        return 2
    faults = [f for f in shard_of(named, *options.shard) if running.can_run(f.tests)]
    left_out = [f.name for f in shard_of(named, *options.shard) if not running.can_run(f.tests)]
    if left_out:
        print(f"need a GPU of sm_90, which is not here, and are left out: {', '.join(left_out)}")
    if not faults:
        return 2
    state = State(options.state)
    outcomes: dict[str, Outcome] = {}
    passes: set[Tests] = set()
    for fault in faults:
        if fault.tests not in passes:
            name = f"unmodified: {fault.tests.name}"
            outcome = tried(name, fault.tests, None, state, options)
            print(row(name, outcome.verdict, outcome), flush=True)
            if outcome.verdict != "passed":
                print(f"the unmodified tree must pass: {outcome.summary}")
                return 1
            passes.add(fault.tests)
        outcome = outcomes[fault.name] = tried(fault.name, fault.tests, fault, state, options)
        print(row(fault.name, _word(outcome), outcome), flush=True)
    print("\n" + table(outcomes))
    return int(any(outcome.verdict != "failed" for outcome in outcomes.values()))


def _word(outcome: Outcome) -> str:
    return {"failed": "caught", "passed": "SURVIVED", "neither": "UNCLEAR"}[outcome.verdict]


def table(outcomes: dict[str, Outcome]) -> str:
    """A row for each fault, those that were not caught last with what their tests said."""
    caught = [(name, x) for name, x in outcomes.items() if x.verdict == "failed"]
    others = [(name, x) for name, x in outcomes.items() if x.verdict != "failed"]
    rows = [row(name, _word(outcome), outcome) for name, outcome in caught]
    for name, outcome in others:
        rows += [row(name, _word(outcome), outcome), f"    {outcome.summary}"]
    minutes = sum(outcome.seconds for outcome in outcomes.values()) / 60
    rows.append(
        f"{len(caught)} faults caught, {len(others)} survived or unclear, {minutes:.0f} minutes"
    )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
