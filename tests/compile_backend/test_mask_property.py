"""Masks drawn from a grammar: what the rewritten call hides and adds is what the mask did, at every position.

Graphs are built by hand, with the values of a few drawn inputs, so that thousands of masks take seconds: the pass
sees what Dynamo would show it, and the arguments of the op that it puts in are compared with the mask itself.
"""

from __future__ import annotations

import math
import operator
import random
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter
from torch.fx.node import map_arg

from torch_fdattn.compile_backend.rewrite import rewrite
from torch_fdattn.ops.positions import Mask, query_key_positions, visible
from torch_fdattn.ops.scores import Scores, modify_scores

LEAST = torch.finfo(torch.float32).min
FULL = slice(None)


class Builder:
    """A graph whose nodes have fake tensors for values, as Dynamo's have."""

    def __init__(self, draw: random.Random, sizes: tuple[int, int, int, int]) -> None:
        self.draw, self.graph, self.mode = draw, Graph(), FakeTensorMode()
        self.batch, self.heads, self.q_len, self.kv_len = sizes
        self.inputs: list[torch.Tensor] = []
        self.first = None

    def input(self, x: torch.Tensor):
        at = self.inputs_end()
        with at:
            node = self.graph.placeholder(f"x{len(self.inputs)}")
        node.meta["example_value"] = self.mode.from_tensor(x)
        self.inputs.append(x)
        return node

    def inputs_end(self):
        last = [node for node in self.graph.nodes if node.op == "placeholder"]
        return self.graph.inserting_after(last[-1] if last else self.graph._root)

    def call(self, target, *args, **kwargs):
        is_method = isinstance(target, str)
        create = self.graph.call_method if is_method else self.graph.call_function
        node = create(target, args, kwargs)
        function = getattr(torch.Tensor, target) if is_method else target
        with self.mode:
            given = map_arg((args, kwargs), lambda x: x.meta["example_value"])
            node.meta["example_value"] = function(*given[0], **given[1])
        return node

    # Indices, in the spellings that models have.

    def queries(self):
        found = self.call(
            torch.arange, self.q_len, dtype=self.draw.choice([torch.int64, torch.int32])
        )
        kind = self.draw.randrange(8)
        if kind == 0:
            found = self.call(operator.add, found, self.draw.randint(-3, 5))
        elif kind == 1:
            found = self.call(
                operator.add, found, self.input(torch.tensor(self.draw.randint(-2, 9)))
            )
        elif kind == 2:
            found = self.call(operator.add, found, self.kv_len - self.q_len)
        elif kind == 3:
            found = self.input(torch.randint(0, self.kv_len, (self.q_len,)))
        if self.draw.random() < 0.5:
            return self.call(operator.getitem, found, (None, None, FULL, None))
        return self.call("view", found, self.q_len, 1)

    def keys(self):
        found = self.call(torch.arange, self.kv_len)
        kind = self.draw.randrange(3)
        if kind == 0:
            return found
        return self.call("unsqueeze", found, 0) if kind == 1 else self.call(
            operator.getitem, found, (None, None, None, FULL)
        )  # fmt: skip

    def of_sequences(self, low: int, high: int):
        found = self.input(torch.randint(low, high, (self.batch,)))
        return self.call(operator.getitem, found, (FULL, None, None, None))

    def padding(self):
        found = self.input(torch.rand(self.batch, self.kv_len) > 0.3)
        if self.draw.random() < 0.5:
            batch = self.call(torch.arange, self.batch)
            batch = self.call(operator.getitem, batch, (FULL, None, None, None))
            keys = self.call(
                operator.getitem, self.call(torch.arange, self.kv_len), (None, None, None)
            )
            return self.call(operator.getitem, found, (batch, keys))
        return self.call(operator.getitem, found, (FULL, None, None))

    # Conditions.

    def atom(self):
        return self.draw.choice(
            [self.compared, self.compared, self.compared, self.compared, self.difference, self.triangle,
             self.lengths, self.padding, self.chunks, self.chunked, self.segments, self.any_mask, self.bounded]
        )()  # fmt: skip

    def compared(self):
        compare = self.draw.choice([operator.le, operator.lt, operator.ge, operator.gt, torch.le])
        q = self.call(
            self.draw.choice([operator.add, operator.sub]), self.queries(), self.draw.randint(0, 5)
        )
        pair = [self.keys(), q]
        self.draw.shuffle(pair)
        return self.call(compare, *pair)

    def difference(self):
        found = self.call(operator.sub, self.queries(), self.keys())
        if self.draw.random() < 0.5:
            found = self.call("abs", found)
        compare = self.draw.choice(
            [operator.le, operator.lt, operator.ge, operator.gt, operator.eq]
        )
        return self.call(compare, found, self.draw.randint(-1, 4))

    def triangle(self):
        dtype = self.draw.choice([torch.bool, torch.float32])
        found = self.call(torch.ones, self.q_len, self.kv_len, dtype=dtype)
        found = self.call(self.draw.choice(["tril", "triu"]), found, self.draw.randint(-3, 3))
        if dtype == torch.bool:
            return found
        return self.call(self.draw.choice([operator.eq, operator.gt, operator.ne]), found, 0)

    def lengths(self):
        compare = self.draw.choice([operator.lt, operator.le, operator.ge])
        return self.call(compare, self.keys(), self.of_sequences(0, self.kv_len + 2))

    def chunks(self):
        size = self.draw.randint(1, 4)
        q, k = (self.call(operator.floordiv, x, size) for x in (self.queries(), self.keys()))
        return self.call(self.draw.choice([operator.eq, operator.le]), q, k)

    def chunked(self):
        """Llama 4's: a query's own chunk, from the first token of each sequence on, and no key behind it."""
        q, k = self.queries(), self.keys()
        within = self.call(operator.le, k, q)
        size = self.draw.randint(2, 6)
        if self.draw.random() < 0.3:  # before it indices are negative
            first = self.of_sequences(0, 4)
            q, k = (self.call(operator.sub, x, first) for x in (q, k))
        rounding = self.draw.choice(["floor", "floor", "floor", "trunc"])
        found = [
            self.call(torch.div, x, n, rounding_mode=rounding)
            for x, n in ((q, size), (k, size + (self.draw.random() < 0.1)))
        ]
        if self.draw.random() < 0.3:
            chunk = self.call(operator.le, self.call(operator.mul, found[0], size), k)
        else:
            chunk = self.call(operator.eq, *found)
        return self.call(operator.and_, chunk, within) if self.draw.random() < 0.8 else chunk

    def segments(self):
        found = self.input(torch.randint(0, 3, (self.batch, self.kv_len)))
        k = self.call(operator.getitem, found, (FULL, None, None))
        q = self.call(operator.getitem, found, (FULL, None, slice(0, self.q_len), None))
        return self.call(operator.eq, q, k)

    def any_mask(self):
        heads = self.draw.choice([1, self.heads])
        return self.input(torch.rand(self.batch, heads, self.q_len, self.kv_len) > 0.3)

    def bounded(self):
        return self.call(
            operator.lt, self.draw.choice([self.keys, self.queries])(), self.draw.randint(0, 9)
        )

    def condition(self, depth: int):
        kind = self.draw.random()
        if depth == 0 or kind < 0.3:
            return self.atom()
        if kind < 0.4:
            return self.call(
                self.draw.choice([operator.invert, torch.logical_not]), self.condition(depth - 1)
            )
        joins = [operator.and_, torch.logical_and, operator.and_, torch.bitwise_and, operator.and_, operator.or_, operator.xor]  # fmt: skip
        parts = self.condition(depth - 1), self.condition(depth - 1)
        return self.call(self.draw.choice(joins), *parts)

    # Biases.

    def bias(self):
        slopes = self.input(torch.rand(self.heads))
        slopes = self.call("view", slopes, 1, self.heads, 1, 1)
        distance = self.keys()
        if self.draw.random() < 0.7:
            distance = self.call(operator.sub, distance, self.queries())
        if self.draw.random() < 0.4:
            distance = self.call(operator.neg, self.call(torch.abs, distance))
        return self.call(operator.mul, slopes, distance)

    def attention(self, q, k, v, whole):
        """(its node, the condition, what is added, the number that hides)."""
        condition = self.condition(self.draw.randint(0, 3))
        form = self.draw.choice(["bool", "added", "filled", "hand-added", "bias"])
        fill = self.draw.choice([-math.inf, LEAST])
        bias = self.call(operator.mul, self.bias(), 1.0) if form == "bias" else 0.0
        if form == "bool":
            fill = -math.inf
            condition = self.call("expand", condition, *whole)
            return (
                self.call(F.scaled_dot_product_attention, q, k, v, condition),
                condition,
                0.0,
                fill,
            )
        scores = self.call(operator.matmul, q, self.call("transpose", k, -1, -2))
        scores = self.call(operator.mul, scores, 0.25)
        if form == "filled":
            hidden = self.call(torch.logical_not, condition)
            scores = self.call("masked_fill", scores, hidden, fill)
        else:
            zero = self.call(torch.zeros, ())
            mask = self.call(torch.where, condition, zero, fill)
            if form == "bias":
                mask = self.call(operator.add, mask, bias)
            if form == "added":
                mask = self.call("expand", mask, *whole)
                out = self.call(F.scaled_dot_product_attention, q, k, v, mask, scale=0.25)
                return out, condition, bias, fill
            scores = self.call(operator.add, scores, mask)
        weights = self.call(torch.softmax, scores, -1)
        return self.call(operator.matmul, weights, v), condition, bias, fill


