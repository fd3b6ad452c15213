"""`python -m tests` ends with plain words of what failed."""

from __future__ import annotations

import pytest

from tests.__main__ import closing, run
from tests.layers import Layer

PASSES = "def test_right():\n    assert True\n"
FAILS = "def test_wrong():\n    one = 1\n    assert one == 2, 'one is not two'\n"
SKIPS = "import pytest\n\n\ndef test_left():\n    pytest.skip('this package is missing')\n"
DIES = "import os, sys\n\n\ndef test_dies():\n    print('out of luck', file=sys.stderr, flush=True)\n    os._exit(3)\n"


def outcome(tmp_path, text: str, ranks: int = 0):
    (tmp_path / "test_it.py").write_text(text)
    arguments = (str(tmp_path / "test_it.py"), "-s", "-c", "/dev/null", "--rootdir", str(tmp_path))
    return run(Layer("one", arguments, ranks), tmp_path)


def test_what_passes_is_ok(tmp_path):
    came = outcome(tmp_path, PASSES)
    assert came.counts == {"passed": 1, "failed": 0, "skipped": 0}
    assert not came.problems
    assert came.row().endswith("ok")


def test_a_failed_test_is_named_with_its_message_and_last(tmp_path):
    came = outcome(tmp_path, PASSES + "\n\n" + FAILS)
    assert came.counts == {"passed": 1, "failed": 1, "skipped": 0}
    assert len(came.problems) == 1
    assert "test_wrong: AssertionError: one is not two" in came.problems[0]
    lines = closing([came], "python -m tests cpu").splitlines()
    assert "1 passed, 1 failed, 0 skipped" in lines
    assert lines[-3:-1] == ["1 of 1 layers of python -m tests cpu failed:", "  one:"]
    assert lines[-1].strip().endswith("test_wrong: AssertionError: one is not two")


def test_a_check_that_was_not_made_fails(tmp_path):
    came = outcome(tmp_path, PASSES + "\n\n" + SKIPS)
    assert "a check was skipped" in came.problems[0]
    assert "this package is missing" in came.problems[0]


@pytest.mark.parametrize("ranks", [0, 1])
def test_a_run_that_dies_is_no_success(tmp_path, ranks):
    came = outcome(tmp_path, DIES, ranks)
    assert "the run ended with exit code" in came.problems[0]
    assert not ranks or "out of luck" in came.problems[1]
