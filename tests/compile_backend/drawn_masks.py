"""Attention under drawn compositions of masks, through the backend, against eager: `make drawn-masks`.

    python -m tests.compile_backend.drawn_masks [HOW MANY]

A composition is one to three masks (causal, padding, a window, blocks, random entries, a bias of floats, which may
hold a mask too), each with what it fills in (-inf, a dtype's least number, -1e9, -1e4) and a way to write it, in a
drawn order; scores may be cast to fp32 before, and heads of K and V be grouped. Every twelfth or so is a fill with
rows of -inf from data behind it. All rows count, those that see no key
too: outputs and gradients are held to the error rule against fp64, NaN and infinities stand where eager has them, or
the attention is left for a reason. The table that is printed is kept beside this file.
"""

from __future__ import annotations

import math
import operator
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from torch_fdattn.testing import check_close
from torch_fdattn.testing.oracle import _Streamed

DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
KINDS = ("causal", "left padding", "right padding", "window", "blocks", "random", "bias")
WAYS = (
    "masked_fill", "where", "added", "subtracted", "where of where, added", "added, given",
    "1 - mask, times, added", "sdpa",
)  # fmt: skip
#: Of a bias: what holds the numbers that hide, if anything does.
BIASES = ("added", "added", "filled, added", "filled, given")
COUNTS = (1, 1, 1, 2, 2, 3)
#: Inputs of which torch's own error is taken: in fp32 a single one is a lottery (`torch_fdattn.testing`).
SAMPLES = {torch.float32: 8}
_LEASTS = [torch.finfo(x).min for x in (torch.float16, torch.bfloat16, torch.float32)]
#: Of all compositions, what is to be rewritten.
LEAST_SHARE = 0.7


@dataclass(frozen=True)
class Mask:
    kind: str
    way: str
    fill: float


