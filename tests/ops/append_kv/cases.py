"""Drawn calls of append_kv, and an oracle in plain Python loops that says what memory may hold afterwards.

A cache is a view of a buffer of random bytes. The oracle says which of its elements are written, and within
which bounds; all other bytes of the buffer are canaries and must stay.
"""

from __future__ import annotations

import bisect
import math
import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

import torch_fdattn
from torch_fdattn.ops.library import INTERPRET
from torch_fdattn.testing import LAYOUTS, make_tensor

QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
CACHE_LAYOUTS = ("bhsd", "bshd", "slice", "packed", "every_other", "transposed", "joined")
EPSILON = 2.0**-24  # half a unit of rounding of fp32


def floating_dtypes(device: str) -> tuple[torch.dtype, ...]:
    """What the kernel (or, without one, the reference) can be given here."""
    if INTERPRET:
        return (torch.float16, torch.float32)
    double = () if device == "cuda" else (torch.float64,)
    return (torch.float16, torch.bfloat16, torch.float32, *double)


@dataclass
class Case:
    """A call's tensors on the CPU; those that may be written to are views of `buffers`."""

    tensors: dict[str, Tensor | None]
    features: list[str] = field(default_factory=list)

    def on(self, device: str) -> Case:
        """The same call elsewhere, or here in memory of its own; strides and shared buffers stay."""
        moved: dict[int, Tensor] = {}

        def move(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            storage = x.untyped_storage()
            if storage.data_ptr() not in moved:
                flat = torch.empty(0, dtype=torch.uint8).set_(storage)
                moved[storage.data_ptr()] = flat.to(device, copy=True)
            buffer = moved[storage.data_ptr()].view(x.dtype)
            return buffer.as_strided(x.shape, x.stride(), x.storage_offset())

        return Case({name: move(x) for name, x in self.tensors.items()}, self.features)

    def call(self) -> None:
        names = ("k_cache", "v_cache", "page_table", "k", "v", "kv_lens", "new_lens")
        given = dict(self.tensors)
        arguments = [given.pop(name) for name in names]
        if arguments[2] is None:
            del arguments[2]
            torch_fdattn.append_kv(*arguments, **given)
        else:
            torch_fdattn.paged_append_kv(*arguments, **given)


def buffer_bytes(x: Tensor) -> Tensor:
    """All bytes behind a tensor, those between and around its elements included."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).cpu()


def make_cache(shapes: list[tuple[int, ...]], layout: str, dtype: torch.dtype) -> list[Tensor]:
    """The K and V cache of these shapes in random bytes."""

    def noise(*sizes: int) -> Tensor:
        count = math.prod(sizes) * dtype.itemsize
        return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).view(sizes)

    if layout == "joined":  # one buffer, (…, 2, heads, slots, D); the wider of both decides
        rows, heads, slots, _ = shapes[0]
        width = max(shape[3] for shape in shapes)
        both = noise(rows, 2, heads, slots, width)
        return [both[:, i, ..., : shape[3]] for i, shape in enumerate(shapes)]
    caches = []
    for rows, heads, slots, dim in shapes:
        if layout == "bhsd":
            cache = noise(rows, heads, slots, dim)
        elif layout == "bshd":
            cache = noise(rows, slots, heads, dim).transpose(1, 2)
        elif layout == "slice":
            cache = noise(rows + 2, heads, slots + 8, dim)[1:-1, :, 3:-5]
        elif layout == "packed":
            cache = noise(rows, slots, heads + 2, dim + 8)[:, :, 1:-1, 8:].transpose(1, 2)
        elif layout == "every_other":
            cache = noise(rows, heads, 2 * slots + 1, dim)[:, :, 1::2]
        else:
            cache = noise(rows, heads, dim, slots).mT
        caches.append(cache)
    return caches


def draw(seed: int, device: str) -> Case:
    """Any combination of what the op takes, lengths beyond the cache and pages beyond the pool included."""
    rng = random.Random(f"append {seed}")
    torch.manual_seed(seed)
    batch, kv_heads, group = rng.choice((1, 2, 3)), rng.choice((1, 2, 3)), rng.choice((1, 2))
    tokens = rng.choice((1, 1, 2, 3, 5))
    dims = [rng.choice((16, 24, 32, 40)) for _ in range(2)]
    if rng.random() < 0.1:
        dims[rng.randrange(2)] = rng.choice(range(48, 257, 8))
    if rng.random() < 0.08:  # more than one tile of tokens
        batch, kv_heads, group, tokens, dims = 1, 1, 1, rng.randint(100, 150), [16, 16]
    if rng.random() < 0.6:
        dims[1] = dims[0]
    dtype = rng.choice(floating_dtypes(device))
    cache_dtype = rng.choice((*QUANTISED, dtype, *floating_dtypes(device)))
    paged = rng.random() < 0.5
    page = rng.choice((1, 1, 2, 3, 5, 16)) if paged else rng.choice((1, 4, 9, 33))
    page *= 1 + (not paged) * (tokens // 10)
    table_width = rng.randint(1, 2 + (tokens + 8) // page) if paged else 1
    capacity = page * table_width
    rows = batch * table_width + rng.randint(0, 3) if paged else batch
    layout = rng.choice(CACHE_LAYOUTS)
    k_cache, v_cache = make_cache([(rows, kv_heads, page, d) for d in dims], layout, cache_dtype)

    rope = rng.random() < 0.5
    special = not rope and rng.random() < 0.4
    k, v = (_new(rng, (batch, kv_heads, tokens, d), dtype, special) for d in dims)
    tensors = dict(
        k_cache=k_cache, v_cache=v_cache, page_table=None, k=k, v=v,
        kv_lens=_lens(rng, batch, capacity, tokens), new_lens=None,
    )  # fmt: skip
    if paged:
        tensors["page_table"] = _page_table(rng, batch, table_width, rows)
    if rng.random() < 0.4:
        choices = (0, -1, 1, tokens // 2, tokens, tokens + 9)
        tensors["new_lens"] = _integers(rng, [rng.choice(choices) for _ in range(batch)])
    for name, cache in (("k_scale", k_cache), ("v_scale", v_cache)):
        if cache_dtype in QUANTISED and rng.random() < 0.8:
            tensors[name] = _scale(rng, cache.shape[:3], cache_dtype)
    if rope:
        tensors |= _rope(rng, batch, kv_heads * group, tokens, capacity, dims[0], dtype)
    case = Case(tensors)
    case.features = _features(case, capacity, layout, special)
    return case


def _new(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype, special: bool) -> Tensor:
    x = make_tensor(shape, rng.choice(LAYOUTS), dtype=dtype, scale=rng.choice((0.1, 1.0, 30.0)))
    if special:
        inf, nan = float("inf"), float("nan")
        values = torch.tensor([0.0, -0.0, inf, -inf, nan, 6e4, -6e4, 447.9, 2e-3, -6e-8])
        chosen = values[torch.randint(0, len(values), shape)].to(dtype)
        if x.stride(1) == 0:
            x = x.contiguous()
        x.copy_(torch.where(torch.rand(shape) < 0.2, chosen, x))
    return x


def _integers(rng: random.Random, values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    """Sometimes every second element of a buffer."""
    flat = torch.tensor(values, dtype=dtype)
    if rng.random() < 0.3:
        flat = flat.repeat_interleave(2)[::2]
    return flat


def _lens(rng: random.Random, batch: int, capacity: int, tokens: int) -> Tensor:
    fits = max(capacity - tokens, 0)
    values = []
    for _ in range(batch):
        near = rng.choice((0, fits, rng.randint(0, fits)))
        far = (capacity, capacity - 1, capacity + 5, -1, -tokens, -(2**31), 2**31 - 1, fits + 1)
        values.append(near if rng.random() < 0.7 else rng.choice(far))
    return _integers(rng, values, rng.choice((torch.int32, torch.int32, torch.int64)))


def _page_table(rng: random.Random, batch: int, width: int, pages: int) -> Tensor:
    """Distinct pages, now and then one that does not exist."""
    table = torch.tensor(rng.sample(range(pages), batch * width), dtype=torch.int32)
    table = table.view(batch, width).clone()
    if rng.random() < 0.3:
        wrong = rng.choice((pages, -1, -pages, 2**31 - 1, -(2**31)))
        table[rng.randrange(batch), rng.randrange(width)] = wrong
    return table.mT.contiguous().mT if rng.random() < 0.3 else table


def _scale(rng: random.Random, slots: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Of any broadcastable shape; values under which some of the new elements saturate."""
    dims = rng.randint(0, 3)
    shape = [size if rng.random() < 0.6 else 1 for size in slots[3 - dims :]]
    low, high = {torch.int8: (-9, 1), torch.float8_e4m3fn: (-12, 4)}.get(dtype, (-18, 4))
    return torch.exp2(torch.empty(shape).uniform_(low, high))


def _rope(rng, batch, heads, tokens, capacity, dim, dtype) -> dict[str, Tensor | None]:
    length = rng.choice((1, capacity, capacity + tokens, max(capacity // 2, 1)))
    half = rng.choice((dim // 2, dim // 2, dim // 4, 1, rng.randint(1, dim // 2)))
    angles = torch.rand(length, half) * 6.3
    side = rng.choice((0, 1, 2))  # one table of both, whose last dim may have a stride
    cos, sin = torch.stack((angles.cos(), angles.sin()), side).unbind(side)
    positions = q = None
    if rng.random() < 0.5:
        low, high = (-3, length + 3) if rng.random() < 0.5 else (0, length)
        positions = torch.randint(
            low, high, (batch, tokens), dtype=rng.choice((torch.int32, torch.int64))
        )
        if rng.random() < 0.3:
            positions = positions.mT.contiguous().mT
    if rng.random() < 0.6:
        layout = rng.choice([x for x in LAYOUTS if x != "expanded"])
        q = make_tensor((batch, heads, tokens, dim), layout, dtype=dtype)
    return dict(cos=cos, sin=sin, positions=positions, q=q)


def _features(case: Case, capacity: int, layout: str, special: bool) -> list[str]:
    x = case.tensors
    tokens, lens = x["k"].shape[2], x["kv_lens"].tolist()
    page = x["k_cache"].shape[2]

    def name(tensor: Tensor) -> str:
        return str(tensor.dtype).removeprefix("torch.")

    tests = {
        "paged": x["page_table"] is not None,
        "page of 1": x["page_table"] is not None and page == 1,
        "a page that does not exist": x["page_table"] is not None
        and bool(((x["page_table"] < 0) | (x["page_table"] >= x["k_cache"].shape[0])).any()),
        "one token": tokens == 1,
        "several tiles of tokens": tokens > 128,
        "new_lens": x["new_lens"] is not None,
        "beyond the cache": any(n + tokens > capacity for n in lens),
        "before the cache": any(n < 0 for n in lens),
        "D_v differs": x["k"].shape[3] != x["v"].shape[3],
        "scales": x.get("k_scale") is not None or x.get("v_scale") is not None,
        "rope": x.get("cos") is not None,
        "rope of a part": x.get("cos") is not None and 2 * x["cos"].shape[1] < x["k"].shape[3],
        "own positions": x.get("positions") is not None,
        "q": x.get("q") is not None,
        "NaN and infinities": special,
    }
    return [
        f"{name(x['k'])} to {name(x['k_cache'])}" if x["k_cache"].dtype not in QUANTISED else f"to {name(x['k_cache'])}",
        f"cache {layout}", *(key for key, holds in tests.items() if holds),
    ]  # fmt: skip


class Expected:
    """Bounds of every written element, by the name of its tensor and its index."""

    def __init__(self, case: Case) -> None:
        self.bounds: dict[str, dict[tuple[int, ...], tuple[float, float]]] = {}
        self.before = {
            name: buffer_bytes(x).clone() for name, x in case.tensors.items() if x is not None
        }
        x = case.tensors
        k_cache, table = x["k_cache"], x["page_table"]
        page = k_cache.shape[2]
        capacity = page * (1 if table is None else table.shape[1])
        for b in range(x["k"].shape[0]):
            new = x["k"].shape[2]
            if x["new_lens"] is not None:
                new = min(new, int(x["new_lens"][b]))
            for t in range(new):
                slot = int(x["kv_lens"][b]) + t
                angles = _angles(x, b, t, slot)
                for h in range(0 if x.get("q") is None else x["q"].shape[1]):
                    self._write("q", (b, h, t), _turned(x["q"][b, h, t], angles), x["q"].dtype, 1.0)
                if not 0 <= slot < capacity:
                    continue
                row, offset = b, slot
                if table is not None:
                    row, offset = int(table[b, slot // page]), slot % page
                    if not 0 <= row < k_cache.shape[0]:
                        continue
                for h in range(k_cache.shape[1]):
                    at = (row, h, offset)
                    for which, turn in (("k", angles), ("v", None)):
                        scale = x.get(f"{which}_scale")
                        scale = 1.0 if scale is None else scale.expand(k_cache.shape[:3])[at].item()
                        values = _turned(x[which][b, h, t], turn)
                        self._write(f"{which}_cache", at, values, k_cache.dtype, scale)

    def _write(self, name, at, values, dtype, scale: float) -> None:
        bounds = self.bounds.setdefault(name, {})
        for d, (value, error) in enumerate(values):
            value, error = value / scale, error / scale
            if scale != 1.0 and math.isfinite(value):
                error += abs(value) * EPSILON
            bounds[(*at, d)] = tuple(rounded(x, dtype) for x in (value - error, value + error))

    def check(self, case: Case) -> None:
        """Asserts every written element's bounds, and that every other byte is what it was."""
        for name, before in self.before.items():
            after = buffer_bytes(case.tensors[name])
            tensor = case.tensors[name]
            # Elements by their place in the buffer; a buffer may be behind several tensors.
            size, changed = tensor.element_size(), torch.zeros(len(after), dtype=torch.bool)
            for other, bounds in self.bounds.items():
                x = case.tensors[other]
                if x.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
                    continue
                for index in bounds:
                    place = x.storage_offset() + sum(
                        i * s for i, s in zip(index, x.stride(), strict=True)
                    )
                    changed[place * size : (place + 1) * size] = True
            wrong = ((after != before) & ~changed).nonzero().flatten().tolist()
            assert not wrong, f"{name}: {len(wrong)} bytes changed that must not, first {wrong[:8]}"
        for name, bounds in self.bounds.items():
            found = case.tensors[name].cpu().double()
            for index, (low, high) in bounds.items():
                value = found[index].item()
                right = math.isnan(value) if math.isnan(low) else low <= value <= high
                assert right, f"{name}{list(index)}: {value!r}, expected {low!r} to {high!r}"


def _angles(x, b: int, t: int, slot: int) -> tuple[list[float], list[float]] | None:
    if x.get("cos") is None:
        return None
    position = slot if x["positions"] is None else int(x["positions"][b, t])
    position = min(max(position, 0), x["cos"].shape[0] - 1)
    return x["cos"][position].tolist(), x["sin"][position].tolist()


def _turned(row: Tensor, angles) -> list[tuple[float, float]]:
    """Each element's value and how far fp32 may be from it."""
    row = row.double().tolist()
    values = [(value, 0.0) for value in row]
    if angles is not None:
        for i, (cos, sin) in enumerate(zip(*angles, strict=True)):
            j = i + len(angles[0])
            for at, first, second in (
                (i, row[i] * cos, -row[j] * sin),
                (j, row[j] * cos, row[i] * sin),
            ):
                # Two products and a sum; elements so small that fp32 loses bits are none of these.
                values[at] = (first + second, 2.01 * EPSILON * (abs(first) + abs(second)))
    return values


def rounded(value: float, dtype: torch.dtype) -> float:
    """To nearest, ties to even; saturated where the dtype is quantised."""
    if math.isnan(value):
        return 0.0 if dtype == torch.int8 else value
    if dtype not in QUANTISED:
        # (float64 to a half type goes through fp32, which is where our values come from.)
        return torch.tensor(value, dtype=torch.float64).float().to(dtype).item() if (
            dtype != torch.float64
        ) else value  # fmt: skip
    values = grid(dtype)
    size = min(abs(value), values[-1])
    above = bisect.bisect_left(values, size)
    if values[above] == size:
        return math.copysign(size, value)
    low, high = values[above - 1], values[above]
    middle = (low + high) / 2
    # Values stand in the order of their codes, so that the even code is the one with the even index.
    nearest = above - 1 if size < middle or (size == middle and above % 2) else above
    return math.copysign(values[nearest], value)


def grid(dtype: torch.dtype) -> list[float]:
    """All values from 0 to the largest finite one, in the order of their codes, by the formats' definition."""
    if dtype == torch.int8:
        return [float(n) for n in range(128)]
    mantissa, bias, last = (3, 7, 0x7E) if dtype == torch.float8_e4m3fn else (2, 15, 0x7B)
    grid = []
    for code in range(last + 1):
        exponent, fraction = code >> mantissa, (code & ((1 << mantissa) - 1)) / (1 << mantissa)
        grid.append(
            fraction * 2.0 ** (1 - bias)
            if exponent == 0
            else (1 + fraction) * 2.0 ** (exponent - bias)
        )
    return grid
