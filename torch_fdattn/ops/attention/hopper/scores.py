"""What changes scores between QK and the softmax: softcap and ALiBi. And sinks, which join the softmax at its end.

The torch twin, which defines them, is `ops/scores.py`.
"""
# Without `from __future__ import annotations`: aggregates ask for the types of their fields.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from torch_fdattn.ops.attention.hopper.rows import MINUS_INFINITY, ROWS, split_columns

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


@aggregate
class TileScores:
    """A call's scale and what it does to scores, None for what it does not."""

    scale: gl.tensor
    q_scales: gl.tensor | gl.constexpr  # of fp8: pointers to (B, H), and twice to (B, H_kv)
    k_scales: gl.tensor | gl.constexpr
    v_scales: gl.tensor | gl.constexpr
    softcap: gl.tensor | gl.constexpr
    slopes: gl.tensor | gl.constexpr  # a pointer
    slope_of_sequence: gl.tensor | gl.constexpr
    slope_of_head: gl.tensor | gl.constexpr
    sinks: gl.tensor | gl.constexpr  # a pointer
    sink_of_head: gl.tensor | gl.constexpr
    LOG2_OF_LARGEST: (
        gl.constexpr
    )  # of a row's weights: of e4m3, whose largest number is 448, as many bits as there are
    BIAS_FIRST: gl.constexpr  # whether there are slopes, and a product can be added to their bias

    @gluon.constexpr_function
    def __init__(
        self, scale, q_scales, k_scales, v_scales, softcap, slopes, slope_of_sequence, slope_of_head,
        sinks, sink_of_head, BIAS_FIRST=False,
    ):  # fmt: skip
        def none(x):
            return gl.constexpr(None) if x is None else x

        self.scale = scale
        self.q_scales = none(q_scales)
        self.k_scales = none(k_scales)
        self.v_scales = none(v_scales)
        self.softcap = none(softcap)
        self.slopes = none(slopes)
        self.slope_of_sequence = none(slope_of_sequence)
        self.slope_of_head = none(slope_of_head)
        self.sinks = none(sinks)
        self.sink_of_head = none(sink_of_head)
        self.LOG2_OF_LARGEST = gl.constexpr(0.0 if q_scales is None else 8.0)
        self.BIAS_FIRST = gl.constexpr(BIAS_FIRST)

    @gluon.jit
    def scale_of(self, tile, call):
        if self.q_scales is None:
            return self.scale
        else:
            head = tile.sequence * call.heads + tile.head
            scale = self.scale * gl.load(self.q_scales + head) * gl.load(self.k_scales + head // call.group)  # fmt: skip
            # Below it, hidden scores would not stay hidden (-inf · 0 is NaN); what is seen changes by less than 1e-22.
            return gl.maximum(scale, 1e-30)

    @gluon.jit
    def unit(self, scale):
        """Of scores, as `change` leaves them, in log2: QK itself, or capped ones in log2 already."""
        if self.softcap is None:
            return scale * LOG2_E
        else:
            return gl.to_tensor(1.0)

    @gluon.jit
    def slope_of(self, sequence, head, unit):
        """A head's ALiBi slope in the unit of scores."""
        if self.slopes is None:
            return gl.to_tensor(0.0)
        else:
            of_sequence = sequence.to(gl.int64) * self.slope_of_sequence
            of_head = head.to(gl.int64) * self.slope_of_head
            slope = gl.load(self.slopes + of_sequence + of_head).to(gl.float32)
            return slope * LOG2_E / unit

    @gluon.jit
    def capped(self, scores, scale):
        if self.softcap is not None:
            # cap · tanh(x) = cap - 2 cap / (exp(2x) + 1), to 1e-7 of the cap.
            cap = self.softcap * LOG2_E
            grown = gl.exp2(scores * (scale / self.softcap * (2.0 * LOG2_E)))
            scores = cap - 2.0 * cap * _reciprocal(grown + 1.0)
        return scores

    @gluon.jit
    def slope_of_cap(self, capped):
        """The derivative of what `capped` returned: 1 - tanh²."""
        tanh = capped * (1.0 / (self.softcap * LOG2_E))
        return 1.0 - tanh * tanh

    @gluon.jit
    def biased(self, scores, slope, row, first_key):
        if self.slopes is not None:
            scores -= slope * gl.abs(distances(scores, row - first_key))
        return scores

    @gluon.jit
    def start(self, slope, row, first_key, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
        """What QK of rows and keys is added to: where no row sees a later key, ALiBi's bias, an instruction a score less."""
        start = gl.zeros([ROWS, KEYS], gl.float32, LAYOUT)
        if self.BIAS_FIRST:
            start = scaled_distances(start, row - first_key, slope)
        return start

    @gluon.jit
    def changed(self, scores, scale, slope, row, first_key):
        """As `change`, of QK that was added to `start`."""
        if self.BIAS_FIRST:
            return scores
        else:
            return self.change(scores, scale, slope, row, first_key)

    @gluon.jit
    def change(self, scores, scale, slope, row, first_key):
        """QK of rows from the position `row` on and of keys from the position `first_key` on, capped and biased."""
        return self.biased(self.capped(scores, scale), slope, row, first_key)

    @gluon.jit
    def finish(self, top, total, tile, call, scale):
        """(what turns sums of values into results, lse) of rows, of their largest score and the sum of their weights.

        0 and -inf for a row that has seen no key.
        """
        top *= self.unit(scale)
        factor = 1.0
        value = 1.0
        if self.v_scales is not None:
            head = tile.sequence * call.heads + tile.head
            value = gl.load(self.v_scales + head // call.group) * 2.0**-self.LOG2_OF_LARGEST
            total *= 2.0**-self.LOG2_OF_LARGEST
        if self.sinks is not None:
            offset = tile.head.to(gl.int64) * self.sink_of_head
            sink = gl.load(self.sinks + offset).to(gl.float32) * LOG2_E
            sink = gl.where(tile.has_sink != 0, sink, MINUS_INFINITY)
            high = gl.maximum(top, sink)
            high = gl.where(high == MINUS_INFINITY, 0.0, high)
            factor = gl.exp2(top - high)
            total = total * factor + gl.exp2(sink - high)
            top = high
        return gl.where(total == 0.0, 0.0, factor * value / total), (top + gl.log2(total)) * LN_2


@gluon.jit
def _reciprocal(x):
    """One instruction, to one unit in the last place; 0 of infinity."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def distances(scores, row):
    """Position of a key less that of a row, of rows from `row` on and keys from 0 on."""
    near, eights = _parts_of_distances(scores, row)
    return _as_scores(near + eights, scores)


@gluon.jit
def scaled_distances(scores, row, factor):
    """The same times a factor, rounded twice: a multiplication with a constant and an addition are one instruction."""
    near, eights = _parts_of_distances(scores, row)
    return _as_scores(near * factor + eights * factor, scores)


@gluon.jit
def _parts_of_distances(scores, row):
    """Of the first eight columns, and how far each eight is behind them: (64, 1, 8) and (1, N / 8, 1).

    A thread's columns are 8 apart: all but one conversion to floating point are the compiler's.
    """
    N: gl.constexpr = scores.shape[1]
    apart = split_columns(scores)
    eights: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, apart.type.layout))
    units: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, apart.type.layout))
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, scores.type.layout))
    rows = gl.convert_layout(
        rows.to(gl.float32),
        gl.SliceLayout(1, gl.SliceLayout(2, apart.type.layout)),
        assert_trivial=True,
    )
    unit = gl.arange(0, 8, layout=units).to(gl.float32)
    eight = (gl.arange(0, N // 8, layout=eights) * 8).to(gl.float32)
    near = gl.expand_dims(gl.expand_dims(unit, 0), 1) - gl.expand_dims(gl.expand_dims(rows, 1), 2)
    return near, gl.expand_dims(gl.expand_dims(eight, 0), 2)


@gluon.jit
def _as_scores(apart, scores):
    return gl.convert_layout(apart.reshape(scores.shape), scores.type.layout, assert_trivial=True)
