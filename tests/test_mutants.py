"""Every planted fault still finds the text that it changes; `make mutants` runs them."""

from __future__ import annotations

import pytest

from tests.mutants.__main__ import ROOT
from tests.mutants.faults import FAULTS, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_can_be_planted(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1
    assert fault.old != fault.new
    assert all((ROOT / path).exists() for path in fault.tests.paths)
