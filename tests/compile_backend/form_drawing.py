"""Attention drawn from the forms that models write: what `drawn_forms.py` compiles and compares."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.compile_backend.drawn_masks import Mask
from torch_fdattn.testing.oracle import _Streamed

DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAYOUTS = (
    "plain", "merged", "merged, taken apart for masks", "grouped", "grouped, by einsum", "k qᵀ",
    "k qᵀ, softmax over its keys", "einsum", "einsum of ...", "heads first",
)  # fmt: skip
SCALINGS = (
    "q", "k", "/", "/=", "mul_", "baddbmm", "a temperature", "over a temperature",
    "a temperature of each head", "mul_ by a temperature",
)  # fmt: skip
KINDS = ("causal", "right padding", "left padding", "bias", "bool")
HIDING = ("masked_fill", "masked_fill_", "where", "+", "+=", "add_")
ADDED = ("+", "+=", "add_")
LIMITS = ("none", "none", "none", "none", "clamp", "clamp_", "max")
WEIGHTS = (
    "as they are",
    "clone",
    "contiguous",
    "an inactive dropout",
    "an inactive dropout in place",
)
BATCH, HEADS, GROUPS = 2, 4, 2


@dataclass
class Form:
    """Drawn from a seed: attention over q, k, v and the tensors that scales and masks are given."""

    seed: int
    dtype: torch.dtype = torch.float32
    layout: str = "plain"
    scaling: str = "q"
    limit: str = "none"
    weights: str = "as they are"
    in_fp32: bool = False
    trained: bool = True
    masks: list[Mask] = field(default_factory=list)
    sizes: tuple[int, int, int] = (8, 8, 16)  #: queries, keys, head dim
    given: list[Tensor] = field(
        default_factory=list
    )  #: a temperature, if any, then a tensor a mask

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        torch.manual_seed(self.seed)
        self.dtype = draw.choice(DTYPES)
        self.layout = draw.choice(LAYOUTS)
        merged = "merged" in self.layout
        self.scaling = draw.choice([x for x in SCALINGS if merged or x != "baddbmm"])
        self.in_fp32 = self.dtype.itemsize == 2 and draw.random() < 0.5
        self.trained = draw.random() < 0.7
        self.weights = draw.choice(WEIGHTS)
        self.sizes = draw.choice((8, 12)), draw.choice((8, 12)), draw.choice((16, 32))
        if "temperature" in self.scaling:
            of_heads = "each head" in self.scaling
            shape = (HEADS, 1, 1) if of_heads else ()
            size = 4.0 if "over" in self.scaling else 0.25
            self.given.append((size * (1 + torch.rand(shape))).to(self.dtype).requires_grad_())
        for _ in range(draw.choice((0, 1, 1, 2))):
            kind = draw.choice(KINDS)
            way = draw.choice(ADDED if kind in ("bias", "bool") else HIDING)
            least = torch.finfo(self.dtype).min
            fill = (
                0.0
                if way in ADDED and kind in ("bias", "bool")
                else draw.choice((-math.inf, least))
            )
            self.masks.append(Mask(kind, way, fill))
            self.given.append(self._given(kind, draw))
        self.limit = draw.choice(LIMITS)

    def _given(self, kind: str, draw: random.Random) -> Tensor:
        queries, keys, _ = self.sizes
        if kind == "bias":
            shape = draw.choice(
                ((1, HEADS, queries, keys), (1, 1, queries, keys), (BATCH, 1, 1, keys))
            )
            bias = torch.randn(shape).to(self.dtype)
            return torch.nn.Parameter(bias) if draw.random() < 0.5 else bias  # learned, or data
        if kind == "bool":
            return (
                torch.rand(draw.choice(((1, 1, queries, keys), (BATCH, HEADS, queries, keys))))
                < 0.5
            )
        if kind == "causal":
            return torch.tensor(draw.randint(0, 3))
        seen = torch.arange(keys) >= torch.tensor([draw.randint(0, 5), draw.randint(0, 5)])[:, None]
        return (seen.flip(1) if "right" in kind else seen)[:, None, None]

    def hidden(self, mask: Mask, given: Tensor) -> Tensor:
        """(B or 1, 1, S or 1, N)"""
        if mask.kind != "causal":
            return ~given
        queries, keys, _ = self.sizes
        return (torch.arange(keys) > torch.arange(queries)[:, None] + given)[None, None]

    def number(self, mask: Mask, given: Tensor, dtype: torch.dtype) -> Tensor:
        """What a mask adds."""
        if mask.kind in ("bias", "bool"):
            return given
        zeros = torch.zeros((), dtype=dtype)
        return torch.where(self.hidden(mask, given), mask.fill, zeros)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        given = list(given)
        factor = self.sizes[2] ** -0.5
        temperature = given.pop(0) if "temperature" in self.scaling else None
        q = q * factor if self.scaling == "q" else q
        k = k * factor if self.scaling == "k" else k
        scores = self._product(q, k, factor)
        if self.scaling == "/":
            scores = scores / (1 / factor)
        elif self.scaling == "/=":
            scores /= 1 / factor
        elif self.scaling == "mul_":
            scores.mul_(factor)
        elif self.scaling == "mul_ by a temperature":
            scores.mul_(temperature)
        elif self.scaling == "over a temperature":
            scores = scores / temperature
        elif self.scaling == "a temperature":
            scores = temperature * scores
        elif temperature is not None:
            scores = scores * self._placed(temperature[None])
        if self.layout == "merged, taken apart for masks":
            scores = scores.view(BATCH, HEADS, *scores.shape[1:])
        for mask, tensor in zip(self.masks, given, strict=True):
            scores = self._masked(scores, mask, tensor)
        scores = self._limited(scores, self.limit)
        if self.layout == "merged, taken apart for masks":
            scores = scores.view(BATCH * HEADS, *scores.shape[2:])
        dim = -2 if self.layout == "k qᵀ, softmax over its keys" else -1
        if self.layout == "k qᵀ":
            scores = scores.mT
        dtype = torch.float32 if self.in_fp32 and scores.dtype != torch.float64 else None
        weights = F.softmax(scores, dim, dtype=dtype).to(v.dtype)
        return self._of_values(self._passed(weights), v)

    def _product(self, q: Tensor, k: Tensor, factor: float) -> Tensor:
        if "merged" in self.layout:
            q, k = q.flatten(0, 1), k.flatten(0, 1)
            if self.scaling == "baddbmm":
                return torch.baddbmm(q.new_zeros(1), q, k.mT, beta=1.0, alpha=factor)
            return torch.bmm(q, k.mT)
        if self.layout == "grouped":
            return q.unflatten(1, (GROUPS, -1)) @ k[:, :, None].mT
        if self.layout == "grouped, by einsum":
            return torch.einsum("bgnqd,bgkd->bgnqk", q.unflatten(1, (GROUPS, -1)), k)
        if "k qᵀ" in self.layout:
            return k @ q.mT
        if self.layout == "einsum":
            return torch.einsum("bqhd,bkhd->bhqk", q.transpose(1, 2), k.transpose(1, 2))
        if self.layout == "einsum of ...":
            return torch.einsum("...qd,...kd->...qk", q, k)
        scores = q @ k.mT
        return scores.transpose(0, 1) if self.layout == "heads first" else scores

    def _placed(self, mask: Tensor) -> Tensor:
        """What is broadcast to (B, H, S, N) as what is broadcast to the scores."""
        if self.layout == "merged" or (self.layout.startswith("merged") and mask.shape[-1] == 1):
            if mask.shape[:2] == (1, 1):
                return mask[0]
            return mask.expand(BATCH, HEADS, -1, -1).flatten(0, 1)
        if "grouped" in self.layout:
            return mask.unflatten(1, (GROUPS, -1)) if mask.shape[1] > 1 else mask[:, :, None]
        if "k qᵀ" in self.layout:
            return mask.mT
        return mask.transpose(0, 1) if self.layout == "heads first" else mask

    def _masked(self, scores: Tensor, mask: Mask, given: Tensor) -> Tensor:
        if mask.way in ADDED:
            number = self._placed(self.number(mask, given, scores.dtype))
            if mask.way == "+":
                return scores + number
            if mask.way == "add_":
                return scores.add_(number)
            scores += number
            return scores
        hidden = self._placed(self.hidden(mask, given))
        if mask.way == "masked_fill":
            return scores.masked_fill(hidden, mask.fill)
        if mask.way == "where":
            return torch.where(hidden, mask.fill, scores)
        scores.masked_fill_(hidden, mask.fill)
        return scores

    def _limited(self, scores: Tensor, limit: str) -> Tensor:
        least = torch.finfo(self.dtype).min
        if limit == "clamp":
            return scores.clamp(min=least)
        if limit == "clamp_":
            return scores.clamp_(min=least)
        return (
            torch.max(scores, torch.tensor(least, dtype=scores.dtype)) if limit == "max" else scores
        )

    def _passed(self, weights: Tensor) -> Tensor:
        if self.weights == "clone":
            return weights.clone()
        if self.weights == "contiguous":
            return weights.contiguous()
        if "dropout" in self.weights:
            return F.dropout(weights, 0.1, training=False, inplace="in place" in self.weights)
        return weights

    def _of_values(self, weights: Tensor, v: Tensor) -> Tensor:
        if "merged" in self.layout:
            return torch.bmm(weights, v.flatten(0, 1)).view(BATCH, HEADS, self.sizes[0], -1)
        if self.layout == "grouped":
            return (weights @ v[:, :, None]).flatten(1, 2)
        if self.layout == "grouped, by einsum":
            return torch.einsum("bgnqk,bgkd->bgnqd", weights, v).flatten(1, 2)
        if self.layout == "k qᵀ, softmax over its keys":
            return weights.mT @ v
        if self.layout == "einsum":
            return torch.einsum("bhqk,bkhd->bqhd", weights, v.transpose(1, 2)).transpose(1, 2)
        if self.layout == "einsum of ...":
            return torch.einsum("...qk,...kd->...qd", weights, v)
        return (weights.transpose(0, 1) if self.layout == "heads first" else weights) @ v

    def exact(self, q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        """The plain formula."""
        return self._scores(q, k, given).softmax(-1) @ self._repeated(v)

    def reversed(self, q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        """The formula with sums in another order."""
        scores = self._scores(q.flip(-1), k.flip(-1), given).flip(2, 3)
        return (scores.softmax(-1) @ self._repeated(v).flip(2)).flip(2)

    def streamed(self, q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        """Exact, but for a derivative from an output that is saved at the dtype."""
        scores = self._scores(q, k, given)
        scores = scores - scores.detach().amax(-1, keepdim=True)
        return _Streamed.apply(scores, self._repeated(v), None, self.dtype)[0]

    def fused(self, q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Tensor:
        """torch's own SDPA, where scores have no temperature and no limit."""
        mask = torch.zeros((), dtype=q.dtype)
        for each, tensor in zip(self.masks, given, strict=True):
            mask = mask + self.number(each, tensor, q.dtype)
        mask = mask.expand(BATCH, HEADS, *self.sizes[:2]) if self.masks else None
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=k.shape[1] < HEADS)

    def _repeated(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(HEADS // x.shape[1], 1)

    def _scores(self, q: Tensor, k: Tensor, given: tuple[Tensor, ...]) -> Tensor:
        given, scores = list(given), q @ self._repeated(k).mT
        if "temperature" not in self.scaling:
            scores = scores * self.sizes[2] ** -0.5
        else:
            by = given.pop(0)
            scores = scores / by if "over" in self.scaling else scores * by
        for mask, tensor in zip(self.masks, given, strict=True):
            if mask.way in ADDED:
                scores = scores + self.number(mask, tensor, scores.dtype)
            else:
                scores = scores.masked_fill(self.hidden(mask, tensor), mask.fill)
        return self._limited(scores, "clamp" if self.limit == "clamp_" else self.limit)

    def inputs(self, sample: int = 0) -> list[Tensor]:
        queries, keys, dim = self.sizes
        make = torch.Generator().manual_seed(1000 * self.seed + sample)
        kv_heads = GROUPS if "grouped" in self.layout else HEADS
        shapes = (HEADS, queries), (kv_heads, keys), (kv_heads, keys), (HEADS, queries)
        return [torch.randn(BATCH, *x, dim, generator=make).to(self.dtype) for x in shapes]

    def results(self, function: Callable, dtype: torch.dtype, sample: int = 0) -> dict[str, Tensor]:
        """The output and the gradients of all that has one."""
        *qkv, dout = (x.to(dtype) for x in self.inputs(sample))
        given = [x.detach().to(dtype) if x.is_floating_point() else x for x in self.given]
        learned = [isinstance(x, torch.nn.Parameter) for x in self.given]
        given = [torch.nn.Parameter(x) if y else x for x, y in zip(given, learned, strict=True)]
        if not self.trained:
            return {"out": function(*qkv, *given)}
        wanted = [x.requires_grad for x in self.given]
        leaves = [*qkv, *(x for x, y in zip(given, wanted, strict=True) if y)]
        for x in leaves:
            x.requires_grad_()
        out = function(*qkv, *given)
        found = torch.autograd.grad(out, leaves, dout, allow_unused=True)
        names = ["dq", "dk", "dv", *(f"d{i}" for i in range(len(leaves) - 3))]
        return {"out": out.detach()} | {
            name: _wide(torch.zeros_like(x) if g is None else g)
            for name, x, g in zip(names, leaves, found, strict=True)
        }

    def __str__(self) -> str:
        masks = "; ".join(f"{x.kind} by {x.way} of {x.fill:.3g}" for x in self.masks) or "no mask"
        name = str(self.dtype).removeprefix("torch.") + ", softmax in fp32" * self.in_fp32
        return (
            f"seed {self.seed}: {name}, {self.layout}, scaled: {self.scaling}, {masks}, limit {self.limit}, "
            f"weights {self.weights}" + ", no gradients" * (not self.trained)
        )


def _wide(x: Tensor) -> Tensor:
    """A temperature's gradient as a matrix, which the error rule takes."""
    return x.reshape(1, -1) if x.numel() <= HEADS else x
