"""Models in GGUF files (llama.cpp's format, versions 2 and 3): header, configuration and weights.

The header is parsed here, the blocks of quantised weights by the package `gguf`. Its own GGUFReader
keeps an array per metadata value, which takes 2 s and more for a vocabulary, and does not say where a
truncated file ends. Limits: little-endian, one file, the families that have a name in GGUF (families.py).
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import re
import reprlib
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_fdattn.models.config import LayerConfig, ModelConfig, RopeConfig, expect_layer_count
from torch_fdattn.models.errors import MALFORMED, ModelError, reading, require
from torch_fdattn.models.families import FAMILIES, GGUF_FAMILIES
from torch_fdattn.models.files import has_file
from torch_fdattn.models.gguf_keys import check_gguf_keys

_REQUIRED: Any = object()
_STRING, _ARRAY = 8, 9
# fmt: off
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# fmt: on

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: The norms around the MLP, of families that norm what is added too, and of the others.
_POST_NORM_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORM_NAMES = {"ffn_norm": "post_attention_layernorm"}
_TOP_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_ROPE_DIVISORS = "rope_freqs.weight"


class TensorInfo(NamedTuple):
    shape: tuple[int, ...]  # as torch has it: outermost first
    kind: int  # GGMLQuantizationType
    offset: int  # from the start of the file


class _Cursor:
    """Reads little-endian values one after another; struct.error where the file ends too soon."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def many(self, code: str, count: int) -> tuple:
        layout = struct.Struct(f"<{count}{code}")
        if self.at + layout.size > len(self.data):  # before struct would build a huge tuple
            raise struct.error("end of file")
        values = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return values

    def one(self, code: str) -> Any:
        return self.many(code, 1)[0]

    def text(self) -> str | bytes:
        """Bytes where they are not UTF-8: most strings of a file say whose it is, and are not needed."""
        raw = self.many("s", self.one("Q"))[0]
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return raw

    def name(self) -> str:
        text = self.text()
        return text if isinstance(text, str) else text.decode("utf-8", "backslashreplace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            item, count = self.one("I"), self.one("Q")
            if item in _SCALARS:
                return self.many(_SCALARS[item], count)
            return tuple(self.value(item) for _ in range(count))
        return self.one(_SCALARS[kind])


class GGUFFile:
    """An open GGUF file: `fields` (metadata by key) and `tensors` (TensorInfo by GGUF name)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fields: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        if not has_file(path):
            raise ModelError(f"{path}: no such file")
        try:
            with open(path, "rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise ModelError(f"{path}: cannot be read ({error})") from None
        try:
            self._parse(_Cursor(self._data))
        except ModelError:
            raise
        except MALFORMED:
            raise ModelError(f"{path}: truncated or corrupt GGUF file (in its header)") from None

    def _parse(self, cursor: _Cursor) -> None:
        if (magic := cursor.many("s", 4)[0]) != b"GGUF":
            raise ModelError(f"{self.path}: not a GGUF file (starts with {magic!r})")
        if (version := cursor.one("I")) not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version must be 2 or 3, got {version}")
        tensor_count, field_count = cursor.many("Q", 2)
        for _ in range(field_count):
            key = cursor.name()
            self.fields[key] = cursor.value(cursor.one("I"))
        infos = []
        for _ in range(tensor_count):
            name, dims = cursor.name(), cursor.one("I")
            if not 1 <= dims <= 4:
                raise struct.error(f"{dims} dimensions")
            infos.append((name, cursor.many("Q", dims)[::-1], cursor.one("I"), cursor.one("Q")))
        alignment = self.fields.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ModelError(f"{self.path}: general.alignment must be positive, got {alignment!r}")
        start = -(-cursor.at // alignment) * alignment
        self.tensors = {name: TensorInfo(s, kind, start + at) for name, s, kind, at in infos}

    def field(self, key: str, default: Any = _REQUIRED) -> Any:
        """A metadata value; without a default, its absence is an error."""
        value = self.fields.get(key, default)
        if value is _REQUIRED:
            raise ModelError(f"{self.path}: metadata field {key} is missing")
        if isinstance(value, bytes):
            raise ModelError(
                f"{self.path}: metadata field {key} must be UTF-8 text, got {reprlib.repr(value)}: "
                "write the file anew with llama.cpp's converter"
            )
        return value

    def read(self, name: str) -> Tensor:
        """One tensor by its GGUF name, dequantised to fp32."""
        gguf = require("gguf", "Reading a GGUF file")
        np = require("numpy", "Reading a GGUF file")
        info = self.tensors[name]
        try:
            kind = gguf.GGMLQuantizationType(info.kind)
        except ValueError:
            raise ModelError(
                f"{self.path}: tensor {name} has unknown quantisation type {info.kind}"
            ) from None
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if info.shape[-1] % block:
            raise ModelError(
                f"{self.path}: tensor {name} must have rows of a multiple of {block} elements "
                f"({kind.name}), got shape {info.shape}"
            )
        row_bytes = info.shape[-1] // block * block_bytes
        rows = math.prod(info.shape[:-1])
        if (end := info.offset + rows * row_bytes) > len(self._data):
            raise ModelError(
                f"{self.path}: truncated GGUF file: tensor {name} ends at byte {end}, the file has "
                f"{len(self._data)}"
            )
        raw = np.frombuffer(self._data, np.uint8, rows * row_bytes, info.offset)
        try:
            values = gguf.dequantize(raw.reshape(rows, row_bytes), kind)
        except NotImplementedError:
            raise ModelError(
                f"{self.path}: tensor {name} has type {kind.name}, which the package gguf cannot "
                "dequantise"
            ) from None
        if not values.flags.writeable:  # fp32 is not converted: a view of the file
            values = values.copy()
        return torch.from_numpy(values).reshape(info.shape)


def gguf_config(file: GGUFFile) -> ModelConfig:
    """The model's configuration, from the metadata and the names of the tensors."""
    with reading(file.path):
        return _config(file)


def _config(file: GGUFFile) -> ModelConfig:
    prefix = file.field("general.architecture")
    if prefix not in GGUF_FAMILIES:
        raise ModelError(
            f"architecture must be one of {', '.join(GGUF_FAMILIES)}, got {reprlib.repr(prefix)}"
        )
    architecture = GGUF_FAMILIES[prefix]
    if file.field("split.count", 1) > 1:
        raise ModelError(f"{file.path}: one of several GGUF parts; join them: gguf-split --merge")
    if file.field(f"{prefix}.expert_count", 0):
        raise ModelError(f"{file.path}: mixture-of-experts models are not supported")

    def field(key: str, default: Any = _REQUIRED) -> Any:
        return file.field(f"{prefix}.{key}", default)

    if (embedding := file.tensors.get("token_embd.weight")) is None:
        raise ModelError("tensor token_embd.weight is missing")
    heads, hidden = field("attention.head_count"), field("embedding_length")
    head_dim = field("attention.key_length", hidden // heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if (size := field(key, head_dim)) != head_dim:
            raise ModelError(f"{prefix}.{key} must be the head size {head_dim}, got {size}")
    num_layers, rope = field("block_count"), _rope(file, field, head_dim)
    expect_layer_count(num_layers)
    is_gemma = architecture.startswith("gemma")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=field("feed_forward_length"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=field("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_positions=field("context_length"),
        norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope=rope,
        tie_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_output.bias" in file.tensors
        or ("blk.0.attn_q.bias" in file.tensors and not FAMILIES[architecture].qkv_bias),
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        layers=_layers(architecture, field, num_layers, rope),
        softcap=field("attn_logit_softcapping") if architecture == "gemma2" else 0.0,
        logit_softcap=field("final_logit_softcapping", _REQUIRED if architecture == "gemma2" else 0.0)
        if is_gemma
        else 0.0,
        attention_scale=_gemma_scale(num_layers, hidden, heads, head_dim) if is_gemma else None,
    )  # fmt: skip
    check_gguf_keys(prefix, file.fields)
    return config


def _gemma_scale(num_layers: int, hidden: int, heads: int, head_dim: int) -> float:
    """No field has it: llama.cpp knows Gemma 2 and 3 of 27B by their layers, whose scale is not the head size's."""
    return (hidden / heads if num_layers in (46, 62) else head_dim) ** -0.5


def _layers(
    architecture: str, field: Callable[..., Any], count: int, rope: RopeConfig
) -> tuple[LayerConfig, ...]:
    """`ModelConfig.layers`, of which files say the window and seldom more: the rest is llama.cpp's for the family."""
    if architecture == "smollm3":  # every fourth layer has no positions
        kinds = LayerConfig(None, rope), LayerConfig(None, RopeConfig(kind="none"))
        return tuple(kinds[(i + 1) % 4 == 0] for i in range(count))
    if not architecture.startswith("gemma"):
        return ()
    default = FAMILIES[architecture].defaults["sliding_window_pattern"]
    pattern = field("attention.sliding_window_pattern", default)
    if type(pattern) is int and pattern > 0:
        pattern = tuple((i + 1) % pattern != 0 for i in range(count))
    elif not isinstance(pattern, tuple) or len(pattern) != count:
        raise ModelError(
            f"attention.sliding_window_pattern must be a positive integer or {count} booleans, got "
            f"{reprlib.repr(pattern)}"
        )
    local = rope
    if architecture == "gemma3_text":  # a scaling is of the layers that see everything
        local = RopeConfig(field("rope.freq_base_swa", 10000.0))
    sliding = LayerConfig(field("attention.sliding_window"), local)
    return tuple(sliding if windowed else LayerConfig(None, rope) for windowed in pattern)


def _rope(file: GGUFFile, field: Callable[..., Any], head_dim: int) -> RopeConfig:
    theta = field("rope.freq_base", 10000.0)
    # A factor without a type is linear scaling, as is the key of older files; 0 stands for none.
    kind = field("rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise ModelError(f"rope scaling type must be none or linear, got {kind!r}")
    factor = field("rope.scaling.factor", field("rope.scale_linear", 1.0)) or 1.0
    if kind == "none":
        factor = 1.0
    if _ROPE_DIVISORS not in file.tensors:
        return RopeConfig(theta, "linear", factor) if factor != 1 else RopeConfig(theta)
    if (shape := file.tensors[_ROPE_DIVISORS].shape) != (head_dim // 2,):
        raise ModelError(f"tensor {_ROPE_DIVISORS} must have shape ({head_dim // 2},), got {shape}")
    divisors = file.read(_ROPE_DIVISORS) * factor
    return RopeConfig(theta, "divisors", divisors=tuple(divisors.tolist()))


class GGUFWeights:
    """The weights of a GGUF file under the names and in the row order that transformer.py has."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.file, self.config = file, config
        names = {**_LAYER_NAMES, **(_POST_NORM_NAMES if config.family.post_norms else _NORM_NAMES)}
        self._names = {
            _hf_name(name, names): name for name in file.tensors if name != _ROPE_DIVISORS
        }
        self.shapes = {name: file.tensors[theirs].shape for name, theirs in self._names.items()}

    def where(self, name: str) -> str:
        return f"{self.file.path}: tensor {self._names.get(name, name)}"

    def read(self, name: str) -> Tensor:
        tensor = self.file.read(self._names[name])
        # llama.cpp rotates neighbouring elements of these families' heads, and its converter interleaves the
        # two halves of each head's rows to suit. The others' files keep the half-split order.
        if self.config.family.gguf_interleaved and re.search(r"self_attn\.[qk]_proj", name):
            heads = tensor.shape[0] // self.config.head_dim
            tensor = tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        if self.config.family.norm_offset and name.endswith("norm.weight"):
            tensor = tensor - 1  # the converter adds it
        return tensor


def _hf_name(name: str, of_layers: Mapping[str, str]) -> str:
    """blk.3.attn_q.weight -> layers.3.self_attn.q_proj.weight; unknown names stay as they are."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        return f"layers.{layer}.{of_layers[part]}.{kind}" if part in of_layers else name
    stem, _, kind = name.rpartition(".")
    return f"{_TOP_NAMES[stem]}.{kind}" if stem in _TOP_NAMES else name
