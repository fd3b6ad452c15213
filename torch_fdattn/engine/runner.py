"""Runs a scheduled step on the device: inputs, the model's forward over pages, sampling, results.

Everything is queued; nothing waits for the device. `LaunchedStep.read` waits, a step later.

    update rows → positions, page tables, slots → forward → logits of the rows asked for → sample → rows → copy to host

A step is one pass of the model, decodes first. In batch-invariant mode it is one pass of all decodes, padded to
`max_num_seqs`, and one for each chunk of a prompt, so that no shape depends on what else is in the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_fdattn.engine.decode_graphs import DecodeGraphs
from torch_fdattn.engine.logprobs import TokenLogprobs, logprobs_of
from torch_fdattn.engine.paged_step import Decodes, PagedKV, PagedStep, Prefills
from torch_fdattn.engine.sampler import Constraints, SampleNeeds, sample
from torch_fdattn.engine.scheduler import Chunk, ScheduledStep
from torch_fdattn.engine.sequence_rows import SequenceRows, to_device
from torch_fdattn.models import InferenceTransformer, Transformer


class Logits(NamedTuple):
    """What a pass gives."""

    last: Tensor  # (n, vocab) of the chunks that sample, in the step's order
    prompts: list[
        tuple[Chunk, Tensor]
    ]  # chunks that ask for their prompt's log-probabilities, and (tokens, vocab)


class LaunchedStep(NamedTuple):
    """A step on its way. Of the tensors, which copies to the host may still fill, `read` is the only reader."""

    samples: list[Chunk]
    tokens: Tensor
    logprobs: TokenLogprobs | None  # of the chunks `with_logprobs`
    with_logprobs: list[int]  # numbers of samples
    prompt_logprobs: list[tuple[Chunk, TokenLogprobs]]
    event: torch.cuda.Event | None

    def read(self) -> list[int]:
        """The drawn tokens; from then on the other tensors can be read too."""
        if self.event is not None:
            self.event.synchronize()
        return self.tokens.tolist()


class ModelRunner:
    """A model over paged K and V, and the rows of its sequences.

    Args:
        model: as `LLM`'s, in the form that runs.
        kv, rows: its pages and rows.
        max_num_seqs: decodes that a step can have.
        cuda_graph: whether passes of decodes alone are captured (`decode_graphs.py`).
        group: ranks that share the model: the first one's tokens are taken.
        batch_invariant: see above.

    Attributes:
        passes: of the model so far.
        replays_graphs: False: captured passes run eagerly, as a trace asks it.
        is_parallel: whether several ranks share the model.
    """

    def __init__(
        self, model: Transformer | InferenceTransformer, kv: PagedKV, rows: SequenceRows, max_num_seqs: int, *,
        cuda_graph: bool, group: dist.ProcessGroup | None, batch_invariant: bool,
    ) -> None:  # fmt: skip
        self.model, self.rows, self.passes = model, rows, 0
        self.replays_graphs, self.is_parallel = True, group is not None
        self._kv, self._group, self._device = kv, group, rows.device
        self._max_num_seqs, self._batch_invariant = max_num_seqs, batch_invariant
        self._graphs = None
        if cuda_graph:
            smallest = max_num_seqs if batch_invariant else 1
            self._graphs = DecodeGraphs(self._decode, rows, max_num_seqs, smallest)

    @torch.inference_mode()
    def launch(self, step: ScheduledStep, constraints: Constraints) -> LaunchedStep:
        """Queues the step. constraints: by the numbers of its chunks that sample, decodes first."""
        self.rows.update(step)
        logits = self._forward(step)
        samples = [chunk for chunk in (*step.decodes, *step.prefills) if chunk.samples]
        tokens, found, numbers = self._sample(samples, logits.last, constraints)
        prompts = [(chunk, self._prompt_logprobs(chunk, own)) for chunk, own in logits.prompts]
        event = None
        tokens, found = _to_host(tokens), None if found is None else _all_to_host(found)
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return LaunchedStep(samples, tokens, found, numbers, prompts, event)

    def _sample(
        self, samples: list[Chunk], logits: Tensor, constraints: Constraints
    ) -> tuple[Tensor, TokenLogprobs | None, list[int]]:
        if not samples:
            return torch.empty(0, dtype=torch.int64), None, []
        params = [chunk.sequence.params for chunk in samples]
        ends = [chunk.end for chunk in samples]
        row_ids, lengths = to_device([[chunk.row for chunk in samples], ends], self._device)
        needs = SampleNeeds.of(params, ends)
        tokens = sample(logits, self.rows, row_ids, lengths, needs, constraints)
        if self._group is not None:
            dist.broadcast(tokens, group=self._group, group_src=0)
        self.rows.tokens[row_ids, lengths] = tokens.clamp(min=0)
        numbers = [i for i, x in enumerate(params) if x.logprobs is not None]
        if not numbers:
            return tokens, None, []
        (at,) = to_device([numbers], self._device)
        count = max(params[i].logprobs for i in numbers)
        return tokens, logprobs_of(logits[at], tokens[at], count), numbers

    def _prompt_logprobs(self, chunk: Chunk, logits: Tensor) -> TokenLogprobs:
        """Of the tokens that follow those of the chunk, as far as they are the prompt's."""
        end = min(chunk.end, chunk.sequence.prompt_length - 1)
        following = self.rows.tokens[chunk.row, chunk.start + 1 : end + 1]
        count = chunk.sequence.params.prompt_logprobs
        return _all_to_host(logprobs_of(logits[: len(following)], following, count))

    def _forward(self, step: ScheduledStep) -> Logits:
        decodes, prefills = step.decodes, step.prefills
        if self._batch_invariant:
            passes = [self._pass([], [chunk]) for chunk in prefills]
            if decodes:
                passes.insert(0, self._pass(decodes, []))
            last = torch.cat([x.last for x in passes])
            return Logits(last, [pair for x in passes for pair in x.prompts])
        return self._pass(decodes, prefills)

    def _pass(self, decodes: list[Chunk], prefills: list[Chunk]) -> Logits:
        if decodes and not prefills and not any(map(_asks_for_prompt, decodes)):
            return Logits(self._decodes_alone(decodes), [])
        chunks = [*decodes, *prefills]
        tokens, step = self._inputs(decodes, prefills)
        self.passes += 1
        hidden = self.model.hidden(tokens[:, None], step)[:, 0]
        begin, lasts, prompts = 0, [], []
        for chunk in chunks:
            end = begin + chunk.count
            if _asks_for_prompt(chunk):
                prompts.append((chunk, self.model.logits(hidden[begin:end])))
            if chunk.samples:
                lasts.append(end - 1)
            begin = end
        (lasts,) = to_device([lasts], self._device)
        return Logits(self.model.logits(hidden[lasts]), prompts)

    def _decodes_alone(self, decodes: list[Chunk]) -> Tensor:
        """Logits (n, vocab) of decodes that sample."""
        rows, starts = [x.row for x in decodes], [x.start for x in decodes]
        padding = self._max_num_seqs - len(rows) if self._batch_invariant else 0
        rows += [self.rows.padding_row] * padding
        starts += [0] * padding
        self.passes += 1
        row_ids, positions = to_device([rows, starts], self._device)
        if self._graphs is not None and self.replays_graphs:
            logits = self._graphs(row_ids, positions)
        else:
            # Of one width always where sums over masked keys must not depend on others.
            width = None if self._batch_invariant else self._table_width(decodes)
            logits = self._decode(row_ids, positions, width)
        sampling = [i for i, chunk in enumerate(decodes) if chunk.samples]
        if len(sampling) == len(decodes):
            return logits[: len(decodes)]
        return logits[to_device([sampling], self._device)[0]]

    def _decode(self, row_ids: Tensor, positions: Tensor, table_width: int | None = None) -> Tensor:
        """Logits (B, vocab) after the tokens at these positions of these rows; nothing here depends on values on the host.

        table_width: pages that any of the sequences has; None: all that it can have.
        """
        table = self.rows.pages[row_ids, :table_width]
        decodes = Decodes(table, (positions + 1).int())
        pages = table.gather(1, (positions // self._kv.page_size)[:, None])[:, 0]
        step = PagedStep(self._kv, positions, pages, decodes, None, self._batch_invariant)
        tokens = self.rows.tokens[row_ids, positions]
        return self.model.logits(self.model.hidden(tokens[:, None], step)[:, 0])

    def _inputs(self, decodes: list[Chunk], prefills: list[Chunk]) -> tuple[Tensor, PagedStep]:
        """Token ids (T,) of decodes and chunks, and the step over their pages."""
        chunks, split = [*decodes, *prefills], len(decodes)
        total = sum(chunk.count for chunk in chunks)
        numbers = [(chunk.row, chunk.start, chunk.count) for chunk in chunks]
        rows, starts, counts = to_device(
            [list(x) for x in zip(*numbers, strict=True)], self._device
        )
        sequence = torch.arange(len(chunks), device=self._device)
        sequence = sequence.repeat_interleave(counts, output_size=total)
        ends = counts.cumsum(0)
        index = torch.arange(total, device=self._device)
        positions = starts[sequence] + index - (ends - counts)[sequence]
        table = self.rows.pages[rows, : self._table_width(chunks)]
        pages = table[sequence, positions // self._kv.page_size]
        kv_lens = (starts + counts).int()
        by_decode = by_chunk = None
        if decodes:
            by_decode = Decodes(table[:split], kv_lens[:split])
        if prefills:
            cu_seqlens = torch.nn.functional.pad(counts[split:].cumsum(0), (1, 0)).int()
            by_chunk = Prefills(cu_seqlens, table[split:], kv_lens[split:])
        step = PagedStep(self._kv, positions, pages, by_decode, by_chunk, self._batch_invariant)
        return self.rows.tokens[rows[sequence], positions], step

    def _table_width(self, chunks: list[Chunk]) -> int:
        return max(len(chunk.sequence.pages) for chunk in chunks)


def _asks_for_prompt(chunk: Chunk) -> bool:
    sequence = chunk.sequence
    asks = sequence.index == 0 and sequence.params.prompt_logprobs is not None
    return asks and chunk.start < sequence.prompt_length - 1


def _to_host(x: Tensor) -> Tensor:
    """A copy that the host does not wait for."""
    if x.device.type == "cpu":
        return x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)


def _all_to_host(found: TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(*map(_to_host, found))