@dataclass
class Composition:
    """Drawn from a seed: attention over q, k, v and the tensors that its masks are given."""

    seed: int
    dtype: torch.dtype = torch.float32
    masks: list[Mask] = field(default_factory=list)
    sizes: tuple[int, ...] = ()
    given: list[Tensor] = field(default_factory=list)  #: a tensor a mask
    scaled_afterwards: bool = False
    in_fp32: bool = False  #: whether softmax is, whatever the dtype
    masked_in_fp32: bool = False  #: whether scores are cast before they are masked
    kv_heads: int = 2
    trained: bool = True  #: whether gradients are wanted

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        torch.manual_seed(self.seed)
        self.dtype = draw.choice(DTYPES)
        self.in_fp32 = self.dtype.itemsize == 2 and draw.random() < 0.5
        self.masked_in_fp32 = self.dtype.itemsize == 2 and draw.random() < 0.3
        self.kv_heads = draw.choice((1, 2, 2, 2))
        self.scaled_afterwards = draw.random() < 0.1
        q_len = draw.choice((8, 12))
        kv_len = q_len if draw.random() < 0.7 else q_len + draw.choice((-4, 4))
        self.sizes = (2, 2, q_len, kv_len)
        with_sdpa = draw.random() < 1 / len(WAYS)
        for _ in range(draw.choice(COUNTS)):
            kind = draw.choice(KINDS)
            way = "sdpa" if with_sdpa else draw.choice(WAYS[:-1])
            if with_sdpa:  # which scales before it masks
                self.scaled_afterwards = self.in_fp32 = self.masked_in_fp32 = False
            if kind == "bias" and not with_sdpa:
                way = draw.choice(BIASES)
            fill = self._fill(way, draw)
            self.masks.append(Mask(kind, way, fill))
            self.given.append(self._given(kind, way, fill, draw))
        self.trained = draw.random() < 0.8
        if not with_sdpa and draw.random() < 0.08:
            self._hide_rows_by_data_behind_a_fill(draw)

    def _hide_rows_by_data_behind_a_fill(self, draw: random.Random) -> None:
        """Rows of -inf that the call gives, where keys were filled by a finite number: no other draw is likely to.

        Eager's NaN reaches q and k there but through what was filled.
        """
        least = torch.finfo(self.mask_dtype).min
        kind, way = (
            draw.choice(("causal", "window", "blocks")),
            draw.choice(("masked_fill", "where")),
        )
        batch, _, q_len, _ = self.sizes
        seen = torch.rand(batch, 1, q_len, 1) > 0.3
        rows = torch.zeros(seen.shape, dtype=self.mask_dtype).masked_fill(~seen, -math.inf)
        self.masks = [Mask(kind, way, least), Mask("random", "added, given", -math.inf)]
        self.given = [torch.tensor(3), rows]

    @property
    def mask_dtype(self) -> torch.dtype:
        """Of the scores where they are masked."""
        return torch.float32 if self.masked_in_fp32 else self.dtype

    def _fill(self, way: str, draw: random.Random) -> float:
        # Half precision holds no -1e9.
        far = -3e4 if self.mask_dtype == torch.float16 else -1e9
        least = torch.finfo(self.mask_dtype).min
        others = [x for x in _LEASTS if x > least]
        fill = draw.choice((-math.inf, least, far, -1e4, draw.choice([least, *others])))
        # 0 times infinity is NaN.
        return least if way == "1 - mask, times, added" and fill == -math.inf else fill

    def _given(self, kind: str, way: str, fill: float, draw: random.Random) -> Tensor:
        batch, heads, q_len, kv_len = self.sizes
        if kind == "bias":
            shape = draw.choice(((heads, q_len, kv_len), (q_len, kv_len), (batch, 1, 1, kv_len)))
            bias = torch.randn(shape, dtype=self.mask_dtype)
            if way == "filled, given":
                bias = bias.masked_fill(~self.seen("causal", bias), fill)
            return bias.requires_grad_(draw.random() < 0.5)
        if "padding" in kind:
            ends = torch.tensor([draw.randint(0, 5), draw.choice((0, 3, kv_len))])
            seen = torch.arange(kv_len) >= ends[:, None]
            given = seen.flip(1) if kind == "right padding" else seen
        elif kind == "random":
            given = torch.rand(batch, 1, q_len, kv_len) > draw.choice((0.3, 0.8))
        else:
            given = torch.tensor(draw.randint(2, 5))
        if way != "added, given" or kind in ("blocks",):
            return given
        seen = self.seen(kind, given)
        return torch.zeros(seen.shape, dtype=self.mask_dtype).masked_fill(~seen, fill)

    def seen(self, kind: str, given: Tensor) -> Tensor:
        """The keys that are seen, broadcast to (B, H, S, N)."""
        _, _, q_len, kv_len = self.sizes
        queries, keys = torch.arange(q_len)[:, None], torch.arange(kv_len)
        if kind == "causal":
            return (keys <= queries)[None, None]
        if kind == "window":
            return ((queries - keys).abs() < 3)[None, None]
        if kind == "blocks":
            return (queries // 4 == keys // 4)[None, None]
        return given[:, None, None, :] if "padding" in kind else given

    def numbers(self, mask: Mask, given: Tensor, dtype: torch.dtype) -> Tensor:
        """What a mask adds."""
        if mask.kind == "bias":
            if mask.way == "filled, added":
                return given.masked_fill(~self.seen("blocks", given), mask.fill)
            return given
        if mask.way == "added, given" and given.is_floating_point():
            return given
        seen = self.seen(mask.kind, given)
        if mask.way == "1 - mask, times, added":
            return (1.0 - seen.to(dtype)) * mask.fill
        if mask.kind == "causal" and mask.fill == -math.inf and mask.way == "added":
            return torch.full(self.sizes[2:], mask.fill, dtype=dtype).triu(1)
        zeros = torch.zeros((), dtype=dtype)
        if mask.way == "where of where, added":
            near = torch.where(self.seen("window", given), zeros, mask.fill / 2)
            return torch.where(seen, near, mask.fill)
        if mask.way == "subtracted":
            return torch.where(seen, zeros, -mask.fill)
        return torch.where(seen, zeros, mask.fill)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        return self._attend(q, k, v, given, fused=True)

    def exact(self, q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        """By formula, where eager has torch's fused kernels too."""
        return self._attend(q, k, v, given, fused=False)

    def reversed(self, q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        """The formula with products that are summed in another order."""
        return self._attend(q.flip(-1), k.flip(-1), v, given, fused=False)

    def streamed(self, q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        """Exact, but for a derivative from an output that is saved at the dtype (and an lse that is no large number)."""
        scores = self._scores(q, self._repeated(k), given)
        v = self._repeated(v)
        scores = scores - scores.detach().amax(-1, keepdim=True)
        return _Streamed.apply(scores, v, None, self.dtype)[0]

    def _attend(self, q, k, v, given: tuple[Tensor, ...], fused: bool) -> Tensor:
        k, v = self._repeated(k), self._repeated(v)
        if self.masks[0].way == "sdpa":
            return self._by_sdpa(q, k, v, given, fused)
        scores = self._scores(q, k, given)
        if self.in_fp32:
            return F.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v
        return scores.softmax(-1).to(q.dtype) @ v

    def _repeated(self, x: Tensor) -> Tensor:
        return x if self.kv_heads == 2 else x.repeat_interleave(2, 1)

    def _scores(self, q, k, given: tuple[Tensor, ...]) -> Tensor:
        if self.masks[0].way == "sdpa":
            return self._sdpa_scores(q, k, given)
        scores = q @ k.mT
        if not self.scaled_afterwards:
            scores = scores * 0.25
        if self.masked_in_fp32 and scores.dtype != torch.float64:
            scores = scores.float()
        for mask, tensor in zip(self.masks, given, strict=True):
            if mask.way == "masked_fill":
                scores = scores.masked_fill(~self.seen(mask.kind, tensor), mask.fill)
            elif mask.way == "where":
                scores = torch.where(self.seen(mask.kind, tensor), scores, mask.fill)
            elif mask.way == "subtracted":
                scores = scores - self.numbers(mask, tensor, scores.dtype)
            else:
                scores = scores + self.numbers(mask, tensor, scores.dtype)
        return scores * 0.25 if self.scaled_afterwards else scores

    def _by_sdpa(self, q, k, v, given: tuple[Tensor, ...], fused: bool) -> Tensor:
        if fused:
            mask = self._one_mask(given, q.dtype).expand(self.sizes)
            return F.scaled_dot_product_attention(q, k, v, mask, scale=0.25)
        scores = self._sdpa_scores(q, k, given)
        hidden = (scores == -math.inf).all(-1, keepdim=True)
        return (scores.masked_fill(hidden, 0.0).softmax(-1) @ v).masked_fill(hidden, 0.0)

    def _sdpa_scores(self, q, k, given: tuple[Tensor, ...]) -> Tensor:
        mask, scores = self._one_mask(given, q.dtype), q @ k.mT * 0.25
        return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask

    def _one_mask(self, given: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """All masks as SDPA takes them: boolean where all hide by -inf, else a sum."""
        pairs = list(zip(self.masks, given, strict=True))
        if all(x.kind != "bias" and x.fill == -math.inf for x in self.masks):
            return reduce(operator.and_, (self.seen(mask.kind, x) for mask, x in pairs))
        return reduce(operator.add, (self.numbers(mask, x, dtype) for mask, x in pairs))

    def inputs(self, sample: int = 0) -> list[Tensor]:
        batch, heads, q_len, kv_len = self.sizes
        make = torch.Generator().manual_seed(1000 * self.seed + sample)
        shapes = (heads, q_len), (self.kv_heads, kv_len), (self.kv_heads, kv_len), (heads, q_len)
        return [torch.randn(batch, *x, 16, generator=make).to(self.dtype) for x in shapes]

    def results(self, function: Callable, dtype: torch.dtype, sample: int = 0) -> dict[str, Tensor]:
        """The output and the gradients of all that has one."""
        *qkv, dout = (x.to(dtype) for x in self.inputs(sample))
        of_masks = self.mask_dtype if dtype == self.dtype else dtype
        if not self.trained:
            given = (x.detach().to(of_masks) if x.is_floating_point() else x for x in self.given)
            return {"out": function(*qkv, *given)}
        qkv = [x.requires_grad_() for x in qkv]
        given = [x.detach().to(of_masks).requires_grad_(x.requires_grad) if x.is_floating_point() else x
                 for x in self.given]  # fmt: skip
        out = function(*qkv, *given)
        names = ["dq", "dk", "dv", *(f"dbias{i}" for i, x in enumerate(given) if x.requires_grad)]
        leaves = [*qkv, *(x for x in given if x.requires_grad)]
        found = torch.autograd.grad(out, leaves, dout, allow_unused=True)
        gradients = (
            torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)
        )
        return {"out": out.detach(), **dict(zip(names, gradients, strict=True))}

    def __str__(self) -> str:
        masks = "; ".join(f"{x.kind} by {x.way} of {x.fill:.3g}" for x in self.masks)
        name = str(self.dtype).removeprefix("torch.")
        how = ", softmax in fp32" * self.in_fp32 + ", masked in fp32" * self.masked_in_fp32
        how += ", one head of K and V" * (self.kv_heads == 1) + ", no gradients" * (
            not self.trained
        )
        return f"seed {self.seed}: {name}{how}: {masks}"


def check_one(seed: int) -> str:
    """Compiles one and compares; returns "rewritten", or the reason why it was left."""
    case = Composition(seed)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(case.attend, backend="fdattn", options={"lower": "eager"})
    found = case.results(compiled, case.dtype)
    counted = counters["fdattn"]
    assert counted["rewritten"] + counted["left"] == 1, f"{case}: {dict(counted)}"
    eager = case.results(case.attend, case.dtype)
    exact = case.results(case.exact, torch.float64)
    errors: dict[str, list[Tensor]] = {name: [] for name in found}
    for sample in range(SAMPLES.get(case.dtype, 1)):
        right = exact if not sample else case.results(case.exact, torch.float64, sample)
        runs = [(case.attend, case.dtype), (case.reversed, case.dtype)]
        if case.dtype != torch.float64:  # what a derivative costs that has its mean from the output
            runs += [(case.streamed, torch.float32), (case.streamed, torch.float64)]
        for way, dtype in runs:
            for name, x in case.results(way, dtype, sample).items():
                errors[name].append(_finite(x.double() - right[name]))
    for name, x in found.items():
        try:
            compare(case, name, x, eager[name], exact[name], errors[name])
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None
    reasons = [key.removeprefix("left/") for key in counted if key.startswith("left/")]
    return reasons[0] if reasons else "rewritten"


def compare(case: Composition, name: str, x, eager, exact, errors: list[Tensor]) -> None:
    for test in (torch.isnan, torch.isposinf, torch.isneginf):
        there, ours = test(eager), test(x)
        assert torch.equal(ours, there), f"{name}: {test.__name__} elsewhere than in eager"
    odd = ~torch.isfinite(eager) | ~torch.isfinite(exact)
    x, exact = x.masked_fill(odd, 0.0), exact.masked_fill(odd, 0.0)
    errors = [error.masked_fill(odd, 0.0) for error in errors]
    if case.dtype != torch.float64:
        check_close(name, x, exact, errors)
        return
    # Of fp64 nothing is more exact: what a number added to scores costs eager itself, it may differ by.
    lost = max((-m.fill for m in case.masks if m.fill > -1e16), default=0.0) * 2**-50
    worst = (x - exact).abs().max().item()
    bound = (1e-12 + lost) * max(1.0, exact.abs().max().item())
    assert worst <= bound, f"{name}: max error {worst:.3g}, bound {bound:.3g}"


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)


def table(results: dict[int, str]) -> str:
    count = len(results)
    done = sum(result == "rewritten" for result in results.values())
    lines = [
        f"Of {count} drawn compositions of masks {done} ({done / count:.0%}) are rewritten; all agree with eager.",
        "", "| | compositions | share |", "|---|---:|---:|",
    ]  # fmt: skip
    for result, n in Counter(results.values()).most_common():
        name = result if result == "rewritten" else f"left: `{result}`"
        lines.append(f"| {name} | {n} | {n / count:.1%} |")
    cases = {seed: Composition(seed) for seed in results}
    rows = {
        "masks": lambda c: [str(len(c.masks))], "dtype": lambda c: [str(c.dtype).removeprefix("torch.")],
        "kind": lambda c: {x.kind for x in c.masks}, "way": lambda c: {x.way for x in c.masks},
        "gradients": lambda c: ["wanted" if c.trained else "none"],
        "scores": lambda c: ["masked in fp32" if c.masked_in_fp32 else "masked in their dtype"],
        "heads of K and V": lambda c: [str(c.kv_heads)],
        "fill": lambda c: {_fill_name(c, x.fill) for x in c.masks if (x.kind, x.way) != ("bias", "added")},
    }  # fmt: skip
    lines += ["", "| with | | compositions | rewritten |", "|---|---|---:|---:|"]
    for what, of in rows.items():
        total, rewritten = Counter(), Counter()
        for seed, case in cases.items():
            total.update(of(case))
            rewritten.update(of(case) if results[seed] == "rewritten" else ())
        lines += [
            f"| {what} | {x} | {n} | {rewritten[x] / n:.0%} |" for x, n in sorted(total.items())
        ]
    return "\n".join(lines)


def _fill_name(case: Composition, fill: float) -> str:
    if fill in _LEASTS:
        return "least" if fill == torch.finfo(case.mask_dtype).min else "another dtype's least"
    return "least" if fill == torch.finfo(case.mask_dtype).min else f"{fill:.0e}"


def main(count: int) -> int:
    results, wrong = {}, 0
    for seed in range(count):
        try:
            results[seed] = check_one(seed)
        except AssertionError as error:
            wrong += 1
            print(error, file=sys.stderr)
    print(table(results))
    rewritten = sum(result == "rewritten" for result in results.values())
    return int(wrong > 0 or rewritten < LEAST_SHARE * count)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000))
