"""Memory that must stay: around slices, in pages of others, beyond the capacity, in padding."""

import pytest
import torch

import torch_fdattn
from tests.ops.append_kv.calls import append, arguments
from tests.ops.append_kv.cases import buffer_bytes

pytestmark = pytest.mark.interpreter
NAN = float("nan")
FAR = [-1, -3, -(2**31), 8, 9, 2**31 - 1]


def unchanged(tensors, call):
    before = [buffer_bytes(x).clone() for x in tensors]
    call()
    for x, bytes_before in zip(tensors, before, strict=True):
        assert torch.equal(buffer_bytes(x), bytes_before)


@pytest.mark.parametrize("start", FAR)
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_lengths_that_leave_no_room(paged, start, device):
    given = arguments(device, paged=paged, layout="slice", options=())
    new_lens = torch.tensor([1, 1], dtype=torch.int32, device=device)
    given["kv_lens"] = torch.full_like(given["kv_lens"], start)
    caches = (given["k_cache"], given["v_cache"])
    unchanged(caches, lambda: append(given | {"new_lens": new_lens}))


@pytest.mark.parametrize("page", [-1, -4, 4, 5, 2**31 - 1, -(2**31)])
def test_pages_that_do_not_exist(page, device):
    given = arguments(device, paged=True, layout="slice", options=())
    given["page_table"].fill_(page)
    unchanged((given["k_cache"], given["v_cache"]), lambda: append(given))


@pytest.mark.parametrize("start", [-(2**63), -(2**32), 2**32, 2**63 - 2, 2**32 + 3])
def test_int64_lengths_do_not_wrap(start, device):
    given = arguments(device, options=())
    given["kv_lens"] = torch.full((2,), start, dtype=torch.int64, device=device)
    unchanged((given["k_cache"], given["v_cache"]), lambda: append(given))


def test_pages_of_others_are_bit_identical(device):
    """A pool of NaN: of 4 pages a sequence writes to its own two, from position 3 on."""
    given = arguments(device, paged=True, options=())
    for name in ("k_cache", "v_cache"):
        given[name].fill_(NAN)
    given["page_table"] = torch.tensor([[2, 0]], dtype=torch.int32, device=device)
    for name in ("k", "v", "kv_lens"):
        given[name] = given[name][:1]
    append(given)
    for cache, new in ((given["k_cache"], given["k"]), (given["v_cache"], given["v"])):
        assert torch.equal(cache[2, :, 3], new[0, :, 0])
        assert torch.equal(cache[0, :, :2], new[0, :, 1:])
        assert int((~cache.isnan()).any(-1).sum()) == 3 * 2


def test_no_entry_is_needed_for_what_is_not_written(device):
    """A table of one column, and new_lens that end before the second page."""
    given = arguments(device, paged=True, options=())
    given["page_table"] = given["page_table"][:, :1]
    given["kv_lens"] = torch.tensor([3, 4], dtype=torch.int32, device=device)
    before = given["k_cache"].clone()
    append(given)
    changed = (given["k_cache"] != before).any(-1).any(1)
    assert changed.nonzero().tolist() == [[2, 3]]


@pytest.mark.parametrize("new", [[0, 0], [-5, -(2**31)]], ids=["zero", "negative"])
def test_padding_is_neither_stored_nor_turned(new, device):
    given = arguments(device, layout="packed")
    given["new_lens"] = torch.tensor(new, dtype=torch.int32, device=device)
    tensors = [given[name] for name in ("k_cache", "v_cache", "q", "k", "v", "cos", "sin")]
    unchanged(tensors, lambda: append(given))


def test_nan_in_padding_and_in_unused_angles_stays_out(device):
    """What is not real is not read into what is."""
    given = arguments(device)
    given["new_lens"] = torch.tensor([2, 1], dtype=torch.int32, device=device)
    for name in ("k", "v", "q"):
        given[name][0, :, 2:] = NAN
        given[name][1, :, 1:] = NAN
    given["positions"] = torch.zeros(2, 3, dtype=torch.int64, device=device)
    for name in ("cos", "sin"):
        given[name][1:] = NAN
    append(given)
    assert not given["k_cache"].isnan().any()
    assert not given["v_cache"].isnan().any()
    assert not given["q"][0, :, :2].isnan().any()
    assert not given["q"][1, :, :1].isnan().any()


def test_k_and_v_stay_and_q_may_share_their_memory(device):
    """The three as slices of one projection."""
    fused = torch.randn(2, 3, 8, 16, device=device).transpose(1, 2)
    q, k, v = fused.split((4, 2, 2), 1)
    given = arguments(device, options=("cos", "sin")) | {"q": q, "k": k, "v": v}
    alone = given | {name: x.clone() for name, x in given.items()}
    before = k.clone(), v.clone()
    append(given)
    append(alone)
    for name in ("k_cache", "v_cache", "q"):
        assert torch.equal(given[name], alone[name])
    assert torch.equal(k, before[0])
    assert torch.equal(v, before[1])


def test_appending_twice_is_appending_once(device):
    """kv_lens stays as it is, and token by token gives what all at once does."""
    whole, steps = arguments(device, options=("cos", "sin", "q")), None
    steps = {name: x.clone() for name, x in whole.items()}
    lens = whole["kv_lens"].clone()
    append(whole)
    assert torch.equal(whole["kv_lens"], lens)
    for t in range(3):
        part = {name: steps[name][:, :, t : t + 1] for name in ("k", "v", "q")}
        append(steps | part | {"kv_lens": lens + t})
    for name in ("k_cache", "v_cache", "q"):
        assert torch.equal(whole[name], steps[name])


def test_decode_reads_what_was_written(device):
    """The lengths' two conventions meet: append takes those before, decode those after."""
    given = arguments(device, options=())
    given["kv_lens"].zero_()
    append(given)
    out, _ = torch_fdattn.decode(
        given["k"], given["k_cache"], given["v_cache"], given["kv_lens"] + 3, causal=True
    )
    expected, _ = torch_fdattn.attention(given["k"], given["k"], given["v"], causal=True)
    torch.testing.assert_close(out, expected)
