"""Decode over a paged KV cache: append the new token's K and V, then attend over the pages.

    python examples/paged_decode.py

Pages of any size, the layout of vLLM and FlashInfer (tokens, then heads) or any other strides. Lengths and page
tables stay on the device: a step needs no synchronisation and can be captured in a CUDA graph.
"""

import torch
import torch.nn.functional as F

import torch_fdattn

BATCH, HEADS, KV_HEADS, DIM = 2, 8, 2, 64
PAGE, PAGES_A_SEQUENCE = 16, 4


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)

    # K and V in one piece of memory: (2, pages, tokens a page, KV heads, head dim). The ops want views
    # (pages, KV heads, tokens a page, head dim).
    pages = torch.zeros(2, BATCH * PAGES_A_SEQUENCE, PAGE, KV_HEADS, DIM, device=device)
    k_pages, v_pages = pages.transpose(2, 3)
    # Which pages a sequence has, in order: whoever serves the sequences hands them out.
    table = torch.randperm(BATCH * PAGES_A_SEQUENCE, device=device, dtype=torch.int32)
    table = table.view(BATCH, PAGES_A_SEQUENCE)

    # Prompts of 40 and 17 tokens: what comes behind new_lens is padding.
    lens = torch.zeros(BATCH, dtype=torch.int32, device=device)
    new_lens = torch.tensor([40, 17], dtype=torch.int32, device=device)
    k, v = torch.randn(2, BATCH, KV_HEADS, 40, DIM, device=device)
    torch_fdattn.paged_append_kv(k_pages, v_pages, table, k, v, lens, new_lens)
    lens += new_lens

    whole = [[(k[b, :, :n], v[b, :, :n])] for b, n in enumerate(new_lens.tolist())]  # to compare
    for step in range(10):
        q = torch.randn(BATCH, HEADS, 1, DIM, device=device)
        k, v = torch.randn(2, BATCH, KV_HEADS, 1, DIM, device=device)
        torch_fdattn.paged_append_kv(k_pages, v_pages, table, k, v, lens)
        lens += 1
        out, _ = torch_fdattn.paged_decode(q, k_pages, v_pages, table, lens)  # and the log-sum-exp

        worst = 0.0
        for b in range(BATCH):
            whole[b].append((k[b], v[b]))
            keys, values = (torch.cat(x, 1) for x in zip(*whole[b], strict=True))
            expected = F.scaled_dot_product_attention(q[b], keys, values, enable_gqa=True)
            worst = max(worst, (out[b] - expected).abs().max().item())
        if step in (0, 9):
            print(
                f"step {step}: lengths {lens.tolist()}, largest difference from SDPA: {worst:.1e}"
            )


if __name__ == "__main__":
    main()
