"""What a prepared launch hands to the driver, against what Triton would have bound for the same tensors."""

import os
from collections.abc import Iterator, Sequence

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles kernels, which the interpreter replaces", allow_module_level=True)

from tests.compile_only.driver_calls import CALLS, Driver, Pool, bound, call_with
from torch_fdattn import checks
from torch_fdattn.launch import driver_launch, prepared
from torch_fdattn.launch.launches import Launch as Each
from torch_fdattn.ops.merge_states.kernel import _merge_kernel, launch_merge


@pytest.mark.parametrize("name", CALLS)
def test_the_third_launch_is_direct(name: str, driver: Driver, through_triton: list) -> None:
    built_with, later = Pool(), Pool()
    for _ in range(2):
        call_with(built_with, name)
        assert not driver.calls
    launched = len(through_triton)
    assert launched in (2, 4, 6, 8, 10)
    call_with(later, name)
    assert len(through_triton) == launched
    assert len(driver.calls) == launched // 2
    prepared.forget()
    call_with(later, name)
    for found, triton_launch in zip(driver.calls, through_triton[launched:], strict=True):
        grid, parameters = bound(*triton_launch)
        assert found[0] == grid
        assert found[1] == pytest.approx(parameters)


def test_what_must_not_be_repeated(driver: Driver, through_triton: list, monkeypatch) -> None:
    """Other numbers, dtypes, addresses off by 8 bytes, another device, a profiler: each through Triton."""
    outs, lses = torch.zeros(3, 2, 4, 5, 32), torch.zeros(3, 2, 4, 5)
    out, lse = torch.zeros(2, 4, 5, 32), torch.zeros(2, 4, 5)

    def goes_through_triton(*tensors) -> bool:
        before = len(through_triton), len(driver.calls)
        launch_merge(*tensors)
        after = len(through_triton), len(driver.calls)
        assert sum(after) == sum(before) + 1
        return after[0] > before[0]

    assert [goes_through_triton(outs, lses, out, lse) for _ in range(4)] == [
        True,
        True,
        False,
        False,
    ]
    assert goes_through_triton(outs[:2], lses[:2], out, lse)
    assert goes_through_triton(outs, lses, out.half(), lse)
    assert goes_through_triton(outs.half(), lses, out, lse)
    shifted = torch.zeros(42)[2:].view(2, 4, 5)
    assert shifted.data_ptr() % 16 == 8
    assert [goes_through_triton(outs, lses, out, shifted) for _ in range(3)] == [True] * 3
    with monkeypatch.context() as patch:
        patch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
        assert goes_through_triton(outs, lses, out, lse)
    with monkeypatch.context() as patch:
        patch.setattr(driver_launch, "somebody_watches", lambda: True)
        assert goes_through_triton(outs, lses, out, lse)
    assert not goes_through_triton(outs, lses, out, lse)
    monkeypatch.setattr(prepared, "MAX_CALLS", len(prepared._calls))
    assert goes_through_triton(outs[:1], lses[:1], out, lse)
    assert len(prepared._calls) == 1


def merges(*calls: tuple[torch.Tensor, ...]) -> Iterator[Each]:
    """Launches that merge, one for each (outs, lses, out, lse)."""
    for outs, lses, out, lse in calls:
        of = outs.stride(), lses.stride(), out.stride()
        yield Each(
            _merge_kernel,
            40,
            outs,
            lses,
            out,
            lse,
            *of,
            len(outs),
            4,
            5,
            32,
            BLOCK_PARTS=4,
            BLOCK_D=32,
        )


def made(call: prepared.PreparedCall, named: Sequence, *launched: tuple[torch.Tensor, ...]) -> bool:
    """A prepared call as ops make it; whether by the driver."""
    if call.by_driver(named):
        return True
    call.run(named, merges(*launched))
    return False


def states(count: int = 3) -> tuple[torch.Tensor, ...]:
    outs, lses = torch.zeros(count, 2, 4, 5, 32), torch.zeros(count, 2, 4, 5)
    return outs, lses, torch.zeros(2, 4, 5, 32), torch.zeros(2, 4, 5)


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [x.data_ptr() for x in tensors]