class Arguments(Interpreter):
    """Runs a graph; `call` is what the op of ours was given."""

    def call_function(self, target, args, kwargs):
        if "fdattn" in str(target):
            self.call = args, kwargs
        return super().call_function(target, args, kwargs)


def effective(args, kwargs) -> torch.Tensor:
    """What the call adds to scores (B, H, S, N): -inf where it hides."""
    (q, k, _, *where), rest = args, dict(kwargs)
    if len(where) == 1:
        return packed(q, where[0], rest)
    kv_lens, q_start = where
    right = 0 if rest.pop("causal") else rest.get("window_right", -1)
    mask = Mask(kv_lens, q_start, None, rest.get("window_left", -1), right)
    q_len, kv_len = q.shape[2], k.shape[2]
    seen = visible(mask, q_len, kv_len, q.device)
    at, keys, _ = query_key_positions(mask, q_len, kv_len, q.device)
    distance = keys[:, None, :] - at[:, :, None]
    found = torch.zeros(*q.shape[:3], kv_len)
    explicit = rest.get("attn_mask")
    if explicit is not None:
        explicit = explicit.expand(found.shape)
    options = Scores(0.0, rest.get("alibi_slopes"), None, explicit)
    return modify_scores(found, distance, options).masked_fill(~seen[:, None], -math.inf)


