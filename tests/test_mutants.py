"""Every planted fault still finds the text that it changes; `make mutants` runs them, in parts if one likes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from tests.mutants import __main__ as mutants
from tests.mutants import running, sources
from tests.mutants.faults import FAULTS, Fault, Tests
from tests.mutants.running import ROOT, Outcome, outcome_of
from tests.mutants.state import STATE, State

ALL_TESTS = tuple(dict.fromkeys(fault.tests for fault in FAULTS))


def test_faults_can_be_planted() -> None:
    of = {tests: sources.sources(tests) for tests in ALL_TESTS}
    for fault in FAULTS:
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        assert text.count(fault.old) == 1, fault.name
        assert fault.old != fault.new, fault.name
        assert all((ROOT / path).exists() for path in fault.tests.paths), fault.name
        assert ROOT / fault.file in of[fault.tests], fault.name


def test_names_are_keys() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({tests.name for tests in ALL_TESTS}) == len(ALL_TESTS)
    assert STATE.parent == ROOT / "build"  # which git ignores


@pytest.mark.parametrize("count", [1, 2, 3, 7, len(FAULTS), len(FAULTS) + 1])
def test_shards_are_a_partition(count: int) -> None:
    shards = [mutants.shard_of(FAULTS, number, count) for number in range(1, count + 1)]
    assert sorted(f.name for shard in shards for f in shard) == sorted(f.name for f in FAULTS)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    # A shard's faults share their tests as far as they can.
    runs = sum(len({fault.tests for fault in shard}) for shard in shards)
    assert runs <= len(ALL_TESTS) + count - 1


@pytest.mark.parametrize("wrong", ["0/2", "3/2", "2", "a/b", "1/0"])
def test_a_wrong_shard_is_named(wrong: str, capsys) -> None:
    with pytest.raises(SystemExit):
        mutants.arguments(["--shard", wrong])
    assert f"got '{wrong}'" in capsys.readouterr().err
    with pytest.raises(argparse.ArgumentTypeError):
        mutants._shard(wrong)


@pytest.mark.parametrize(
    ("code", "out", "verdict"),
    [
        (0, "3 passed in 2 s", "passed"),
        (1, "1 failed, 2 passed in 2 s", "failed"),
        (2, "!! stopping\n1 failed, 2 passed in 2 s", "failed"),
        (1, "1 failed, 1 error in 2 s", "neither"),
        (5, "no tests ran", "neither"),
        (-11, "", "neither"),
    ],
)
def test_what_counts_as_a_failure(code: int, out: str, verdict: str) -> None:
    assert outcome_of(code, out, "", 1.0).verdict == verdict


SMALL = Tests("small", ("tests/small/test_a.py",))
OTHER = Tests("other", ("tests/small",))
PLANTED = tuple(Fault(name, "torch_fdattn/ops/a.py", "1", "2", SMALL) for name in ("one", "two"))
LAST = Fault("three", "torch_fdattn/ops/a.py", "1", "3", OTHER)


class Runs:
    """In place of real runs: what was run, in order, and what comes of it."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.verdicts: dict[str, str] = {}

    def __call__(self, tests: Tests, fault: Fault | None, limit_s: float) -> Outcome:
        assert limit_s == 60
        name = f"unmodified: {tests.name}" if fault is None else fault.name
        self.seen.append(name)
        verdict = self.verdicts.get(name, "passed" if fault is None else "failed")
        if verdict == "interrupted":
            raise KeyboardInterrupt
        return Outcome(verdict, f"{name}: {verdict}", 60.0)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch) -> Path:
    """A small project, and its three faults in place of ours."""
    files = {
        "torch_fdattn/__init__.py": "from torch_fdattn import dist, ops\n",
        "torch_fdattn/functional.py": "from torch_fdattn.ops import a\n",
        "torch_fdattn/ops/a.py": "x = 1\n",
        "torch_fdattn/ops/table.json": "{}\n",
        "torch_fdattn/dist/b.py": "def f():\n    from torch_fdattn import models\n",
        "torch_fdattn/models/c.py": "z = 1\n",
        "tests/conftest.py": "",
        "tests/helper.py": "from torch_fdattn.ops import a\n",
        "tests/worker.py": "import torch_fdattn\ntorch_fdattn.dist.f()\n",
        "tests/small/test_a.py": "from tests import helper\n",
        "tests/small/test_b.py": "WORKER = 'worker.py'\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(mutants, "FAULTS", (*PLANTED, LAST))
    return tmp_path


def forget() -> None:
    for function in (sources.sources, sources._digest, sources._imported, sources._mentioned):
        function.cache_clear()


@pytest.fixture
def start(tree: Path, monkeypatch):
    """Called with the command line's arguments: (exit code, runs that it took)."""
    runs = Runs()
    monkeypatch.setattr(running, "run", runs)
    real = sources.key
    monkeypatch.setattr(sources, "key", lambda tests, fault=None: real(tests, fault, tree))

    def main(*given: str, **verdicts: str) -> tuple[int, list[str]]:
        forget()
        runs.seen, runs.verdicts = [], verdicts
        return mutants.main(
            [*given, "--limit", "60", "--state", str(tree / "build/state.json")]
        ), runs.seen

    yield main
    forget()


def test_sources_are_what_the_tests_reach(tree: Path) -> None:
    def names(tests: Tests) -> list[str]:
        forget()
        return [str(path.relative_to(tree)) for path in sources.sources(tests, tree)]

    near = [
        "tests/conftest.py", "tests/helper.py", "tests/small/test_a.py", "torch_fdattn/__init__.py",
        "torch_fdattn/functional.py", "torch_fdattn/ops/a.py", "torch_fdattn/ops/table.json",
    ]  # fmt: skip
    assert names(SMALL) == near
    # A program that they start, what it names, and what that imports inside a function.
    far = ["tests/small/test_b.py", "tests/worker.py", "torch_fdattn/dist/b.py", "torch_fdattn/models/c.py"]  # fmt: skip
    assert names(OTHER) == sorted([*near, *far])


def test_a_key_is_of_its_sources(tree: Path) -> None:
    def keys() -> list[str]:
        forget()
        return [sources.key(x.tests, x, tree) for x in (*PLANTED, LAST)]

    before = keys()
    assert len(set(before)) == 3
    assert keys() == before
    (tree / "torch_fdattn/models/c.py").write_text("z = 2\n", encoding="utf-8")
    assert [new == old for new, old in zip(keys(), before, strict=True)] == [True, True, False]
    (tree / "torch_fdattn/ops/table.json").write_text("[]\n", encoding="utf-8")
    assert not set(keys()) & set(before)


def test_a_table_ends_the_run(start, capsys) -> None:
    code, seen = start()
    assert code == 0
    assert seen == ["unmodified: small", "one", "two", "unmodified: other", "three"]
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert [line.split()[:2] for line in table[:-1]] == [[x, "caught"] for x in ("one", "two", "three")]  # fmt: skip
    assert table[-1] == "3 faults caught, 0 survived or unclear, 3 minutes"


@pytest.mark.parametrize(("verdict", "word"), [("passed", "SURVIVED"), ("neither", "UNCLEAR")])
def test_a_survivor_is_an_exit_code(start, capsys, verdict: str, word: str) -> None:
    code, _ = start(one=verdict)
    assert code == 1
    table = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in table] == ["two", "three", "one", "one:", "2"]
    assert table[2].split()[1] == word
    assert table[3] == f"    one: {verdict}"


