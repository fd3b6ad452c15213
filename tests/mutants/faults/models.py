"""Faults in model families: what one family does otherwise, done as the others do."""

from __future__ import annotations

from tests.mutants.faults.fault import Fault
from tests.mutants.faults.runs import FAMILIES, HF_CONFIG, HOSTILE

_MODELS = "torch_fdattn/models"
_CACHES = "torch_fdattn/dist/kv_cache"

FAULTS = (
    Fault(
        "a window of one token more", f"{_MODELS}/config.py",
        "-1 if window is None else window - 1", "-1 if window is None else window", FAMILIES,
    ),
    Fault(
        "a layer's options left out of ragged steps", f"{_CACHES}/batch_cache.py",
        "return self._cache._attend(layer, q, self._ends, max(self._cache.held), **options)",
        "return self._cache._attend(layer, q, self._ends, max(self._cache.held))", FAMILIES,
    ),
    Fault(
        "a softcap left out", f"{_CACHES}/mask_options.py",
        'given["softcap"] = self.softcap', "pass", FAMILIES,
    ),
    Fault(
        "all layers by one rope", f"{_MODELS}/inference.py",
        "turns = angles[self.rope_indices[i]]", "turns = angles[0]", FAMILIES,
    ),
    Fault(
        "norms by weight alone", f"{_MODELS}/norms.py",
        "weight = 1 + self.weight.to(wide)", "weight = self.weight.to(wide)", FAMILIES,
    ),
    Fault(
        "logits without their softcap", f"{_MODELS}/transformer.py",
        "return cap * torch.tanh(logits / cap) if cap else logits", "return logits", FAMILIES,
    ),
    Fault(
        "SiLU in a fused GeGLU", f"{_MODELS}/inference.py",
        "glu_linear(x, merged.weight, merged.bias, self.activation)",
        'glu_linear(x, merged.weight, merged.bias, "silu")', FAMILIES,
    ),
    Fault(
        "GGUF's norms with 1 added twice", f"{_MODELS}/gguf.py",
        "tensor = tensor - 1  # the converter adds it", "pass", FAMILIES,
    ),
    Fault(
        "a scaling of rope in the layers with a window", f"{_MODELS}/gguf.py",
        'local = RopeConfig(field("rope.freq_base_swa", 10000.0))', 'field("rope.freq_base_swa", 10000.0)', FAMILIES,
    ),
    Fault(
        "the other layers without positions", f"{_MODELS}/hf_config.py",
        "return tuple(bool(x) for x in given[:count])", "return tuple(not x for x in given[:count])", HF_CONFIG,
    ),
    Fault(
        "windows that are not switched on", f"{_MODELS}/hf_config.py",
        'if switch and not self.raw.get("use_sliding_window"):', "if False:", HF_CONFIG,
    ),
    Fault(
        "an index that reaches out of its folder", f"{_MODELS}/loading.py",
        'if Path(name).name != name or name == "..":', "if False:", HOSTILE,
    ),
    Fault(
        "as many layers as a file says", f"{_MODELS}/hf_config.py",
        'expect_layer_count(count := self.raw["num_hidden_layers"])', 'count = self.raw["num_hidden_layers"]', HF_CONFIG,
    ),
)  # fmt: skip
