import pytest


@pytest.fixture(autouse=True)
def _poisoned(poisoned_empty) -> None:
    """Every op test runs with NaN in fresh memory."""
