"""transformers' generate_batch within `continuous_batching`: the text of generate, by our launches alone."""

from __future__ import annotations

import pytest
import torch

from tests.overlays import overlay, run
from torch_fdattn.dropins import continuous_batching as paged
from torch_fdattn.dropins import transformers as dropin

transformers = pytest.importorskip("transformers", reason="transformers is the reference here")

from tests.dropins import greedy_text  # noqa: E402
from tests.dropins.greedy_text import ENOUGH, PROMPTS, VARLEN, check, pages, tiny  # noqa: E402

#: What transformers of an era takes beyond, or other than, the tests' own environment.
HUB1 = ("huggingface_hub==1.33.0", "httpx==0.28.1", "httpcore==1.0.9")
ERAS = {
    "5.5.0": (*HUB1, "tokenizers==0.22.2"),
    "5.17.0": HUB1,
    "5.19.0": (),
    "5.23.0": (),
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    dropin.register()


@pytest.mark.parametrize("name", greedy_text.MODELS)
def test_greedy_text(name):
    """A prompt of more tokens than a batch takes; windows, softcap and sinks; launches are layers times steps."""
    assert check(tiny(name), PROMPTS, 12, VARLEN, **pages()) >= ENOUGH


@pytest.mark.skipif(
    paged.is_prefixed(), reason="transformers before 5.19 hands out no tables of pages"
)
def test_greedy_text_over_tables_of_pages():
    with greedy_text.tables_of_pages():
        assert check(tiny("Llama"), PROMPTS, 12, "append_kv/cpu", **pages()) >= ENOUGH


@pytest.mark.overlay
@pytest.mark.parametrize("version", ERAS)
def test_each_era(version):
    over = overlay(f"transformers=={version}", *ERAS[version])
    said = run("-m", "tests.dropins.greedy_text", over=over)
    lines = [line for line in said.splitlines() if line.startswith(f"transformers {version}: ")]
    minor = int(version.split(".")[1])
    assert len(lines) == len(greedy_text.MODELS) + (minor >= 19)
    refused = [line for line in lines if line.endswith(" refused")]
    assert len(refused) == (3 if minor < 16 else 0)  # those with sliding windows


def attention_of(model):
    return model.config._attn_implementation


def test_what_a_model_had_is_set_again():
    """Also what transformers had loaded, when the body raises."""
    from transformers import modeling_flash_attention_utils as flash

    model = tiny("Llama")
    before = {name: getattr(flash, name) for name in paged._LOADED}

    def body():
        with dropin.continuous_batching(model):
            assert attention_of(model) in (paged.PREFIXED, paged.FLASH)
            if not paged.is_prefixed():
                assert flash._loaded_implementation == paged.FLASH
                flash._flash_varlen_fn()
            raise RuntimeError("transformers called a function of flash attention")

    with pytest.raises(RuntimeError, match="transformers called a function of flash attention"):
        body()
    assert attention_of(model) == "eager"
    assert {name: getattr(flash, name) for name in paged._LOADED} == before


def test_a_plain_forward_within_is_refused():
    model = tiny("Llama")
    ids = torch.tensor([[3, 4, 5]])
    with dropin.continuous_batching(model):
        with pytest.raises(ValueError, match="cu_seq_lens_q must be given, as generate_batch does"):
            model(ids)
        with pytest.raises(ValueError, match="cu_seq_lens_q must be given"):
            model.generate(ids, max_new_tokens=2)
    model(ids)


def test_models_that_flash_attention_does_not_support_are_refused():
    config = transformers.BloomConfig(vocab_size=64, hidden_size=64, n_layer=1, n_head=4)
    with (
        pytest.raises(
            NotImplementedError, match="does not take its attention from AttentionInterface"
        ),
        dropin.continuous_batching(transformers.BloomForCausalLM(config)),
    ):
        pass
    config = transformers.DogeConfig(**greedy_text.SMALL)
    with (
        pytest.raises(NotImplementedError, match="DogeForCausalLM needs masks of its own"),
        dropin.continuous_batching(transformers.DogeForCausalLM(config)),
    ):
        pass
    with (
        pytest.raises(ValueError, match="one attention for continuous_batching, got Linear"),
        dropin.continuous_batching(torch.nn.Linear(1, 1)),
    ):
        pass


def test_a_transformers_that_loads_otherwise_is_refused(monkeypatch):
    from transformers import modeling_flash_attention_utils as flash

    monkeypatch.setattr(paged, "is_prefixed", lambda: False)
    monkeypatch.delattr(flash, "_flash_fn")
    model = tiny("Llama")
    with (
        pytest.raises(
            NotImplementedError, match=r"has no _flash_fn; 5\.5 to 5\.24 have been tested"
        ),
        dropin.continuous_batching(model),
    ):
        pass
    assert attention_of(model) == "eager"


def call(**changes):
    q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 5, 16)
    begins = torch.tensor([0, 2, 5], dtype=torch.int32)
    arguments = {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins} | changes
    return paged.paged_attention(torch.nn.Module(), q, k, k, None, **arguments)[0]


def test_what_a_layer_asks_beyond_that_is_refused():
    assert call().shape == (1, 5, 4, 16)
    with pytest.raises(NotImplementedError, match="continuous_batching is causal"):
        call(is_causal=False)
    with pytest.raises(NotImplementedError, match="takes no position_bias"):
        call(position_bias=torch.zeros(1, 4, 5, 5))
    with pytest.raises(NotImplementedError, match=r"drops no weights, got dropout 0\.1"):
        call(dropout=0.1)
    with pytest.raises(NotImplementedError, match="does not know indices"):
        call(indices=torch.zeros(1))

    class Cache:
        def update(self, key_states, value_states, layer_idx, read_index, write_index):
            raise AssertionError

    layer = torch.nn.Module()
    layer.layer_idx = 0
    x = torch.randn(1, 4, 5, 16)
    begins = torch.tensor([0, 2, 5], dtype=torch.int32)
    with pytest.raises(
        NotImplementedError, match=r"reads no block_table in transformers before 5\.19"
    ):
        paged.paged_attention(
            layer,
            x,
            x,
            x,
            None,
            cache=Cache(),
            cu_seq_lens_q=begins,
            cu_seq_lens_k=begins,
            block_table=begins,
        )


def test_rows_of_padding_neither_write_nor_read():
    """CUDA graphs pad a batch of decode steps; whatever stands in the rows of its table."""
    k_cache, v_cache = torch.randn(2, 4, 8, 2, 16)
    before = k_cache.clone()
    table = torch.tensor([[2, 1], [-1, -1], [0, 3]], dtype=torch.int32)
    begins = torch.tensor(
        [0, 10, 10, 10], dtype=torch.int32
    )  # one request of ten keys, the new one counted
    q, k, v = (torch.randn(1, heads, 3, 16) for heads in (4, 2, 2))
    out, _ = paged.paged_attention(
        torch.nn.Module(), q, k, v, None, cu_seq_lens_q=torch.arange(4, dtype=torch.int32), cu_seq_lens_k=begins,
        block_table=table, k_cache=k_cache, v_cache=v_cache,
    )  # fmt: skip
    assert out.shape == (1, 3, 4, 16)
    assert (out[0, 1:] == 0).all()
    assert torch.equal(k_cache[1, 1], k[0, :, 0])
    before[1, 1] = k[0, :, 0]
    assert torch.equal(k_cache, before)
    keys, values = (torch.cat([x[2], x[1, :2]]).transpose(0, 1)[None] for x in (k_cache, v_cache))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, :1], keys, values, enable_gqa=True
    )
    torch.testing.assert_close(out[0, 0], wanted[0, :, 0])
