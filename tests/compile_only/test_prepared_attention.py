"""Raw ops of attention hand the driver the call's own tensors, and past their checks no others."""

import os
from unittest import mock

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels, which the interpreter replaces", allow_module_level=True)

from tests.compile_only.driver_calls import CALLS, Driver, Pool, call_with, draw
from torch_fdattn.ops import (
    library,
    row_ranges,
)
from torch_fdattn.ops.attention import backward as attention_backward
from torch_fdattn.ops.attention import derivative_op
from torch_fdattn.ops.attention import forward as attention_forward
from torch_fdattn.ops.attention import op as attention_op
from torch_fdattn.ops.varlen_attention import op as varlen_op


@pytest.fixture
def on_a_gpu(driver: Driver, through_triton: list, monkeypatch):
    """Raw ops take tensors for a GPU's."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(library, "use_triton", lambda *_: True)
    monkeypatch.setattr(attention_op.dispatch, "choose", lambda *_: "triton")
    for module in (attention_forward, attention_backward):
        monkeypatch.setattr(module, "device_capability", lambda _: (9, 0))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("strided", ["lse", "dlse"])
def test_copies_are_no_tensors_of_the_call(
    strided: str, packed: bool, driver: Driver, on_a_gpu
) -> None:
    """What a kernel takes in place of a strided tensor is not there when the call comes again."""
    op, lead = (varlen_op, ()) if packed else (derivative_op, (2,))
    lens, where = draw(2, dtype=torch.int32), (draw(3, dtype=torch.int32), None) if packed else ()
    q = draw((96, 4, 32) if packed else (2, 4, 96, 32))
    rows = {"lse": draw((*lead, 4, 96), dtype=torch.float32), "dlse": draw((*lead, 4, 96), dtype=torch.float32)}  # fmt: skip
    rows[strided] = rows[strided].mT.contiguous().mT
    given = q, rows["dlse"], q.clone(), q.clone(), q.clone(), q.clone(), rows["lse"], *where
    rest = lens, None, None, -1, 0, 0, 0, 0.5, None
    for _ in range(4):
        given = (
            *(
                None if x is None else x.clone(memory_format=torch.preserve_format)
                for x in given[:7]
            ),
            *where,
        )
        op._backward(*given, *rest)
        for _, values in driver.calls[-3:]:
            assert (
                given[list(("dout", "dlse", "q", "k", "v", "out", "lse")).index(strided)].data_ptr()
                not in values
            )


@pytest.mark.parametrize(("packed", "row"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_known_calls_of_attention(
    way: str, packed: bool, row: bool, driver: Driver, on_a_gpu, monkeypatch
) -> None:
    """Past its checks a raw op hands the driver what it does with them."""
    of_attention = attention_op if way == "forward" else derivative_op
    op, name = (varlen_op, "check_varlen") if packed else (of_attention, "check_inputs")
    checked = mock.Mock(wraps=getattr(op, name))
    monkeypatch.setattr(op, name, checked)

    def call() -> None:
        shape, of_keys = ((96, 4, 32), (96, 2, 32)) if packed else ((2, 4, 96, 32), (2, 2, 96, 32))
        of_lse = (4, 96) if packed else shape[:3]
        q, k, v = draw(shape), draw(of_keys), draw(of_keys)
        lens = draw(2, dtype=torch.int32)
        slopes, seed = draw(4, dtype=torch.float32), draw(2, dtype=torch.int64)
        where = (draw(3, dtype=torch.int32), None) if packed else ()
        mask = draw((2, 1, 1, 96), dtype=torch.bool) if row else None
        rest = lens, None, None, -1, 0, 0, 0, 0.5, None, 0.0, slopes, None, mask, 0.25, seed
        if way == "forward":
            op._forward(q, k, v, *where, *((None,) if packed else ()), *rest)
        else:
            state = draw(shape), draw(of_lse, dtype=torch.float32), q, k, v, draw(shape)
            op._backward(*state, draw(of_lse, dtype=torch.float32), *where, *rest)

    monkeypatch.setitem(CALLS, "attention", call)
    monkeypatch.setattr(row_ranges, "MIN_KEYS", 1)
    pool, launched = Pool(), {"forward": 1, "backward": 3}[way] + row
    for _ in range(4):  # the first is checked, the first two go through Triton
        call_with(pool, "attention")
        assert checked.call_count == 1
    assert len(driver.calls) == 2 * launched
    assert driver.calls[:launched] == driver.calls[launched : 2 * launched]
    with monkeypatch.context() as patch:
        patch.setattr(attention_op.tuning.state, "active", True)
        patch.setattr(attention_op.tuning, "chosen", lambda op, config, *_: config)
        call_with(pool, "attention")
    assert checked.call_count == 2


def test_strided_lengths_go_through_their_copies(driver: Driver) -> None:
    q, lens = torch.zeros(2, 4, 96, 32), torch.zeros(4, dtype=torch.int32)
    call = mock.Mock(by_driver=lambda tensors: True)
    prepared_with = lambda lens: attention_op.attend_prepared(call, q, q, q, (lens, *[None] * 5))  # noqa: E731
    assert prepared_with(lens[:2]) is not None
    assert prepared_with(lens[::2]) is None