def test_the_unmodified_tree_must_pass(start, capsys) -> None:
    code, seen = start(**{"unmodified: small": "failed"})
    assert (code, seen) == (1, ["unmodified: small"])
    assert "the unmodified tree must pass: unmodified: small: failed" in capsys.readouterr().out


def test_a_run_goes_on_where_it_was_ended(start) -> None:
    with pytest.raises(KeyboardInterrupt):
        start(two="interrupted")
    assert start("--resume") == (0, ["two", "unmodified: other", "three"])
    assert start("--resume") == (0, [])
    assert start("one") == (0, ["unmodified: small", "one"])  # anew, unless told otherwise


@pytest.mark.parametrize("is_there", [False, True])
def test_faults_of_a_gpu_that_is_not_there(start, capsys, monkeypatch, is_there: bool) -> None:
    """They are named, and no success: of nothing else there is no run."""
    tests = Tests("on a GPU", ("tests/small/test_a.py",), keyword="it", needs_sm_90=True)
    fault = Fault("four", "torch_fdattn/ops/a.py", "1", "4", tests)
    monkeypatch.setattr(mutants, "FAULTS", (*PLANTED, fault))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    of_gpu = ["unmodified: on a GPU", "four"] if is_there else []
    assert start() == (0, ["unmodified: small", "one", "two", *of_gpu])
    assert ("left out: four" in capsys.readouterr().out) != is_there
    assert start("four") == (0 if is_there else 2, of_gpu)
    assert running.command(tests, Path())[-2:] == ["-k", "it"]


