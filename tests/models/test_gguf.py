"""GGUF files, written as llama.cpp's converter writes them, give the model they were made from."""

from __future__ import annotations

import struct

import pytest
import torch

from tests.models.hf_models import CONFIGS, reference, write_gguf
from torch_fdattn.models import ModelError, load_model
from torch_fdattn.models.gguf import GGUFFile, gguf_config

gguf = pytest.importorskip("gguf", reason="needs the package gguf")
TOKENS = torch.arange(90)[None] * 7 % 160


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        result = model(TOKENS)
    return getattr(result, "logits", result)


def write_family(path, theirs, case: str) -> None:
    """With the fields that files of the family have besides."""

    def fields(writer):
        if case == "gemma3":
            writer.add_sliding_window_pattern(3)
            writer.add_rope_freq_base_swa(1000.0)

    write_gguf(path, theirs, fields=fields)


#: What GGUF files of their families cannot say.
UNSAID = {"qwen2_window", "qwen3_window", "mistral", "mistral_full", "smollm3_window"}


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in UNSAID])
def test_fp32_files_give_transformers_logits(name, tmp_path):
    theirs, path = reference(name), tmp_path / "model.gguf"
    # No field has Gemma's scale: llama.cpp's is the head size's.
    for layer in theirs.model.layers if "gemma" in name else ():
        layer.self_attn.scaling = theirs.config.head_dim**-0.5
    write_family(path, theirs, name)
    ours = load_model(path)
    torch.testing.assert_close(logits(ours), logits(theirs), atol=2e-4, rtol=0)
    assert next(ours.parameters()).dtype is torch.float32


@pytest.mark.parametrize(
    ("key", "factor"),
    [("rope.scale_linear", 4.0), ("rope.scaling.factor", 4.0), ("rope.scaling.factor", 0.0)],
)
def test_a_rope_factor_without_a_type_is_linear(key, factor, tmp_path):
    theirs, path = reference("llama_linear" if factor else "llama2"), tmp_path / "model.gguf"
    expected = logits(theirs)
    unnamed = {**theirs.config.rope_parameters, "rope_type": "default"}  # the file names no type
    theirs.config.rope_parameters = unnamed
    write_gguf(path, theirs, fields=lambda writer: writer.add_float32(f"llama.{key}", factor))
    torch.testing.assert_close(logits(load_model(path)), expected, atol=2e-4, rtol=0)


def test_a_rope_factor_beside_a_type_or_divisors(tmp_path):
    """It means nothing to the type none, and divisors are multiplied by it."""

    def loaded(name, kind, factor):
        def fields(writer):
            writer.add_rope_scaling_type(kind)
            writer.add_rope_scaling_factor(factor)

        path = tmp_path / f"{name}.gguf"
        write_gguf(path, reference(name), fields=fields)
        return load_model(path).config.rope

    assert loaded("llama2", gguf.RopeScalingType.NONE, 4.0).kind == "default"
    plain = loaded("llama3", gguf.RopeScalingType.NONE, 2.0).divisors
    scaled = loaded("llama3_tied", gguf.RopeScalingType.LINEAR, 2.0).divisors
    assert scaled == tuple(2 * divisor for divisor in plain)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_1", "Q4_1", "Q4_0"])
def test_quantised_files_give_the_dequantised_weights(kind, tmp_path):
    theirs, path = reference("llama3"), tmp_path / "model.gguf"
    write_gguf(path, theirs, kind)
    dtype = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 2:
                blocks = gguf.quantize(parameter.numpy(), dtype)
                parameter.copy_(torch.from_numpy(gguf.dequantize(blocks, dtype)))
    torch.testing.assert_close(logits(load_model(path)), logits(theirs), atol=2e-4, rtol=0)


def test_metadata_equals_the_gguf_packages_reader(tmp_path):
    path = tmp_path / "model.gguf"

    def fields(writer):
        writer.add_string("a.string", "naïve 😀")
        writer.add_array("an.array", ["x", "", "ÿ"])
        writer.add_array("numbers", [1, -2, 3])
        writer.add_bool("a.bool", True)
        writer.add_float64("a.double", 0.1)
        writer.add_uint64("a.long", 2**40)

    write_gguf(path, reference("qwen3"), "Q8_0", fields)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value = ours.fields[key]
            assert (list(value) if isinstance(value, tuple) else value) == field.contents(), key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert info.offset == tensor.data_offset


def test_a_string_that_is_not_utf8_is_refused_only_where_it_is_needed(tmp_path):
    def fields(writer):
        writer.add_name("caf~~~")
        writer.add_array("general.tags", ["one", "tw~~~"])
        writer.add_string("general.~~~", "x")
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)

    path = tmp_path / "model.gguf"
    write_gguf(path, reference("llama2"), fields=fields)
    expected = logits(load_model(path))
    path.write_bytes(path.read_bytes().replace(b"~~~", b"\xe9\xe9\xe9"))  # as Latin-1 has é
    assert torch.equal(logits(load_model(path)), expected)
    assert GGUFFile(path).fields["general.name"] == b"caf\xe9\xe9\xe9"
    for needed in (b"none", b"llama"):
        path.write_bytes(path.read_bytes().replace(needed, needed[:-1] + b"\xff", 1))
        with pytest.raises(ModelError, match=r"model\.gguf: metadata field \S+ must be UTF-8 text"):
            load_model(path)


