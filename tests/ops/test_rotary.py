"""Norms of heads and rotary positions in one pass: torch's result to a rounding, and torch's own way where it must be."""

import pytest
import torch
import torch.nn.functional as F

from torch_fdattn.functional import paged_append_kv
from torch_fdattn.ops import rotary_kernel
from torch_fdattn.ops.append_kv.arguments import QUANTISED
from torch_fdattn.ops.rotary import KVSlots, norm_and_rotate, norm_rotate_and_store, rotate


@pytest.fixture
def kernel_calls(monkeypatch) -> list:
    calls, real = [], rotary_kernel.launch
    monkeypatch.setattr(rotary_kernel, "launch", lambda *a, **k: calls.append(a) or real(*a, **k))
    return calls


def by_torch(q, k, q_weight, k_weight, eps, cos, sin):
    def turned(x, weight):
        x = x if weight is None else F.rms_norm(x, x.shape[-1:], weight, eps)
        return rotate(x.transpose(1, 2), cos, sin)

    return turned(q, q_weight), turned(k, k_weight)


def drawn(device, dtype, batch=2, tokens=3, heads=6, kv_heads=2, dims=16, angles=1, normed=True):
    """A call's arguments: q and k side by side, as one product leaves them."""
    both = torch.randn(batch, tokens, (heads + kv_heads) * dims, device=device).to(dtype)
    q, k = both.split([heads * dims, kv_heads * dims], -1)
    radians = torch.randn(angles, 1, tokens, dims // 2, device=device) * 9
    weights = [torch.randn(dims, device=device).to(dtype) if normed else None for _ in range(2)]
    views = (x.unflatten(-1, (-1, dims)) for x in (q, k))
    return *views, *weights, 1e-3, radians.cos(), radians.sin()


CASES = {
    "Qwen3": {},
    "Llama": dict(normed=False),
    "one token": dict(tokens=1, batch=1),
    "angles of each sequence": dict(angles=2),
    "halves of no power of two": dict(dims=24, heads=5, kv_heads=5),
    "heads of several programs": dict(dims=256, heads=12, kv_heads=1, tokens=1),
    "k of several programs": dict(dims=256, heads=9, kv_heads=9, tokens=1),
}


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_equals_torch(case, dtype, kernel_device, kernel_calls) -> None:
    call = drawn(kernel_device, dtype, **CASES[case])
    exact = by_torch(*(x.double() if isinstance(x, torch.Tensor) else x for x in call))
    for found, torchs, right in zip(norm_and_rotate(*call), by_torch(*call), exact, strict=True):
        bound = 2 * (torchs - right).abs().max() + 2 * torch.finfo(dtype).eps * right.abs().max()
        assert (found.dtype, found.shape) == (dtype, right.shape)
        assert (found - right).abs().max() <= bound
        assert found.transpose(1, 2).is_contiguous()
    assert len(kernel_calls) == 1


@pytest.mark.interpreter
def test_where_torch_does_it(kernel_device, kernel_calls) -> None:
    def call(**changed):
        names = ("q", "k", "q_weight", "k_weight", "eps", "cos", "sin")
        made = dict(zip(names, drawn(kernel_device, torch.float32), strict=True))
        return made | changed

    calls = {
        "one norm": call(k_weight=None),
        "weights of another dtype": call(q_weight=torch.ones(16, device=kernel_device, dtype=torch.float64)),
        "angles in half precision": {k: x.half() if k in ("cos", "sin") else x for k, x in call().items()},
        "elements apart": call(q=torch.randn(2, 3, 16, 6, device=kernel_device).transpose(2, 3)),
        "nothing": call(q=torch.empty(2, 3, 0, 16, device=kernel_device)),
    }  # fmt: skip
    with torch.no_grad():
        for name, given in calls.items():
            for found, right in zip(norm_and_rotate(**given), by_torch(**given), strict=True):
                torch.testing.assert_close(found, right, msg=name)
        with torch.autocast(kernel_device, torch.bfloat16):
            norm_and_rotate(**call())
    given = call(q_weight=torch.ones(16, device=kernel_device, requires_grad=True))
    sum(x.sum() for x in norm_and_rotate(**given)).backward()
    assert given["q_weight"].grad is not None
    assert not kernel_calls


@pytest.mark.interpreter
@torch.no_grad()
def test_what_only_torch_can_refuse(kernel_device, kernel_calls) -> None:
    """Tensors of several devices, and weights of other sizes than a head's: torch's error, no kernel."""
    q, k, *weights, eps, cos, sin = drawn(kernel_device, torch.float32)
    long, elsewhere = (torch.ones(n, device=d) for n, d in ((32, kernel_device), (16, "meta")))
    for wrong in (
        (q, k, *weights, eps, cos.to("meta"), sin.to("meta")), (q, k.to("meta"), *weights, eps, cos, sin),
        (q, k, elsewhere, elsewhere, eps, cos, sin), (q, k, long, long, eps, cos, sin),
    ):  # fmt: skip
        with pytest.raises((RuntimeError, ValueError)):
            norm_and_rotate(*wrong)
    assert not kernel_calls


def test_compiled(device) -> None:
    call = drawn(device, torch.float32)
    compiled = torch.compile(norm_and_rotate, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for found, right in zip(compiled(*call), by_torch(*call), strict=True):
            torch.testing.assert_close(found, right)


#: The largest value of a head, and some whose quotients by its scale lie at the borders of two codes of e4m3 and e5m2, or of
#: int8: a product with the scale's reciprocal is rounded to the other one.
BORDERS = [[217, 73.625, 89.125, 42.625, 58.125], [222.25, 11.375, 21.875, 25.375, 39.375]]


def drawn_slots(k, stored=None, pages=7, page_size=4) -> KVSlots:
    """K's cache as the engine has it, heads within a page's tokens, V's a part of a larger one that lies otherwise; their
    scales likewise. One token has no page."""
    tokens, (_, _, heads, dims) = k.shape[0] * k.shape[1], k.shape
    k_cache = torch.randn(pages, page_size, heads, dims, device=k.device).to(stored or k.dtype)
    v_cache = torch.randn(pages, heads + 1, page_size, dims + 16, device=k.device).to(k_cache.dtype)
    k_scale = v_scale = None
    if stored:
        k_scale = torch.rand(pages, heads, page_size, device=k.device)
        v_scale = torch.rand(pages, page_size, heads + 1, device=k.device).mT[:, 1:]
    places = torch.randperm(pages * page_size, device=k.device)[:tokens].int()
    pages = places // page_size
    pages[1:2] = -1
    caches = k_cache.transpose(1, 2), v_cache[:, 1:, :, :dims]
    return KVSlots(*caches, pages, places % page_size, k_scale, v_scale)


def copied(to: KVSlots) -> KVSlots:
    return KVSlots(*(None if x is None else x.clone() for x in to))


def after_storing(k, v, to: KVSlots) -> KVSlots:
    """The caches, K and V (B, K, T, D) in their slots by `paged_append_kv`, a token a sequence."""
    to = copied(to)
    scales, rows = {}, [x.transpose(1, 2).flatten(0, 1)[:, :, None] for x in (k, v)]
    if to.k_scale is not None:
        real = to.pages >= 0
        for scale, x in zip((to.k_scale, to.v_scale), rows, strict=True):
            found = x.float().abs().amax((2, 3)).clamp(min=1e-20) * (
                1 / QUANTISED[to.k_cache.dtype]
            )
            scale[to.pages[real], :, to.slots[real]] = found[real]
        scales = dict(k_scale=to.k_scale, v_scale=to.v_scale)
    paged_append_kv(to.k_cache, to.v_cache, to.pages[:, None], *rows, to.slots, **scales)
    return to


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("dtype", "stored"),
    [(torch.float32, None), *((torch.float16, stored) for stored in (None, *QUANTISED))],
)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_storing_is_the_same_in_one_launch(
    case, dtype, stored, kernel_device, kernel_calls
) -> None:
    """Bit for bit what `norm_and_rotate` and `paged_append_kv` give, in fp32 to the order of a norm's sum; the rest of the
    cache stays as it is."""
    q, k, *options = drawn(kernel_device, dtype, **CASES[case])
    both = torch.randn(*k.shape[:2], 2 * k[0, 0].numel(), device=kernel_device).to(dtype)
    v = both[..., k[0, 0].numel() :].unflatten(-1, k.shape[2:])  # a part of a wider product, as k
    v[0, 0, 0] = 0  # a head whose largest value is none to divide by
    if case == "Qwen3":
        v[1, 1, :, :5] = torch.tensor(BORDERS, device=kernel_device)
    to = drawn_slots(k, stored)
    turned_q, turned_k = norm_and_rotate(q, k, *options)
    expected = after_storing(turned_k, v.transpose(1, 2), to)
    kernel_calls.clear()
    found = norm_rotate_and_store(q, k, v, *options, to)
    compared = {"q": (found, turned_q)}
    compared |= {name: pair for name, *pair in zip(KVSlots._fields, to, expected, strict=True)}
    tolerance = 1e-6 if dtype == torch.float32 else 0
    for name, (written, right) in compared.items():
        if right is not None:
            written, right = (x.view(torch.uint8) if x.itemsize == 1 else x for x in (written, right))  # fmt: skip
            torch.testing.assert_close(written, right, rtol=tolerance, atol=tolerance, msg=name)
    assert len(kernel_calls) == 1


@pytest.mark.interpreter
@pytest.mark.parametrize("stored", QUANTISED)
@torch.no_grad()
def test_what_is_no_number_is_read_back_as_none(stored, kernel_device) -> None:
    """All of a head that has one: no scale is right for it."""
    q, k, *options = drawn(kernel_device, torch.float32, normed=False)
    v, to = torch.randn_like(k), drawn_slots(k, stored)
    v[0, 0, 0, 3], v[0, 2, 1, 4] = torch.nan, torch.inf
    norm_rotate_and_store(q, k, v, *options, to)
    read = to.v_cache.float() * to.v_scale[..., None]
    for token, head in ((0, 0), (2, 1)):
        here = to.pages[token], slice(None), to.slots[token]
        assert read[here][head].isnan().all()
        assert not read[here][1 - head].isnan().any()


@pytest.mark.interpreter
def test_what_is_not_stored(kernel_device, kernel_calls) -> None:
    """None, and caches as they were, so that the caller stores in its own way."""
    with torch.no_grad():
        q, k, *options = drawn(kernel_device, torch.float32)
    v, to, bytes_ = torch.randn_like(k), drawn_slots(k), drawn_slots(k, torch.int8)
    wide = drawn_slots(torch.randn(2, 3, 2, 24, device=kernel_device))

    def apart(x):
        return x.repeat_interleave(2, -1)[..., ::2]

    def changed(of=to, **fields):
        return of._replace(**fields)

    cases = {
        "caches of another dtype": (v, changed(k_cache=to.k_cache.half(), v_cache=to.v_cache.half())),
        "caches of two dtypes": (v, changed(v_cache=to.v_cache.half())),
        "bytes of two dtypes": (v, changed(bytes_, v_cache=bytes_.v_cache.view(torch.float8_e5m2))),
        "values of another dtype": (v.half(), to),
        "values of other dims": (torch.randn(*k.shape[:3], 24, device=kernel_device), to),
        "caches of two shapes": (v, changed(v_cache=wide.v_cache)),
        "caches of other dims": (v, wide),
        "caches of other heads": (v, changed(k_cache=to.k_cache[:, :1], v_cache=to.v_cache[:, :1])),
        "elements of values apart": (apart(v), to),
        "elements of k_cache apart": (v, changed(k_cache=apart(to.k_cache))),
        "elements of v_cache apart": (v, changed(v_cache=apart(to.v_cache))),
        "pages of int64": (v, changed(pages=to.pages.long())),
        "slots of int64": (v, changed(slots=to.slots.long())),
        "pages apart": (v, changed(pages=apart(to.pages))),
        "slots apart": (v, changed(slots=apart(to.slots))),
        "fewer slots than tokens": (v, changed(slots=to.slots[1:])),
        "scales of numbers": (v, changed(k_scale=bytes_.k_scale, v_scale=bytes_.v_scale)),
        "one byte without scales": (v, changed(bytes_, k_scale=None, v_scale=None)),
        "scales of another dtype": (v, changed(bytes_, v_scale=bytes_.v_scale.double())),
        "scales of another shape": (v, changed(bytes_, v_scale=bytes_.v_scale[:, :1])),
        "a value with a gradient": (v.clone().requires_grad_(), to),
    }  # fmt: skip
    before = copied(to), copied(bytes_)
    for name, (values, where) in cases.items():
        assert norm_rotate_and_store(q, k, values, *options, where) is None, name
    half = [x.half() for x in options[3:]]
    assert norm_rotate_and_store(q, k, v, *options[:3], *half, to) is None
    for x, y in zip((*to, *bytes_), (*before[0], *before[1]), strict=True):
        assert x is None or torch.equal(x, y)
    assert not kernel_calls
