"""Tensor parallelism of a model of transformers: `parallelize(model, mesh)` splits it in place over the ranks.

    pip install 'transformers>=5.5'
    torchrun --nproc-per-node 2 examples/tensor_parallel.py

Every rank makes the same model (from_pretrained for a real one), and keeps its heads and its part of each MLP.
Afterwards the model is called as before, with the same input on all ranks.
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from torch_fdattn.models import parallelize


def main() -> None:
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise SystemExit(__doc__)  # not started by torchrun
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    tokens = torch.randint(256, (2, 16), device=device)

    def loss_and_gradient():
        model.zero_grad()
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return loss.item(), model.model.embed_tokens.weight.grad.clone()

    expected, whole = loss_and_gradient()
    parameters = sum(x.numel() for x in model.parameters())

    parallelize(model, mesh["tp"])  # strategy="ag_rs" for training with many tokens
    loss, gradient = loss_and_gradient()

    kept = sum(x.numel() for x in model.parameters()) / parameters
    difference = (gradient - whole).abs().max() / whole.abs().max()
    if dist.get_rank() == 0:
        print(f"loss {loss:.5f} on {mesh.size()} ranks, {expected:.5f} on one")
        print(f"gradient of the embedding, relative difference: {difference:.1e}")
        print(f"rank 0 holds {kept:.0%} of the parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
