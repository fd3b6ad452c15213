"""A few of the drawn compositions of masks; `make drawn-masks` runs a thousand."""

import pytest

from tests.compile_backend.drawn_masks import LEAST_SHARE, check_one


@pytest.mark.parametrize("start", range(0, 40, 10))
def test_drawn_masks(start):
    results = [check_one(seed) for seed in range(start, start + 10)]
    print(results)
    # Of ten fewer may be rewritten than of a thousand.
    assert results.count("rewritten") >= 10 * LEAST_SHARE - 4, results
