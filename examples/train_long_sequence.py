"""Training with each sequence split over the ranks: ring attention, and the loss of one process.

    torchrun --nproc-per-node 2 examples/train_long_sequence.py

Inside `context_parallel` calls of scaled_dot_product_attention are ring attention over the group. All else in
the model works token by token, so it is given its tokens' positions.
"""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from torch_fdattn.dist import SequenceShards, context_parallel, shard_batch

TOKENS, VOCAB, WIDTH, HEADS = 64, 50, 64, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens, positions, labels):
        """The sum of the tokens' losses."""
        x = self.embed(tokens) + self.place(positions)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.head(x + attended.transpose(1, 2).flatten(2))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def main() -> None:
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise SystemExit(__doc__)  # not started by torchrun
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    group, ranks = dist.group.WORLD, dist.get_world_size()

    torch.manual_seed(0)  # the same model and batch on all ranks
    model = Model().to(device)
    alone = copy.deepcopy(model)  # to compare with: the whole sequence on each rank
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.5) for x in (model, alone)]
    data = torch.randint(VOCAB, (2, TOKENS + 1), device=device)
    positions = torch.arange(TOKENS, device=device).expand(2, TOKENS)
    batch = data[:, :-1], positions, data[:, 1:]  # labels are shifted before the batch is split

    # Zigzag: under a causal mask every rank has as much to do. Each rank keeps its part of the batch.
    shards = SequenceShards.zigzag(TOKENS, ranks)
    part = shard_batch(group, shards, *batch)

    for step in range(3):
        with context_parallel(group, shards=shards):
            loss = model(*part) / data[:, 1:].numel()
            loss.backward()  # the gradients of this rank's tokens; add up those of all ranks
        total = loss.detach().clone()
        for x in (total, *(parameter.grad for parameter in model.parameters())):
            dist.all_reduce(x)
        expected = alone(*batch) / data[:, 1:].numel()
        expected.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total:.5f} on {ranks} ranks, {expected:.5f} on one")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
