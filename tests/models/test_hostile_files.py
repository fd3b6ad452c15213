"""Model files that somebody made to do harm: an error that names the file; no code runs, and no memory is taken for them."""

from __future__ import annotations

import json
import pickle
import resource
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.models.hf_models import reference, write_gguf
from torch_fdattn.models import ModelError, load_model, load_tokenizer
from torch_fdattn.models.gguf import GGUFFile, gguf_config

HUGE = (2**40, 2**62, 2**63 - 1)
MARGIN = 2**30  # bytes of address space that a refusal may take


def _safetensors(header: dict | bytes, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(64)


def _tensor(shape: list[int], end: int) -> dict:
    return {"model.norm.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}


SAFETENSORS = {
    **{f"a header of {n} bytes": _safetensors(b"{}", n) for n in HUGE},
    "a tensor beyond the file": _safetensors(_tensor([2**20, 2**20], 2**42)),
    "sizes whose product overflows": _safetensors(_tensor([2**62, 4], 64)),
    "a size that is no number": _safetensors(_tensor([10**30], 64)),
    "sizes without end": _safetensors(_tensor([1] * 100_000, 4)),
    "a header nested without end": _safetensors(b"[" * 100_000),
    "a tensor of negative size": _safetensors(_tensor([-1], 64)),
}


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _gguf(fields: bytes, count: int, tensors: bytes = b"", tensor_count: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensor_count, count) + fields + tensors


def _array(item: int, count: int, rest: bytes = b"") -> bytes:
    return _string("x") + struct.pack("<IIQ", 9, item, count) + rest


def _info(dims: tuple[int, ...], at: int) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return _string("token_embd.weight") + sizes + struct.pack("<IQ", 0, at)


_LLAMA = _string("general.architecture") + struct.pack("<I", 8) + _string("llama")
GGUF = {
    **{f"{n} fields": _gguf(b"", n) for n in HUGE},
    **{f"{n} tensors": _gguf(b"", 0, tensor_count=n) for n in HUGE},
    **{f"a string of {n} bytes": _gguf(struct.pack("<Q", n), 1) for n in HUGE},
    **{
        f"an array of {n} of kind {kind}": _gguf(_array(kind, n), 1)
        for n in HUGE
        for kind in (0, 6, 8, 9, 10, 12)
    },
    "arrays nested without end": _gguf(_array(9, 1, struct.pack("<IQ", 9, 1) * 100_000), 1),
    "no such kind": _gguf(_string("x") + struct.pack("<I", 99), 1),
    "a tensor of huge sizes": _gguf(_LLAMA, 1, _info((2**62, 2**62), 0), 1),
    "a tensor far beyond the file": _gguf(_LLAMA, 1, _info((32, 32), 2**63), 1),
    "a tensor of a thousand dimensions": _gguf(_LLAMA, 1, _info((1,) * 1000, 0), 1),
    **{
        f"an alignment of {n}": _gguf(
            _LLAMA + _string("general.alignment") + struct.pack("<IQ", 10, n), 2
        )
        for n in (0, *HUGE)
    },
}
#: Of config.json, beside right weights.
CONFIG = {
    f"{key} of {value}": {key: value}
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "num_attention_heads")
    for value in (2**16 - 1, 2**31 - 1, 2**63)
}  # fmt: skip


@contextmanager
def address_space_limited(more: int) -> Iterator[None]:
    """Within, the process cannot map more than so many bytes: an allocation that is larger fails."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def refusal(load: Callable[[Path], object], path: Path) -> str | None:
    """What a ModelError says; None: it was loaded."""
    try:
        load(path)
    except ModelError as error:
        return str(error)
    return None


def _write_all(folder: Path) -> None:
    saved = folder / "right"
    reference("gemma2").save_pretrained(saved)
    for i, raw in enumerate(SAFETENSORS.values()):
        (path := folder / f"safetensors{i}").mkdir()
        shutil.copy(saved / "config.json", path)
        (path / "model.safetensors").write_bytes(raw)
    for i, raw in enumerate(GGUF.values()):
        (folder / f"{i}.gguf").write_bytes(raw)
    for i, change in enumerate(CONFIG.values()):
        path = shutil.copytree(saved, folder / f"config{i}")
        raw = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**raw, "layer_types": None, **change}))


def test_sizes_that_no_file_has_are_refused_without_memory(tmp_path: Path) -> None:
    _write_all(tmp_path)
    load_model(tmp_path / "right")
    with address_space_limited(MARGIN):
        with pytest.raises((MemoryError, RuntimeError)):  # the limit is one
            torch.empty(2 * MARGIN, dtype=torch.uint8)
        told = {path: refusal(load_model, path) for path in sorted(tmp_path.iterdir())}
    assert told.pop(tmp_path / "right") is None
    assert len(told) == len(SAFETENSORS) + len(GGUF) + len(CONFIG)
    assert not {path.name: text for path, text in told.items() if str(path) not in (text or "")}


def test_sizes_in_ggufs_metadata(tmp_path: Path) -> None:
    """Beside right tensors; what is made of them is made after they are compared."""
    path = tmp_path / "model.gguf"
    write_gguf(path, reference("gemma2"))
    for key in (
        "block_count",
        "embedding_length",
        "attention.head_count",
        "attention.sliding_window",
    ):
        for size in (*HUGE, 2**31, -1, 0):
            file = GGUFFile(path)
            file.fields[f"gemma2.{key}"] = size
            with pytest.raises(ModelError, match=r"model\.gguf: "):
                gguf_config(file)
    for pattern in (0, -1, 2**70, "x", (True,), (True,) * 10_000):
        file = GGUFFile(path)
        file.fields["gemma2.attention.sliding_window_pattern"] = pattern
        if pattern == 2**70:  # a window in every layer
            assert all(layer.window for layer in gguf_config(file).layers)
            continue
        with pytest.raises(
            ModelError, match=r"sliding_window_pattern must be a positive integer or"
        ):
            gguf_config(file)


class Payload:
    """What unpickling it does is to make a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return Path.mkdir, (self.folder,)


def test_pickles_never_run(tmp_path: Path) -> None:
    """Under every name that a model's or a tokenizer's file may have."""
    harm = tmp_path / "harm"
    raw = pickle.dumps(Payload(harm))
    pickle.loads(raw)  # it does what it is for
    harm.rmdir()
    saved = tmp_path / "saved"
    reference("llama3").save_pretrained(saved)
    names = (
        "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "config.json", "tokenizer.json",
        "tokenizer.model", "consolidated.00.pth", "generation_config.json", "tokenizer_config.json",
    )  # fmt: skip
    for name in names:
        for alone in (False, True):
            folder = tmp_path / f"{name}-{alone}"
            if alone:
                folder.mkdir()
                shutil.copy(saved / "config.json", folder)
            else:
                shutil.copytree(saved, folder)
            (folder / name).write_bytes(raw)
            torch.save({"weights": Payload(harm)}, folder / "training_args.bin")
            for load in (load_model, load_tokenizer):
                assert str(folder) in (refusal(load, folder) or str(folder))
    (tmp_path / "model.gguf").write_bytes(raw)
    for load in (load_model, load_tokenizer):
        with pytest.raises(ModelError, match=r"model\.gguf: not a GGUF file"):
            load(tmp_path / "model.gguf")
    assert not harm.exists()


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "..", "a/b"])
def test_an_index_does_not_reach_out_of_its_folder(name: str, tmp_path: Path) -> None:
    reference("llama3").save_pretrained(tmp_path, max_shard_size="300KB")
    index = tmp_path / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(raw))
    with pytest.raises(
        ModelError, match=r"index\.json: model\.norm\.weight must be in a file of the"
    ):
        load_model(tmp_path)