def test_a_prepared_call(driver: Driver, through_triton: list, monkeypatch) -> None:
    """The third is the driver's; not where an address is odd, nor where a profiler looks on."""
    call = prepared.PreparedCall()
    by_driver = lambda tensors: made(call, tensors, tensors)  # noqa: E731
    assert [by_driver(states()) for _ in range(4)] == [False, False, True, True]
    tensors = states()
    assert by_driver(tensors)
    assert driver.calls[-1][1][:4] == addresses(tensors)
    odd = torch.zeros(1290)[2:1282].view(2, 4, 5, 32)
    assert not by_driver((*tensors[:2], odd, tensors[3]))
    with monkeypatch.context() as patch:
        patch.setattr(driver_launch, "somebody_watches", lambda: True)
        assert not by_driver(tensors)
    assert by_driver(tensors)


def test_calls_that_are_remembered(monkeypatch) -> None:
    """Not where values are checked, nor by an option without a hash; all are forgotten where there are too many."""
    call = prepared.prepare(("a", 1))
    assert prepared.checked(("a", 1)) is call
    assert prepared.checked(("a", 2)) is prepared.checked(None) is None
    with monkeypatch.context() as patch:
        patch.setattr(checks, "CHECK_VALUES", True)
        assert prepared.checked(("a", 1)) is None
    prepared.prepare(("a", [1]))
    assert prepared.checked(("a", [1])) is None
    monkeypatch.setattr(prepared, "MAX_CALLS", len(prepared._calls))
    prepared.prepare(("b",))
    assert prepared.checked(("a", 1)) is None


def test_two_launches_of_one_call(driver: Driver, through_triton: list) -> None:
    """Each with its own tensors, in whatever order the call names them."""
    call = prepared.PreparedCall()
    for times in range(5):
        first, second = states(3), states(2)
        done = made(call, (*second, None, *first), first, second)
        assert done == (times > 1)
        if done:
            assert [x[1][:4] for x in driver.calls[-2:]] == [addresses(first), addresses(second)]


def test_few_calls_pay_for_what_cannot_be_bound(driver: Driver, through_triton: list, monkeypatch) -> None:  # fmt: skip
    """k that is v, say: which of the two a launch takes is not certain."""
    tries = []
    monkeypatch.setattr(prepared, "_bound", lambda made, tensors: tries.append(None) or ())
    call = prepared.PreparedCall()
    for times in range(1, 20):
        outs, lses, out, lse = states()
        assert not made(call, (outs, outs, lses, out, lse), (outs, lses, out, lse))
        assert len(tries) == times.bit_length() - 1


def test_views_that_a_launch_takes(driver: Driver, through_triton: list) -> None:
    """By the memory of the call's tensors in which they lie."""
    call = prepared.PreparedCall()
    for times in range(4):
        outs, lses, out, _ = states()
        scratch = torch.zeros(64)
        lse = scratch[16:56].view(2, 4, 5)
        assert made(call, (outs, lses, out, scratch), (outs, lses, out, lse)) == (times > 1)
    assert driver.calls[-1][1][3] == scratch.data_ptr() + 64


@pytest.mark.parametrize("what", ["another", "twice", "begins alike"])
def test_tensors_of_which_nobody_knows_the_place(
    what: str, driver: Driver, through_triton: list
) -> None:
    """Always through Triton: memory that is not the call's, or of which two of the call's may be meant."""
    call = prepared.PreparedCall()
    for _ in range(4):
        outs, lses, out, lse = states()
        named = {
            "another": (outs, lses, out), "twice": (outs, lses, out, lse, lse), "begins alike": (out.view(-1), out, lses, lse)
        }[what]  # fmt: skip
        launch = (outs, lses, out.view(out.shape), lse)
        assert not made(call, named, launch)
    assert not driver.calls


def test_an_alias_now_is_none_later(driver: Driver, through_triton: list) -> None:
    """Two views of one memory are told apart, since the launch takes the call's own objects."""
    call = prepared.PreparedCall()
    for times in range(4):
        outs, lses, out, lse = states()
        other = outs if times > 1 else outs.view(outs.shape)
        assert made(call, (other, outs, lses, out, lse), (outs, lses, out, lse)) == (times > 1)
    other = torch.zeros_like(outs)
    made(call, (other, outs, lses, out, lse), (outs, lses, out, lse))
    assert driver.calls[-1][1][0] == outs.data_ptr()


def test_what_only_triton_can_launch(driver: Driver, through_triton: list, monkeypatch) -> None:
    monkeypatch.setattr(driver_launch, "loaded", lambda: None)
    for _ in range(4):
        call_with(Pool(), "merge")
    assert len(through_triton) == 4
