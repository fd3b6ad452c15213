"""The runs of tests that notice faults, each named by what it is of."""

from __future__ import annotations

from tests.mutants.faults.fault import Tests

_OPS = "tests/ops"
ATTENTION = Tests(
    "attention kernels", (f"{_OPS}/attention", f"{_OPS}/test_edges.py"), interpret=True
)
ROWS = Tests("rows of masks", (f"{_OPS}/attention/test_row_ranges.py",), interpret=True)
EDGES = Tests("edges", (f"{_OPS}/test_edges.py",), interpret=True)
ORDER = Tests("order of programs", (f"{_OPS}/attention/test_order.py",), interpret=True)
PREPARED = Tests(
    "prepared calls",
    tuple(
        f"tests/compile_only/test_{name}.py"
        for name in ("prepared", "prepared_attention", "tensor_maps")
    ),
)
HOPPER_BACKWARD = Tests(
    "Hopper's backward, compiled", ("tests/compile_only/test_hopper_backward.py",)
)
HOPPER_TILES = Tests(
    "tiles of Hopper's backward", (f"{_OPS}/attention/test_hopper_backward_tiles.py",)
)
HOPPER_FORWARD_TILES = Tests(
    "tiles of Hopper's forward", (f"{_OPS}/attention/test_hopper_tiles.py",)
)
HOPPER_FORWARD_ON_GPU = Tests(
    "Hopper's forward on a GPU",
    (f"{_OPS}/attention/test_hopper.py",),
    keyword="test_against_the_oracle or test_lengths_beyond_which_is_nan",
    needs_sm_90=True,
)
HOPPER_PAIRS = Tests(
    "heads that share a tile",
    ("tests/compile_only/test_hopper.py",),
    keyword="test_heads_share_a_tile",
)
HOPPER_FEW_QUERIES_ON_GPU = Tests(
    "Hopper's forward of few queries, on a GPU",
    (f"{_OPS}/attention/test_hopper_pairs.py",),
    keyword="test_few_queries_of_many_heads",
    needs_sm_90=True,
)
HOPPER_WAITING_FOR_MEMORY = Tests(
    "Hopper's forward where memory is slow, on a GPU",
    (f"{_OPS}/attention/test_hopper.py",),
    keyword="test_values_that_come_later",
    needs_sm_90=True,
)
HOPPER_PAGES_ON_GPU = Tests(
    "Hopper's forward over pages on a GPU",
    (f"{_OPS}/attention/test_hopper.py",),
    keyword="test_packed_sequences_over_pages",
    needs_sm_90=True,
)
HOPPER_FP8_ON_GPU = Tests(
    "Hopper's products in float8 on a GPU",
    (f"{_OPS}/attention_fp8/test_hopper.py",),
    keyword="test_against_the_oracle or test_groups_and_scales_of_heads",
    needs_sm_90=True,
)
HOPPER_ON_GPU = Tests(
    "Hopper's backward on a GPU",
    (
        f"{_OPS}/attention/test_hopper_backward.py",
        f"{_OPS}/attention/test_hopper_backward_parameters.py",
        f"{_OPS}/varlen_attention/test_varlen_hopper_backward.py",
    ),
    keyword=(
        "test_against_the_oracle and dtype0 or test_same_bits_of_the_ordered_form or "
        "test_slopes_of_all_sequences or test_tokens_of_no_sequence"
    ),
    needs_sm_90=True,
)
HOPPER_SLOPES_ON_GPU = Tests(
    "gradients of slopes on a GPU",
    (f"{_OPS}/attention/test_hopper_backward_parameters.py",),
    keyword="test_slopes_of_all_sequences",
    needs_sm_90=True,
)
HOPPER_PACKED_ON_GPU = Tests(
    "Hopper's backward of packed sequences on a GPU",
    (f"{_OPS}/varlen_attention/test_varlen_hopper_backward.py",),
    keyword="test_nan_stays_in_its_sequence or test_tokens_of_no_sequence",
    needs_sm_90=True,
)
DECODE = Tests("decode kernel", (f"{_OPS}/decode",), interpret=True)
DECODE_ON_HOPPER = Tests(
    "caches of one byte", (f"{_OPS}/decode/test_one_byte.py",), needs_sm_90=True
)
VARLEN = Tests(
    "packed sequences", (f"{_OPS}/varlen_attention/test_varlen_edges.py",), interpret=True
)
VARLEN_MASKS = Tests(
    "packed sequences' masks", (f"{_OPS}/varlen_attention/test_varlen_masks.py",), interpret=True
)
MERGE = Tests("merge kernels", (f"{_OPS}/merge_states",), interpret=True)
APPEND = Tests("append kernel", (f"{_OPS}/append_kv",), interpret=True)
WRITES = Tests("writes", (f"{_OPS}/append_kv/test_append_framework.py",))
REFERENCE = Tests(
    "references", (f"{_OPS}/attention", f"{_OPS}/merge_states", f"{_OPS}/test_edges.py")
)
CPU = Tests("CPU tensors", (f"{_OPS}/attention/test_cpu.py",))
FRAMEWORK = Tests(
    "framework",
    (
        f"{_OPS}/test_opcheck.py",
        f"{_OPS}/test_autograd.py",
        f"{_OPS}/test_autocast.py",
        f"{_OPS}/test_flops.py",
    ),
)
TUNED = Tests("the tuned table", ("tests/tables",))
TUNED_RANKS = Tests(
    "the tuned table over ranks", ("tests/dist/test_tables.py",), interpret=True, ranks=2
)
ONE_SIDED = Tests(
    "one-sided exchanges",
    ("tests/dist/test_signals.py", "tests/dist/test_one_sided.py"),
    interpret=True,
    ranks=2,
)
FUSED_PARTS = Tests(
    "parts merged by the exchange", ("tests/dist/test_fused_parts.py",), interpret=True, ranks=2
)
FUSED_TREE = Tests(
    "nodes merged by the exchange", ("tests/dist/test_fused_tree.py",), interpret=True, ranks=3
)
DECODE_TWO_SHOT = Tests(
    "sharded decode in two shots",
    ("tests/dist/test_decode_two_shot.py",),
    interpret=True,
    ranks=3,
)
RING_MASKS = Tests(
    "masks over ranks",
    (
        "tests/dist/test_ring_scores.py",
        "tests/dist/test_ring_chunks.py",
        "tests/dist/test_ring_documents.py",
        "tests/dist/test_ring_dropout.py",
    ),
    ranks=2,
)
RANK_INVARIANT = Tests(
    "same bits on any number of ranks", ("tests/dist/test_rank_invariant.py",), ranks=2
)
RING_ONE_SIDED = Tests(
    "ring attention by copies", ("tests/dist/test_ring_one_sided.py",), interpret=True, ranks=2
)
RING_PLANS = Tests(
    "calls of a plan, and their gradients", ("tests/test_sequence_shards.py", "tests/test_gradient_parts.py")
)  # fmt: skip
ULYSSES_RING = Tests("heads and rings over ranks", ("tests/dist/test_ulysses_ring.py",), ranks=4)
COMPILED_POSITIONS = Tests(
    "masks of positions compiled over ranks",
    (
        "tests/dist/test_compiled_chunks.py",
        "tests/dist/test_compiled_positions.py",
        "tests/dist/test_compiled_transformers.py",
    ),
    ranks=2,
)
PACKED_MODELS = Tests(
    "packed documents of models over ranks",
    ("tests/dist/test_context_parallel_documents.py", "tests/dist/test_packed_transformers.py"),
    ranks=2,
    keyword="test_eager or test_compiled_masks or test_drop_in or whole_sequence or named or change_in_place",
)
CHECKPOINTS_OVER_RANKS = Tests(
    "compiled checkpoints over ranks", ("tests/dist/test_compiled_checkpoints.py",), ranks=2
)
DIFFERENT_RANKS = Tests(
    "calls and graphs that differ on ranks",
    ("tests/dist/test_compiled_agreement.py", "tests/dist/test_shared_contents.py"),
    ranks=2,
)
LOCAL_ATTENTION = Tests("local attention", ("tests/dist/test_local_attention.py",), ranks=2)
TOKEN_MIXING = Tests("token mixing", ("tests/compile_backend/test_token_mixing.py",))
CONTEXTS_OF_BACKWARDS = Tests(
    "reentrant checkpoints", ("tests/dist/test_reentrant_checkpoints.py",), ranks=2
)
SURVIVORS = Tests("lost ranks", ("tests/test_faults.py",))
MATMULS = Tests(
    "tensor-parallel matmuls",
    tuple(f"tests/dist/test_{name}.py" for name in ("tp_one_sided", "tp_all_reduce", "tp_epochs")),
    interpret=True,
    ranks=2,
)
INFERENCE = Tests("inference form", ("tests/models/test_inference.py",), interpret=True)
SMALL_M = Tests("linear layers of few rows", ("tests/ops/test_small_m_linear.py",), interpret=True)
TP_INFERENCE = Tests(
    "tensor-parallel inference form", ("tests/dist/test_tp_inference.py",), ranks=2
)
DECODE_GRAPHS = Tests("decode by graphs", ("tests/engine/test_decode_graphs.py",))
SPECULATION = Tests(
    "speculation by n-grams",
    ("tests/engine/test_ngram_proposals.py", "tests/engine/test_ngram_speculation.py"),
)
SWIGLU = Tests(
    "gathered rows' SwiGLU", ("tests/dist/test_gathered_swiglu.py",), interpret=True, ranks=2
)
DIST = Tests("distributed", ("tests/dist/test_decode.py", "tests/dist/test_kv_cache.py"), ranks=2)
SHARDED_PAGES = Tests(
    "pages that ranks share",
    ("tests/dist/test_chunk_attention.py", "tests/dist/test_llm.py"),
    ranks=2,
)
WRITTEN_FORMS = Tests(
    "forms as models write them, and their twins",
    (
        "tests/compile_backend/test_written_forms.py",
        "tests/compile_backend/test_written_form_twins.py",
    ),
)
TORCH_SDPA = Tests("SDPA on a CPU", ("tests/compile_backend/test_torch_sdpa.py",))
_FLASH_ATTN = "tests/dropins/flash_attn"
FLASH_ATTN = Tests(
    "FlashAttention's interface",
    tuple(
        f"{_FLASH_ATTN}/test_{name}.py"
        for name in ("dense", "varlen", "kvcache", "deterministic", "errors")
    ),
)
FLASH_ATTN_INSTALLED = Tests("install", (f"{_FLASH_ATTN}/test_install.py",))
FAMILIES = Tests("model families", ("tests/models/test_families.py", "tests/models/test_gguf.py"))
HF_CONFIG = Tests("config.json of families", ("tests/models/test_hf_config.py",))
HOSTILE = Tests("hostile model files", ("tests/models/test_hostile_files.py",))
STOP_STRINGS = Tests("stop strings", ("tests/engine/test_stop_strings.py",))
GRAMMARS = Tests(
    "schemas and grammars",
    ("tests/engine/test_structured.py", "tests/engine/test_schema_intersections.py"),
)
CHAT = Tests("conversations", ("tests/engine/test_chat.py",))
DECODE_CPU = Tests("decode of CPU tensors", ("tests/ops/decode/test_decode_cpu.py",))
APPEND_DRAWN = Tests("drawn appends", ("tests/ops/append_kv/test_append_drawn.py",))
STREAMING = Tests("streams of text", ("tests/engine/test_streaming.py",))
STEP_TRACE = Tests("traced steps", ("tests/engine/test_step_trace.py",))
SERVER_ERRORS = Tests("a server's connections", ("tests/server/test_connections.py",))
REFUSALS = Tests("a server's refusals", ("tests/server/test_refusals.py",))
