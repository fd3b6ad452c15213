"""A layer of our backend in vLLM's hands: batches, options and slots against the fp64 oracle, and what is refused."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from torch_fdattn.ops.library import INTERPRET, launches
from torch_fdattn.testing import attention_oracle, check_close

pytest.importorskip("vllm", reason="make test-vllm")

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from torch_fdattn.dropins.vllm import register
from torch_fdattn.dropins.vllm.backend import FdattnBackend, FdattnImpl, FdattnMetadataBuilder

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 6, 2, 32, 16, 40
#: The end of the launch counters' names: kernels interpreted, or the CPU path.
PATH = "triton" if INTERPRET else "cpu"
CONFIG = SimpleNamespace(parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=1))


def common(query_lens, seq_lens, table, slots, **changes) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(query_lens),
        num_actual_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table,
        slot_mapping=slots,
        **changes,
    )


def build(batch: CommonAttentionMetadata):
    spec = SimpleNamespace(dcp_sharded=False)
    return FdattnMetadataBuilder(spec, ["layer"], CONFIG, torch.device("cpu")).build(0, batch)


class Requests:
    """Some requests' keys and values, and a cache in which all but the new tokens are stored."""

    def __init__(self, query_lens, seq_lens, padding: int = 0) -> None:
        self.query_lens, self.seq_lens = query_lens, seq_lens
        widest = max(-(-n // BLOCK) for n in seq_lens)
        order = torch.randperm(BLOCKS)[: len(seq_lens) * widest]
        self.table = order.view(len(seq_lens), widest).to(torch.int32)
        # vLLM's memory order of a layer's cache is not this shape's.
        shape = BLOCKS, BLOCK, KV_HEADS, 2 * DIM
        self.cache = torch.full(shape, float("nan")).transpose(1, 2)
        self.keys = [torch.randn(KV_HEADS, n, DIM) for n in seq_lens]
        self.values = [torch.randn(KV_HEADS, n, DIM) for n in seq_lens]
        self.query = torch.randn(sum(query_lens) + padding, HEADS, DIM)
        slots, new = [], []
        for table, k, v, count in zip(self.table, self.keys, self.values, query_lens, strict=True):
            at = torch.arange(k.shape[1])
            slot = table[at // BLOCK].long() * BLOCK + at % BLOCK
            old = slot[: len(slot) - count]
            rows = torch.cat([k, v], -1).transpose(0, 1)
            self.cache[old // BLOCK, :, old % BLOCK] = rows[: len(old)]
            slots.append(slot[len(old) :])
            new.append(rows[len(old) :])
        dropped = torch.full((padding,), -1)
        self.slots = torch.cat([*slots, dropped])
        rows = torch.cat([*new, torch.randn(padding, KV_HEADS, 2 * DIM)])
        self.new_keys, self.new_values = rows.split(DIM, -1)

    def attend(self, impl: FdattnImpl) -> torch.Tensor:
        output = torch.full_like(self.query, float("nan"))
        impl.do_kv_cache_update(None, self.new_keys, self.new_values, self.cache, self.slots)
        metadata = build(common(self.query_lens, self.seq_lens, self.table, self.slots))
        given = self.query, self.new_keys, self.new_values, self.cache
        assert impl.forward(None, *given, metadata, output) is output
        return output

    def check(self, output: torch.Tensor, **options) -> None:
        begin = 0
        for k, v, count in zip(self.keys, self.values, self.query_lens, strict=True):
            rows = slice(begin, begin + count)
            q, begin = self.query[rows].transpose(0, 1), rows.stop
            given = [x[None] for x in (q, k, v)]
            at_dtype, _ = attention_oracle(*given, causal=True, **options)
            exact, _ = attention_oracle(*(x.double() for x in given), causal=True, **options)
            got = output[rows].transpose(0, 1)[None]
            check_close("output", got, exact, [at_dtype.double() - exact])


def impl(**options) -> FdattnImpl:
    return FdattnImpl(HEADS, DIM, DIM**-0.5, KV_HEADS, **options)


BATCHES = {
    "prefill": ([5, 40, 1], [5, 40, 1]),
    "chunks and decodes": ([1, 7, 1, 20], [33, 50, 1, 20]),
    "decode": ([1, 1, 1], [33, 16, 1]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches(name):
    requests = Requests(*BATCHES[name])
    launches.clear()
    requests.check(requests.attend(impl()))
    attended = "decode_forward" if name == "decode" else "varlen_attention_forward"
    assert launches == {f"append_kv/{PATH}": 1, f"{attended}/{PATH}": 1}


@pytest.mark.parametrize("name", ["chunks and decodes", "decode"])
def test_heads_of_512(name, monkeypatch):
    monkeypatch.setitem(globals(), "DIM", 512)
    requests = Requests(*BATCHES[name])
    requests.check(requests.attend(impl()))


OPTIONS = {
    "window": (dict(sliding_window=9), dict(window=(8, 0))),
    "softcap": (dict(logits_soft_cap=5.0), dict(softcap=5.0)),
    "alibi": (
        dict(alibi_slopes=[2.0**-i for i in range(HEADS)]),
        dict(alibi_slopes=torch.tensor([2.0**-i for i in range(HEADS)])),
    ),
    "sinks": (dict(sinks=torch.arange(HEADS) / 2), dict(sinks=torch.arange(HEADS) / 2)),
}


@pytest.mark.parametrize("batch", ["chunks and decodes", "decode"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, batch):
    theirs, ours = OPTIONS[name]
    requests = Requests(*BATCHES[batch])
    requests.check(requests.attend(impl(**theirs)), **ours)


def test_padding_is_neither_stored_nor_attended():
    requests = Requests([3, 1], [20, 9], padding=4)
    stored = [int(x) for x in requests.slots if x >= 0]
    before = requests.cache.clone()
    output = requests.attend(impl())
    requests.check(output)
    assert output[4:].isnan().all()
    rows = requests.cache.transpose(1, 2).flatten(0, 1)
    rows[stored] = before.transpose(1, 2).flatten(0, 1)[stored]
    assert torch.equal(rows.nan_to_num(7.0), before.transpose(1, 2).flatten(0, 1).nan_to_num(7.0))


def test_a_request_without_tokens_is_no_decode():
    """Padding of a batch of decodes: as many tokens as requests that have one, and a request more."""
    requests = Requests([1, 1, 0], [33, 16, 4])
    launches.clear()
    requests.check(requests.attend(impl()))
    assert launches[f"varlen_attention_forward/{PATH}"] == 1


def test_the_profiling_run_gives_zeros():
    output = torch.full((3, HEADS, DIM), float("nan"))
    q = torch.randn(3, HEADS, DIM)
    assert impl().forward(None, q, q, q, torch.empty(0), None, output).eq(0).all()


REFUSED = {
    "kv_cache_dtype must be auto": dict(kv_cache_dtype="fp8"),
    "attn_type must be decoder": dict(attn_type="encoder_only"),
    "takes no chunk_lookback": dict(chunk_lookback=2),
    "takes no use_alibi_sqrt": dict(use_alibi_sqrt=True),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_when_a_layer_is_made(message):
    with pytest.raises(NotImplementedError, match=message):
        impl(**REFUSED[message])


@pytest.mark.parametrize(
    ("wrong", "kind", "told"),
    [
        (dict(num_heads=5), ValueError, "num_heads must be a positive multiple of num_kv_heads, got 5 and 2"),
        (dict(num_kv_heads=0), ValueError, "num_heads must be a positive multiple of num_kv_heads, got 6 and 0"),
        (dict(scale=None), TypeError, "scale must be a number, got NoneType"),
        (dict(scale=-1.0), ValueError, "scale must be a positive finite number, got -1.0"),
        (dict(sliding_window=0), ValueError, "sliding_window must be at least 1, or None, got 0"),
        (dict(sliding_window=2.5), TypeError, "sliding_window must be an int, got float"),
        (dict(logits_soft_cap=float("nan")), ValueError, "logits_soft_cap must be a positive finite number, or 0 or None, got nan"),
        (dict(alibi_slopes=[1.0]), ValueError, "alibi_slopes must have a number for each of 6 heads, got 1"),
        (dict(sinks=torch.ones(3)), ValueError, "sinks must have shape (6,) like num_heads, got (3,)"),
    ],
)  # fmt: skip
def test_wrong_layers(wrong, kind, told):
    given = dict(num_heads=HEADS, head_size=DIM, scale=0.2, num_kv_heads=KV_HEADS)
    with pytest.raises(kind, match=re.escape(told)):
        FdattnImpl(**{**given, **wrong})


def test_head_sizes():
    with pytest.raises(
        ValueError, match="head_size must be a multiple of 8 from 16 to 512, got 20"
    ):
        FdattnImpl(HEADS, 20, 1.0, KV_HEADS)
    assert FdattnBackend.supports_head_size(64)
    assert FdattnBackend.supports_head_size(512)
    assert not FdattnBackend.supports_head_size(520)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("causal", False),
        ("causal", torch.ones(1, dtype=torch.bool)),
        ("encoder_seq_lens", torch.ones(1)),
        ("mm_req_doc_ranges", {0: [(0, 2)]}),
        ("rswa_prefix_lens", torch.ones(1)),
    ],
)
def test_refused_of_a_batch(name, value):
    batch = common([1], [4], torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1), **{name: value})
    with pytest.raises(NotImplementedError, match=f"{name} must be"):
        build(batch)


def test_refused_in_a_call():
    q = torch.randn(3, HEADS, DIM)
    with pytest.raises(NotImplementedError, match="output_scale"):
        impl().forward(None, q, q, q, torch.empty(0), None, q.clone(), torch.ones(1))
    builder = FdattnMetadataBuilder(SimpleNamespace(dcp_sharded=False), [], CONFIG, None)
    with pytest.raises(NotImplementedError, match="common_prefix_len must be 0"):
        builder.build(3, None)


VALID = dict(
    head_size=64, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=16, use_mla=False, has_sink=True,
    use_sparse=False, use_mm_prefix=False, use_per_head_quant_scales=False, device_capability=None,
    attn_type="decoder", has_sliding_window=True, use_dcp=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(head_size=20), "head_size"), (dict(dtype=torch.float64), "dtype"),
        (dict(kv_cache_dtype="fp8"), "kv_cache_dtype"), (dict(use_mla=True), "MLA"),
        (dict(use_sparse=True), "sparse"), (dict(use_mm_prefix=True), "multimodal"),
        (dict(use_per_head_quant_scales=True), "per-head"), (dict(attn_type="encoder"), "encoder"),
        (dict(use_non_causal=True), "non-causal"), (dict(use_batch_invariant=True), "batch invariance"),
        (dict(use_pcp=True), "PCP"), (dict(use_rswa=True), "R-SWA"),
    ],
)  # fmt: skip
def test_vllm_is_told_what_is_not_there(change, reason):
    assert FdattnBackend.validate_configuration(**VALID) == []
    (told,) = FdattnBackend.validate_configuration(**{**VALID, **change})
    assert reason in told


def test_the_entry_point_registers_custom():
    from importlib.metadata import entry_points

    (plugin,) = (x for x in entry_points(group="vllm.general_plugins") if x.name == "fdattn")
    try:
        for _ in range(2):  # vLLM may load a plug-in twice
            plugin.load()()
        assert AttentionBackendEnum.CUSTOM.get_class() is FdattnBackend
        assert AttentionBackendEnum[FdattnBackend.get_name()] is AttentionBackendEnum.CUSTOM
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()


def test_another_plugins_backend_stays():
    theirs = "their.package.Backend"
    register_backend(AttentionBackendEnum.CUSTOM, theirs)
    try:
        with pytest.raises(
            RuntimeError, match=f"CUSTOM must be free for our backend, got {theirs}"
        ):
            register()
        assert AttentionBackendEnum.CUSTOM.get_path() == theirs
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()


def test_register_refuses_other_names():
    with pytest.raises(ValueError, match="Unknown attention backend: 'FAST'"):
        register("FAST")
    with pytest.raises(TypeError, match="name must be a str, got 3"):
        register(3)