@pytest.fixture(scope="module")
def good_file(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, reference("llama3"))
    return path.read_bytes()


def test_truncated_anywhere_is_one_clear_error(good_file, tmp_path):
    path = tmp_path / "cut.gguf"
    lengths = [0, 3, 4, 8, 23, 24, 30, 60, 200, 1000, len(good_file) // 2, len(good_file) - 40]
    for length in lengths:
        path.write_bytes(good_file[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf: ") as caught:
            load_model(path)
        assert "\n" not in str(caught.value)


def test_truncated_weights_name_the_tensor(good_file, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(good_file[:-4096])
    message = (
        r"cut\.gguf: truncated GGUF file: tensor \S+\.weight ends at byte \d+, the file has \d+"
    )
    with pytest.raises(ModelError, match=message):
        load_model(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: b"LLLL" + raw[4:], "not a GGUF file"),
        (lambda raw: raw[:4] + struct.pack("<I", 9) + raw[8:], "version must be 2 or 3, got 9"),
        (lambda raw: raw[:8] + struct.pack("<Q", 2**60) + raw[16:], "truncated or corrupt GGUF"),
        (lambda raw: raw[:16] + struct.pack("<Q", 2**60) + raw[24:], "truncated or corrupt GGUF"),
        (lambda raw: raw[:24] + struct.pack("<Q", 2**62) + raw[32:], "truncated or corrupt GGUF"),
        (lambda raw: raw.replace(b"attn_q.w", b"attn_z.w", 1), "missing from the weights"),
        (
            lambda raw: raw.replace(b"llama.block_count", b"llama.clock_count"),
            "metadata field llama.block_count is missing",
        ),
        (
            lambda raw: raw.replace(b"token_embd.weight", b"token_embd.weighs"),
            "tensor token_embd.weight is missing",
        ),
    ],
)
def test_corrupt_headers_are_clear_errors(good_file, tmp_path, change, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(change(good_file))
    with pytest.raises(ModelError, match=message) as caught:
        load_model(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (lambda w: w.add_uint32("llama.expert_count", 8), "mixture-of-experts"),
        (lambda w: w.add_uint16("split.count", 3), "gguf-split --merge"),
        (
            lambda w: w.add_uint32("llama.rope.dimension_count", 8),
            "must be the head size 16, got 8",
        ),
        (
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
            "rope scaling type must be none or linear, got 'yarn'",
        ),
    ],
)
def test_unsupported_models_are_refused(tmp_path, fields, message):
    path = tmp_path / "model.gguf"
    theirs = reference("llama2" if "yarn" in message else "llama3")
    write_gguf(path, theirs, fields=fields)
    with pytest.raises(ModelError, match=message):
        load_model(path)


@pytest.mark.parametrize(
    "field",
    ["split.count", "general.architecture", *(f"llama.{name}" for name in
     ("block_count", "attention.head_count", "rope.freq_base", "attention.key_length",
      "attention.layer_norm_rms_epsilon", "rope.dimension_count", "context_length"))],
)  # fmt: skip
@pytest.mark.parametrize("value", ["abc", 1.5e300, (1, 2)], ids=str)
def test_fields_of_the_wrong_kind_name_the_file(good_file, tmp_path, field, value):
    path = tmp_path / "model.gguf"
    path.write_bytes(good_file)
    file = GGUFFile(path)
    file.fields[field] = value
    with pytest.raises(ModelError, match=r"model\.gguf: "):
        gguf_config(file)


@pytest.mark.parametrize(
    ("name", "layers", "per_head"), [("gemma2", 46, 16), ("gemma3", 62, 16), ("gemma2", 42, 32)]
)
def test_gemmas_scale_is_that_of_llama_cpp(name, layers, per_head, tmp_path):
    """The head size's, 32 here, but in the models of 27 billion parameters: hidden size over heads."""
    path = tmp_path / "model.gguf"
    write_gguf(path, reference(name))
    file = GGUFFile(path)
    file.fields[f"{name}.block_count"] = layers
    assert gguf_config(file).attention_scale == per_head**-0.5


def test_other_architectures_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    theirs = reference("llama2")
    theirs.config.model_type = "phi3"
    write_gguf(path, theirs)
    with pytest.raises(
        ModelError, match=r"architecture must be one of llama, .*, gemma3, got 'phi3'"
    ):
        load_model(path)


def test_random_damage_never_escapes_as_another_error(good_file, tmp_path):
    """Bytes of the header flipped at random: either it loads or it is a ModelError."""
    generator = torch.Generator().manual_seed(3)
    header = good_file.index(b"output_norm.weight")
    path = tmp_path / "flipped.gguf"
    refused = 0
    for _ in range(150):
        raw = bytearray(good_file)
        for at in torch.randint(4, header, (3,), generator=generator).tolist():
            raw[at] = int(torch.randint(256, (1,), generator=generator))
        path.write_bytes(raw)
        try:
            load_model(path)
        except ModelError:
            refused += 1
    assert refused > 50
