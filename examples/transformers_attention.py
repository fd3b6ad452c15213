"""attn_implementation="fdattn": a model of transformers attends by our ops, without torch.compile.

    pip install 'transformers>=5.5'
    python examples/transformers_attention.py

For a real model: AutoModelForCausalLM.from_pretrained(path, attn_implementation="fdattn"). Here it is a tiny one of
random weights, with a padded batch, against transformers' own "eager" attention.
"""

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

import torch_fdattn


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch_fdattn.dropins.transformers.register()  # makes the name "fdattn" known to transformers
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device).eval()

    tokens = torch.randint(1, 256, (2, 12), device=device)
    valid = torch.ones_like(tokens)
    tokens[1, :5] = valid[1, :5] = 0  # the second prompt is shorter, padded on the left

    logits, texts = {}, {}
    for name in ("eager", "fdattn"):
        model.set_attn_implementation(name)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            logits[name] = model(tokens, attention_mask=valid).logits[valid.bool()]
            texts[name] = model.generate(
                tokens, attention_mask=valid, max_new_tokens=8, do_sample=False
            )
        counted = map(str, counter.get_flop_counts()["Global"])
        ours = sorted(op for op in counted if op.startswith("fdattn."))
        print(f"{name}: {', '.join(ours) or 'no op of fdattn'}")
    difference = (logits["eager"] - logits["fdattn"]).abs().max()
    print(f"logits, largest difference: {difference:.1e}")
    print(f"8 generated tokens a prompt are the same: {torch.equal(*texts.values())}")


if __name__ == "__main__":
    main()
