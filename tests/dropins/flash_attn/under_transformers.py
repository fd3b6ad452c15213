"""A process in which transformers takes our `install()` for FlashAttention: what tiny models differ in from eager.

    python -m tests.dropins.flash_attn.under_transformers VERSION

On a machine without a GPU transformers refuses flash attention before it imports it; its question whether there is one is
answered yes here. All after that is its own code: availability by metadata, lazy imports, padding, packing, dropout.
"""

from __future__ import annotations

import json
import sys

import torch

import torch_fdattn
from torch_fdattn.ops.library import launches

LENGTH, PADDED, NEW = 12, 4, 5
SMALL = dict(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MODELS = {"Llama": {}, "Mistral": {"sliding_window": 6}}


def pretend_gpu() -> None:
    from transformers import utils
    from transformers.utils import import_utils

    for module in (utils, import_utils):
        module.is_torch_cuda_available = lambda: True


def pair(name: str, version: int):
    """The same weights under eager and under flash attention of this version."""
    import transformers

    made = []
    for attention in ("eager", f"flash_attention_{version}"):
        config = getattr(transformers, f"{name}Config")(
            **SMALL, **MODELS[name], attn_implementation=attention
        )
        made.append(getattr(transformers, f"{name}ForCausalLM")(config).eval())
    for parameter in made[0].parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    made[1].load_state_dict(made[0].state_dict())
    return made


def difference(name: str, version: int) -> dict:
    eager, flash = pair(name, version)
    ids = torch.randint(3, 64, (2, LENGTH))
    mask = torch.ones_like(ids)
    mask[0, :PADDED] = 0
    result = {}
    # Two packed sequences: transformers hands on their longest length as a tensor.
    places = torch.cat((torch.arange(PADDED), torch.arange(LENGTH - PADDED)))[None]
    packed = {"input_ids": ids[:1], "position_ids": places, "use_cache": False}
    padded = {"input_ids": ids, "attention_mask": mask}
    for kind, given in (("plain", {"input_ids": ids}), ("padded", padded), ("packed", packed)):
        launches.clear()
        seen = mask.bool() if kind == "padded" else slice(None)
        logits = [model(**given).logits[seen] for model in (eager, flash)]
        gradients = [
            torch.autograd.grad(x.square().mean(), list(m.parameters()), allow_unused=True)
            for x, m in zip(logits, (eager, flash), strict=True)
        ]
        pairs = [(a, b) for a, b in zip(*gradients, strict=True) if a is not None]
        result[kind] = {
            "logits": (logits[0] - logits[1]).abs().max().item() / logits[0].abs().max().item(),
            "gradients": max(((a - b).norm() / a.norm()).item() for a, b in pairs),
            "launches": dict(launches),
        }
    launches.clear()
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    text = [model.generate(ids, attention_mask=mask, **options) for model in (eager, flash)]
    result["generated"] = {"equal": torch.equal(*text), "launches": dict(launches)}
    return result


if __name__ == "__main__":
    torch.manual_seed(0)
    torch_fdattn.dropins.flash_attn.install()
    pretend_gpu()
    print(json.dumps({name: difference(name, int(sys.argv[1])) for name in MODELS}))
