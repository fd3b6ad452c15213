"""What tests of several drop-ins share."""

from __future__ import annotations

import pytest

from tests.dropins import flash_ops


@pytest.fixture
def active():
    """FDATTN on the CPU key; how often a stand-in for torch's own kernels was called, by op."""
    yield from flash_ops.activated()
