"""Fine-tuning a transformers model with its Trainer on packed documents, each batch split over the processes.

    torchrun --nproc-per-node 2 examples/train_packed_documents.py

A batch is one row of documents, one after the other, that all ranks collate alike. `SequenceShards.balanced` gives each rank
as much to do, wherever documents begin; one may lie on several ranks. The model stays as it is but for its attention.
"""

import copy
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.utils.data import DataLoader

import torch_fdattn
from torch_fdattn.dist import SequenceShards, context_parallel, shard_batch

VOCAB, RATE = 50, 0.1


def shifted(labels: torch.Tensor) -> torch.Tensor:
    """Before the batch is split: the next token may be another rank's. The first of a document, -100, is nobody's next."""
    return F.pad(labels, (0, 1), value=-100)[:, 1:]


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


class PackedTrainer(transformers.Trainer):
    def get_train_dataloader(self):
        """Trainer's own gives each rank other documents."""
        return DataLoader(self.train_dataset, self.args.train_batch_size, collate_fn=self.data_collator)  # fmt: skip

    def compute_loss(self, model, inputs, **_):
        ranks, begins, labels = self.args.world_size, inputs["cu_seq_lens_q"], shifted(inputs["labels"])  # fmt: skip
        shards = SequenceShards.balanced(labels.shape[1], ranks, cu_seqlens=begins)
        tokens, positions, own_labels = shard_batch(None, shards, inputs["input_ids"], inputs["position_ids"], labels)  # fmt: skip
        with context_parallel(None, shards=shards, cu_seqlens=begins):
            logits = model(tokens, position_ids=positions, use_cache=False).logits
        loss = summed_loss(logits, own_labels) / (labels != -100).sum()
        return loss * ranks  # DistributedDataParallel takes the mean of the ranks' gradients


def main() -> None:
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise SystemExit(__doc__)  # not started by torchrun
    torch_fdattn.dropins.transformers.register()
    cuda = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    torch.manual_seed(0)  # the same model and documents on all ranks
    config = transformers.MistralConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8, sliding_window=12,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config)
    alone = copy.deepcopy(model)  # to compare with: all tokens on each rank
    model.set_attn_implementation("fdattn")
    alone.set_attn_implementation("eager")
    lengths, batch_size, steps = (17, 30, 5, 9, 40, 3), 3, 4  # two epochs
    documents = [{"input_ids": torch.randint(VOCAB, (length,)).tolist()} for length in lengths]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=batch_size, max_steps=steps, learning_rate=RATE, optim="sgd",
            lr_scheduler_type="constant", max_grad_norm=0, logging_steps=1, report_to="none", save_strategy="no",
            disable_tqdm=True, remove_unused_columns=False, ddp_find_unused_parameters=False, use_cpu=not cuda,
        )  # fmt: skip
        trainer = PackedTrainer(model, arguments, collate, train_dataset=documents)
        trainer.train()
    losses = [float(x["loss"]) for x in trainer.state.log_history if "loss" in x]
    alone.to(arguments.device)
    optimizer = torch.optim.SGD(alone.parameters(), lr=RATE)
    for step, loss in enumerate(losses):
        batch = collate((2 * documents)[step * batch_size : (step + 1) * batch_size])
        tokens, positions, labels = (batch[x].to(arguments.device) for x in ("input_ids", "position_ids", "labels"))  # fmt: skip
        logits = alone(tokens, position_ids=positions, use_cache=False).logits
        expected = summed_loss(logits, shifted(labels)) / (shifted(labels) != -100).sum()
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        if arguments.process_index == 0:
            print(f"step {step}: loss {loss:.4f} on {arguments.world_size} ranks, {expected:.4f} on one")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