def test_what_was_unclear_is_tried_again(start) -> None:
    assert start(two="neither")[0] == 1
    assert start("--resume") == (0, ["two"])


def test_other_sources_are_run_anew(start, tree: Path) -> None:
    start(one="passed")
    assert start("--resume") == (1, [])  # a survivor is a result
    (tree / "torch_fdattn/models/c.py").write_text("z = 2\n", encoding="utf-8")
    assert start("--resume", "three") == (0, ["unmodified: other", "three"])
    (tree / "tests/helper.py").write_text("from torch_fdattn.ops import a as b\n", encoding="utf-8")
    assert start("--resume", "--shard", "1/2") == (0, ["unmodified: small", "one"])


def test_shards_fill_one_state(start, tree: Path) -> None:
    for number in (1, 2, 3):
        assert start("--shard", f"{number}/3")[0] == 0
    assert start("--resume") == (0, [])
    kept = json.loads((tree / "build/state.json").read_text(encoding="utf-8"))
    assert set(kept) == {"one", "two", "three", "unmodified: small", "unmodified: other"}
    assert set(kept["one"]) == {"key", "verdict", "summary", "seconds"}


def test_a_state_that_is_not_there_is_empty(tmp_path: Path) -> None:
    state = State(tmp_path / "a/b.json")
    assert state.find("one", "key") is None
    state.keep("one", "key", Outcome("failed", "1 failed", 2.04))
    assert state.find("one", "key") == Outcome("failed", "1 failed", 2.0)
    assert state.find("one", "other key") is None


def test_no_such_fault(start, capsys) -> None:
    assert start("nosuch") == (2, [])
    assert "no fault's name contains any of ['nosuch']" in capsys.readouterr().out


def test_a_copy_is_run(tmp_path: Path, monkeypatch) -> None:
    """The real thing on a project of one test, with the fault and without."""
    for name, text in {
        # A package without this file would lose against an installed one, wherever either stands on the path.
        "torch_fdattn/__init__.py": "",
        "torch_fdattn/a.py": "x = 1\n",
        "tests/test_it.py": "from torch_fdattn.a import x\ndef test_it(): assert x == 1\n",
        "benchmarks/none": "", "docs/none": "", "examples/none": "", "pyproject.toml": "", "README.md": "",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(running, "ROOT", tmp_path)
    tests = Tests("it", ("tests/test_it.py",))
    assert running.run(tests).verdict == "passed"
    assert running.run(tests, Fault("x", "torch_fdattn/a.py", "x = 1", "x = 2", tests)).verdict == "failed"  # fmt: skip
    assert running.run(tests, limit_s=0.01)[:2] == ("neither", "no end within 0.01 s")
    with pytest.raises(ValueError, match=r"'y' must find its text exactly once .* got 0 times"):
        running.run(tests, Fault("y", "torch_fdattn/a.py", "y = 1", "y = 2", tests))
