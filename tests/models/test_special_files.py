"""What is no regular file under a name of a model's folder is refused at once; what is too large, before it is read."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.models.hf_models import reference
from tests.models.test_hostile_files import MARGIN, address_space_limited
from torch_fdattn.models import ModelError, files, load_model, load_tokenizer
from torch_fdattn.models.gguf import GGUFFile

OF_MODELS = ("config.json", "model.safetensors", "model.safetensors.index.json")
OF_TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "generation_config.json", "config.json", "chat_template.jinja",
)  # fmt: skip
LOADS = [*((load_model, name) for name in OF_MODELS), *((load_tokenizer, x) for x in OF_TOKENIZERS)]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    reference("llama3").save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def bounded(model_folder, bpe_folder) -> Iterator[None]:
    """Who opens a pipe or reads a device's end fails, and does not wait."""

    def stop(*_):
        raise RuntimeError("opened a special file")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    try:
        with address_space_limited(MARGIN):
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _folder_of(load, model_folder: Path, bpe_folder: Path, path: Path) -> Path:
    return shutil.copytree(model_folder if load is load_model else bpe_folder, path)


def _named_pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path has at most 107 bytes
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


KINDS = [
    (_named_pipe, "a named pipe"),
    (_endless, "a device"),
    (Path.mkdir, "a folder"),
    (_socket, "a socket"),
]


@pytest.mark.parametrize(("make", "kind"), KINDS, ids=[kind for _, kind in KINDS])
@pytest.mark.parametrize(("load", "name"), LOADS, ids=[name for _, name in LOADS])
def test_special_files_are_refused(load, name, make, kind, model_folder, bpe_folder, tmp_path):
    folder = _folder_of(load, model_folder, bpe_folder, tmp_path / "model")
    if name == "tokenizer.model":
        (folder / "tokenizer.json").unlink()
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert str(caught.value) == f"{folder / name}: must be a regular file, got {kind}"


@pytest.mark.parametrize(("make", "kind"), KINDS, ids=[kind for _, kind in KINDS])
def test_a_shard_that_is_a_special_file_is_refused(make, kind, model_folder, tmp_path):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    make(folder / "b.safetensors")
    places = {"model.norm.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ModelError, match=rf"b\.safetensors: must be a regular file, got {kind}"):
        load_model(folder)


def test_a_gguf_file_that_is_a_special_file_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    os.mkfifo(path)
    for load in (load_model, load_tokenizer, GGUFFile):
        with pytest.raises(ModelError, match=r"model\.gguf: must be a regular file, got a named"):
            load(path)
    with pytest.raises(ModelError, match=r"other\.gguf: no such file"):
        GGUFFile(tmp_path / "other.gguf")


def test_links_to_files_are_followed(model_folder, bpe_folder, tmp_path):
    """As in Hugging Face's cache."""
    for load, source in ((load_model, model_folder), (load_tokenizer, bpe_folder)):
        folder = tmp_path / source.name
        folder.mkdir()
        for path in source.iterdir():
            (folder / path.name).symlink_to(path)
        load(folder)


def test_links_that_lead_nowhere(model_folder, bpe_folder, tmp_path):
    folder = shutil.copytree(bpe_folder, tmp_path / "model")
    (folder / "generation_config.json").symlink_to("nowhere")
    load_tokenizer(folder)  # as one that is not there
    (folder / "added_tokens.json").symlink_to("added_tokens.json")
    with pytest.raises(ModelError, match=r"added_tokens\.json: cannot be read \(Too many levels"):
        load_tokenizer(folder)


@pytest.mark.parametrize(("load", "name"), [x for x in LOADS if x[1] != "model.safetensors"])
def test_files_that_are_too_large_are_refused_by_their_size(
    load, name, model_folder, bpe_folder, tmp_path
):
    folder = _folder_of(load, model_folder, bpe_folder, tmp_path / "model")
    if name == "tokenizer.model":
        (folder / "tokenizer.json").unlink()
    limit = files.MAX_JSON_BYTES
    if name in ("tokenizer.json", "tokenizer.model"):
        limit = files.MAX_TOKENIZER_BYTES
    with open(folder / name, "ab") as file:
        file.truncate(2**33)  # of no blocks
    expected = rf"{name}: must have at most {limit} bytes, got {2**33}"
    with pytest.raises(ModelError, match=expected):
        load(folder)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_a_file_that_says_to_be_empty_is_not_read_on(tmp_path):
    assert files.read_file(Path("/proc/self/stat")) == b""


def test_a_file_at_its_limit_is_read(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert files.read_file(tmp_path / "a", 3) == b"abc"
    with pytest.raises(ModelError, match="must have at most 2 bytes, got 3"):
        files.read_file(tmp_path / "a", 2)