def packed(q, cu_seqlens, rest: dict) -> torch.Tensor:
    """The same of packed sequences, which are chunks of the longer ones that `check_one` draws: (B·S, B·S)."""
    at = torch.arange(q.shape[0])
    sequence = (at >= cu_seqlens[:, None]).sum(0)
    distance = at[:, None] - at
    seen = sequence[:, None] == sequence
    right = 0 if rest["causal"] else rest.get("window_right", -1)
    left = rest.get("window_left", -1)
    seen &= (right < 0) | (distance >= -right)
    seen &= (left < 0) | (distance <= left)
    return torch.zeros(seen.shape).masked_fill(~seen, -math.inf)


def of_batch(added: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Blocks on the diagonal of what is added to packed sequences, as (B, H, S, S); all else is hidden."""
    batch, heads, length, _ = shape
    blocks = added.view(batch, length, batch, length)
    whole = torch.eye(batch, dtype=torch.bool)[:, None, :, None]
    assert blocks.masked_fill(whole, -math.inf).isneginf().all()
    own = torch.stack([blocks[b, :, b] for b in range(batch)])
    return own[:, None].expand(batch, heads, length, length)


def check_one(seed: int, chunks: bool = False) -> str:
    """Draws, rewrites and compares one; returns what the report says of the mask.

    chunks: only masks that are chunked, and mostly as many keys as queries.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    q_len = draw.choice([1, 1, 2, 5, 8, 18])
    batch, heads = draw.choice([1, 2]), 2
    kv_len = max(q_len, draw.choice([8, 12, 24]))
    if chunks and draw.random() < 0.7:
        q_len = kv_len
    build = Builder(draw, (batch, heads, q_len, kv_len))
    if chunks:
        build.condition = lambda depth: build.chunked()
    q, k, v = (build.input(torch.randn(batch, heads, n, 16)) for n in (q_len, kv_len, kv_len))
    out, condition, bias, fill = build.attention(q, k, v, (batch, heads, q_len, kv_len))
    before = (condition, bias) if isinstance(bias, torch.fx.Node) else (condition,)
    build.graph.output((out, *before))
    gm = GraphModule({}, build.graph)
    seen, *biases = Interpreter(gm).run(*build.inputs)[1:]
    expected = Interpreter(gm).run(*build.inputs)[0]
    build.graph.output_node().args = ((out,),)
    report = rewrite(gm)
    (site,) = report
    assert site.op is not None, f"seed {seed}: {report}"
    run = Arguments(gm)
    (found,) = run.run(*build.inputs)
    torch.testing.assert_close(
        found,
        expected,
        rtol=1e-4,
        atol=1e-5,
        equal_nan=True,
        msg=lambda m: f"seed {seed}: {site}\n{m}",
    )
    given = effective(*run.call)
    if given.dim() == 2:
        given = of_batch(given, (batch, heads, q_len, kv_len))
    wanted = torch.zeros(()) if not biases else biases[0]
    wanted = wanted.masked_fill(~seen, fill).expand(given.shape)
    # Of a query that sees no key the op may be given numbers less the highest: its output says all.
    sees_none = (wanted <= -1e37).all(-1, keepdim=True)
    hidden = (given <= -1e37) | sees_none
    assert torch.equal(hidden, wanted <= -1e37), f"seed {seed}: {site}\n{gm.code}"
    # Biases may differ by what is the same for all keys of a query.
    if biases:
        weights = [
            torch.where(hidden, -math.inf, x).softmax(-1).nan_to_num() for x in (given, wanted)
        ]
        torch.testing.assert_close(*weights, msg=lambda m: f"seed {seed}: {site}\n{m}")
    return next((note for note in site.notes if note.startswith("mask: ")), "mask: none")


def check_many(seeds: range, **options) -> Counter:
    return Counter(kind_of(check_one(seed, **options)) for seed in seeds)


def kind_of(note: str) -> str:
    if "chunks" in note:
        return "chunks"
    if "explicit mask" in note:
        return "explicit" if note.startswith("mask: explicit") else "partly"
    return "with padding" if "explicit" in note else "recovered"


def test_drawn_masks():
    kinds = check_many(range(80))
    print(dict(kinds))
    assert min(kinds[x] for x in ("explicit", "partly", "with padding", "recovered")) >= 2, kinds


def test_drawn_chunks():
    """Self-attention under chunks, and what else was drawn for it."""
    kinds = check_many(range(40), chunks=True)
    print(dict(kinds))
    assert min(kinds[x] for x in ("explicit", "partly", "recovered", "chunks")) >= 2, kinds


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 9000, 1000))
def test_drawn_masks_at_length(start):
    print(dict(check_many(range(start, start + 1000), chunks=start >= 7000)))
