"""What tests and benchmarks share: inputs in any layout, an fp64 oracle, error budgets, drawn cases.

Nothing here is imported by the package itself.
"""

from torch_fdattn.testing.cases import (
    AttentionCase,
    MergeCase,
    draw_attention,
    draw_decode,
    draw_merge,
    drawn_seeds,
    expected_path,
    summarize,
)
from torch_fdattn.testing.errors import (
    LSE_BOUNDS,
    assert_launched,
    check_close,
    check_lse,
)
from torch_fdattn.testing.expected import (
    Expected,
    expected_attention,
    expected_merge,
    expected_varlen,
)
from torch_fdattn.testing.feature_cases import FeatureCase, draw_features
from torch_fdattn.testing.hopper_cases import draw_hopper, draw_hopper_fp8, draw_hopper_varlen
from torch_fdattn.testing.inputs import LAYOUTS, make_tensor, poison_beyond
from torch_fdattn.testing.oracle import (
    attention_oracle,
    gradients,
    merge_oracle,
    visible_keys,
)
from torch_fdattn.testing.serving_cases import ServingCase, draw_serving
from torch_fdattn.testing.varlen_cases import VarlenCase, draw_varlen

__all__ = [
    "LAYOUTS",
    "LSE_BOUNDS",
    "AttentionCase",
    "Expected",
    "FeatureCase",
    "MergeCase",
    "ServingCase",
    "VarlenCase",
    "assert_launched",
    "attention_oracle",
    "check_close",
    "check_lse",
    "draw_attention",
    "draw_decode",
    "draw_features",
    "draw_hopper",
    "draw_hopper_fp8",
    "draw_hopper_varlen",
    "draw_merge",
    "draw_serving",
    "draw_varlen",
    "drawn_seeds",
    "expected_attention",
    "expected_merge",
    "expected_path",
    "expected_varlen",
    "gradients",
    "make_tensor",
    "merge_oracle",
    "poison_beyond",
    "summarize",
    "visible_keys",
]
