"""Runs a scheduled step on the device: inputs, the model's forward over pages, sampling, results.

Everything is queued; nothing waits for the device. `LaunchedStep.read` waits, a step later.

    update rows → positions, page tables, slots → forward → logits of the rows asked for → sample → rows → copy to host

A step is one pass of the model, decodes first, or one of decodes and then one of chunks where both are captured. In
batch-invariant mode it is one pass for each chunk of a prompt, and then one of all decodes, padded to `max_num_seqs`, so that
no shape depends on what else is in the batch. Results are in the step's order, decodes first.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.dist.consensus import check_equal_on_all_ranks, equality_is_assumed
from torch_fdattn.dist.symm.faults import check
from torch_fdattn.engine.decode_graphs import DecodeGraphs
from torch_fdattn.engine.launched_step import LaunchedStep, all_to_host, to_host
from torch_fdattn.engine.logprobs import TokenLogprobs, logprobs_in_slices, logprobs_of
from torch_fdattn.engine.ngram_speculation import NgramSpeculation
from torch_fdattn.engine.paged_step import Decodes, PagedKV, PagedStep, Prefills
from torch_fdattn.engine.prompt_graphs import PromptGraphs
from torch_fdattn.engine.sampler import PLAIN, Constraints, SampleNeeds, sample
from torch_fdattn.engine.scheduler import Chunk, ScheduledStep, queries_of
from torch_fdattn.engine.sequence_rows import NO_PAGE, SequenceRows, to_device
from torch_fdattn.engine.stats import weight_bytes
from torch_fdattn.models import InferenceTransformer, Transformer


class Logits(NamedTuple):
    """What a pass gives."""

    drawn_from: Tensor  # (n, vocab) of all draws, in the step's order
    prompts: list[
        tuple[Chunk, Tensor]
    ]  # chunks that ask for their prompt's log-probabilities, and hidden states (tokens, hidden_size)
    draw: Callable[[], Tensor] | None = None  # what `PLAIN` draws from these, captured


class ModelRunner:
    """A model over paged K and V, and the rows of its sequences.

    Args:
        model: as `LLM`'s, in the form that runs.
        kv, rows: its pages and rows.
        max_num_seqs: decodes that a step can have.
        cuda_graph: whether passes of decodes alone are captured (`decode_graphs.py`).
        group: ranks that share the model, the cache or both: the first one's tokens are taken.
        batch_invariant: see above.
        prompt_graph_tokens: passes of prompts are captured up to so many tokens (`prompt_graphs.py`); 0: none.
        speculation: what proposals steps may have.

    Attributes:
        passes: of the model so far.
        replays_graphs: False: captured passes run eagerly, as a trace asks it.
        group, num_ranks, rank: of the group; None, 1 and 0 without one.
    """

    def __init__(
        self, model: Transformer | InferenceTransformer, kv: PagedKV, rows: SequenceRows, max_num_seqs: int, *,
        cuda_graph: bool, group: dist.ProcessGroup | None, batch_invariant: bool, prompt_graph_tokens: int = 0,
        speculation: NgramSpeculation | None = None,
    ) -> None:  # fmt: skip
        self.model, self.rows, self.passes = model, rows, 0
        self._weight_bytes = weight_bytes(model)
        self.replays_graphs = True
        self._kv, self.group, self._device = kv, group, rows.device
        self.num_ranks, self.rank = (1, 0) if group is None else (group.size(), group.rank())
        self._max_num_seqs, self._batch_invariant = max_num_seqs, batch_invariant
        self._graphs = self._speculative_graphs = None
        self._max_queries = 1 if speculation is None else 1 + speculation.max_tokens
        if cuda_graph:
            smallest = max_num_seqs if batch_invariant else 1
            draw = self._draw if group is None else None
            self._graphs = DecodeGraphs(self._decode, rows, max_num_seqs, smallest, draw)
        if cuda_graph and speculation is not None:
            decode = functools.partial(self._decode, queries=self._max_queries)
            largest = min(max_num_seqs, speculation.max_sequences)
            self._speculative_graphs = DecodeGraphs(decode, rows, largest, 1)
        self._prompt_graphs = None
        if prompt_graph_tokens:
            self._prompt_graphs = PromptGraphs(self._prompts, rows, prompt_graph_tokens)

    @torch.inference_mode()
    def launch(self, step: ScheduledStep, constraints: Constraints) -> LaunchedStep:
        """Queues the step. constraints: by the numbers of its draws, those of decodes first."""
        self.rows.update(step)
        logits = self._forward(step)
        samples = [chunk for chunk in (*step.decodes, *step.prefills) if chunk.samples]
        tokens, found, counts = self._sample(samples, logits, constraints)
        prompts = [(chunk, self._prompt_logprobs(chunk, own)) for chunk, own in logits.prompts]
        event = None
        tokens, found = to_host(tokens), None if found is None else all_to_host(found)
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return LaunchedStep(samples, tokens, found, counts, prompts, event)

    def compare_request(self, request_id: object, prompt: object, params: object) -> None:
        """Compares a request on all ranks: on CPUs, and with TORCH_FDATTN_CHECK=1; not one that rank 0 has sent to the others.

        Raises:
            ValueError: on every rank, naming what differs.
        """
        compares = self._device.type == "cpu" or checks.CHECK_VALUES
        if self.group is None or not compares or equality_is_assumed():
            return
        named = {"request_id": request_id, "the prompt": prompt, "the sampling parameters": params}
        hashes = {
            f"the hash of {name}": hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()
            for name, value in named.items()
        }
        check_equal_on_all_ranks(self.group.group_name, self.rows.tokens, hashes)

    @property
    def kv_bytes(self) -> int:
        """Of all pages on this rank."""
        return self._kv.nbytes

    def bytes_read(self, tokens: int) -> int:
        """By a pass of one sequence that has stored so many tokens, on this rank: weights and cache."""
        return self._weight_bytes + self._kv.bytes_of(tokens)

    def close(self) -> None:
        """Lets go of the captured graphs; passes then run eagerly."""
        self._graphs = self._speculative_graphs = self._prompt_graphs = None

    def raise_faults(self) -> None:
        """Raises PeerTimeout where a rank that shares the cache did not come to a step that has been read."""
        if self._kv.waits_in:
            check(*self._kv.waits_in, synchronize=False)

    def _sample(
        self, samples: list[Chunk], found: Logits, constraints: Constraints
    ) -> tuple[Tensor, TokenLogprobs | None, dict[int, int]]:
        if not samples:
            return torch.empty(0, dtype=torch.int64), None, {}
        draws = [(chunk, position) for chunk in samples for position in chunk.draw_positions]
        params = [chunk.sequence.params for chunk, _ in draws]
        positions = [position for _, position in draws]
        logits = found.drawn_from
        needs = SampleNeeds.of(params, positions)
        if found.draw is not None and needs.is_plain and constraints.is_empty:
            tokens = found.draw()[: len(draws)]  # of a batch that is padded there are more
        else:
            numbers = [[chunk.row for chunk, _ in draws], positions]
            row_ids, lengths = to_device(numbers, self._device)
            tokens = sample(logits, self.rows, row_ids, lengths, needs, constraints)
            if self.group is not None:
                dist.broadcast(tokens, group=self.group, group_src=0)
            self.rows.tokens[row_ids, lengths] = tokens.clamp(min=0)
        counts = {i: x.logprobs for i, x in enumerate(params) if x.logprobs is not None}
        if not counts:
            return tokens, None, {}
        (at,) = to_device([list(counts)], self._device)
        return tokens, logprobs_of(logits[at], tokens[at], max(counts.values())), counts

    def _prompt_logprobs(self, chunk: Chunk, hidden: Tensor) -> TokenLogprobs:
        """Of the tokens that follow those of the chunk, as far as they are the prompt's."""
        end = min(chunk.end, chunk.sequence.prompt_length - 1)
        following = self.rows.tokens[chunk.row, chunk.start + 1 : end + 1]
        count = chunk.sequence.params.prompt_logprobs
        return all_to_host(logprobs_in_slices(self.model.logits, hidden, following, count))

    def _forward(self, step: ScheduledStep) -> Logits:
        decodes, prefills = step.decodes, step.prefills
        if self._batch_invariant:
            # Decodes run last: the first token behind a prompt may see pages that a chunk of this step stores.
            passes = [self._pass([], [chunk]) for chunk in prefills]
            if decodes:
                passes.insert(0, self._pass(decodes, []))
        elif self._is_captured_in_parts(step):
            # Decodes run first: chunks may see pages that these fill.
            passes = [self._pass(decodes, []), self._pass([], prefills)]
        else:
            return self._pass(decodes, prefills)
        if len(passes) == 1:
            return passes[0]
        drawn_from = torch.cat([x.drawn_from for x in passes])
        return Logits(drawn_from, [pair for x in passes for pair in x.prompts])

    def _is_captured_in_parts(self, step: ScheduledStep) -> bool:
        """Whether the step is two passes, of its decodes and of its prefills, each captured: the host is not waited for."""
        # A sequence that joins with one token to compute is one of the decodes, and may see pages that the prefills store.
        joins = any(chunk.sequence in step.admitted for chunk in step.decodes)
        if not step.decodes or joins or any(chunk.asks_for_prompt for chunk in step.decodes):
            return False
        return self._can_replay(step.prefills)

    def _pass(self, decodes: list[Chunk], prefills: list[Chunk]) -> Logits:
        if decodes and not prefills and not any(chunk.asks_for_prompt for chunk in decodes):
            return self._decodes_alone(decodes)
        if not decodes and self._can_replay(prefills):
            return self._prompts_alone(prefills)
        chunks, queries = [*decodes, *prefills], queries_of(decodes)
        tokens, step = self._inputs(decodes, prefills, queries)
        self.passes += 1
        hidden = step.hidden(self.model, tokens)
        begin, drawing, prompts = 0, [], []
        for i, chunk in enumerate(chunks):
            end = begin + chunk.count
            if chunk.asks_for_prompt:
                prompts.append((chunk, hidden[begin:end]))
            drawing += range(end - len(chunk.draw_positions), end)
            begin = begin + queries if i < len(decodes) else end
        (drawing,) = to_device([drawing], self._device)
        return Logits(self.model.logits(hidden[drawing]), prompts)

    def _decodes_alone(self, decodes: list[Chunk]) -> Logits:
        numbers = [(x.row, x.start, x.count) for x in decodes]
        if self._batch_invariant:
            numbers += [(self.rows.padding_row, 0, 1)] * (self._max_num_seqs - len(numbers))
        self.passes += 1
        inputs = self._to_rows(numbers)
        queries = queries_of(decodes)
        graphs, draw = self._graphs if queries == 1 else self._speculative_graphs, None
        if graphs is not None and self.replays_graphs:
            if queries == 1 and self.group is None:
                draw = graphs.draw
            queries = 1 if queries == 1 else self._max_queries
            logits = graphs(inputs)
        else:
            # Of one width always where sums over masked keys must not depend on others.
            width = None if self._batch_invariant else self._table_width(decodes)
            logits = self._decode(inputs, queries, width)
        drawing = [
            i * queries + j for i, x in enumerate(decodes) for j in range(len(x.draw_positions))
        ]
        if len(drawing) == len(decodes) * queries:
            return Logits(logits[: len(drawing)], [], draw)
        return Logits(logits[to_device([drawing], self._device)[0]], [])

    def _can_replay(self, prefills: list[Chunk]) -> bool:
        """Whether a captured pass gives all that is asked of these, which are one or more."""
        graphs, tokens = self._prompt_graphs, sum(chunk.count for chunk in prefills)
        if (
            graphs is None
            or not self.replays_graphs
            or any(chunk.asks_for_prompt for chunk in prefills)
        ):
            return False
        return bool(prefills) and graphs.holds(len(prefills), tokens)

    def _prompts_alone(self, prefills: list[Chunk]) -> Logits:
        self.passes += 1
        inputs = self._to_rows([(x.row, x.start, x.count) for x in prefills])
        logits = self._prompt_graphs(inputs, sum(chunk.count for chunk in prefills))
        drawing = [i for i, chunk in enumerate(prefills) if chunk.draw_positions]
        return Logits(logits[to_device([drawing], self._device)[0]], [])

    def _prompts(self, inputs: Tensor, tokens: int) -> Tensor:
        """Logits (n - 1, vocab) after the last token of each of n chunks, (3, n), but the last one, which is padding; nothing
        here depends on values on the host. tokens: of all of them."""
        ids, positions, pages, chunks = self._chunk_inputs(inputs, tokens)
        seen = chunks.kv_lens.where(inputs[0] != self.rows.padding_row, 0)
        step = self._kv.step(positions, pages, None, chunks._replace(kv_lens=seen), False)
        hidden = step.hidden(self.model, ids)
        return self.model.logits(hidden[chunks.cu_seqlens[1:-1].long() - 1])

    def _draw(self, inputs: Tensor, logits: Tensor) -> Tensor:
        """Draws of `PLAIN`, (B,), from logits of `_decode(inputs)`, which are written to their rows."""
        rows, starts, counts = inputs
        lengths = starts + counts
        tokens = sample(logits, self.rows, rows, lengths, PLAIN, Constraints())
        written = tokens.clamp(min=0).where(rows != self.rows.padding_row, 0)
        self.rows.tokens[rows, lengths] = written
        return tokens

    def _decode(self, inputs: Tensor, queries: int = 1, table_width: int | None = None) -> Tensor:
        """Logits (B * queries, vocab) after tokens of B sequences; nothing here depends on values on the host.

        inputs: int64 (3, B): rows, positions of the first tokens, and how many of the queries are tokens; the rest is padding.
        table_width: pages that any of the sequences has; None: all that it can have.
        """
        tokens, positions, pages, decodes = self._decode_inputs(inputs, queries, table_width)
        step = self._kv.step(positions, pages, decodes, None, self._batch_invariant)
        return self.model.logits(step.hidden(self.model, tokens))

    def _decode_inputs(
        self, inputs: Tensor, queries: int, table_width: int | None
    ) -> tuple[Tensor, Tensor, Tensor, Decodes]:
        """Tokens, their positions and pages, (B * queries,) each; the other arguments are `_decode`'s."""
        rows, starts, counts = inputs
        table, ends = self.rows.pages[rows, :table_width], starts + counts
        positions, q_start = starts[:, None], None
        if queries > 1:
            offsets, q_start = torch.arange(queries, device=self._device), starts.int()
            # Padding repeats the last token, which has a page and an angle, and is stored nowhere.
            positions = torch.minimum(positions + offsets, ends[:, None] - 1)
        pages = table.gather(1, positions // self._kv.page_size)
        if queries > 1:
            pages = pages.masked_fill(offsets >= counts[:, None], NO_PAGE)
        tokens = self.rows.tokens[rows[:, None], positions]
        decodes = Decodes(table, ends.int(), queries, q_start)
        return tokens.flatten(), positions.flatten(), pages.flatten(), decodes

    def _chunk_inputs(
        self, inputs: Tensor, tokens: int, table_width: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Prefills]:
        """Tokens, their positions and pages, (T,) each; inputs: int64 (3, n), rows, first positions and counts; tokens: T."""
        rows, starts, counts = inputs
        sequence = torch.arange(len(rows), device=self._device)
        sequence = sequence.repeat_interleave(counts, output_size=tokens)
        ends = counts.cumsum(0)
        index = torch.arange(tokens, device=self._device)
        positions = starts[sequence] + index - (ends - counts)[sequence]
        table = self.rows.pages[rows, :table_width]
        pages = table[sequence, positions // self._kv.page_size]
        cu_seqlens = torch.nn.functional.pad(ends, (1, 0)).int()
        chunks = Prefills(cu_seqlens, table, (starts + counts).int())
        return self.rows.tokens[rows[sequence], positions], positions, pages, chunks

    def _inputs(
        self, decodes: list[Chunk], prefills: list[Chunk], queries: int
    ) -> tuple[Tensor, PagedStep]:
        """Token ids (T,) of decodes, padded to the same number, and of chunks, and the step over their pages."""
        width = self._table_width([*decodes, *prefills])
        parts, by_decode, by_chunk = [], None, None
        if decodes:
            inputs = self._to_rows([(x.row, x.start, x.count) for x in decodes])
            *part, by_decode = self._decode_inputs(inputs, queries, width)
            parts.append(part)
        if prefills:
            inputs = self._to_rows([(x.row, x.start, x.count) for x in prefills])
            total = sum(chunk.count for chunk in prefills)
            *part, by_chunk = self._chunk_inputs(inputs, total, width)
            parts.append(part)
        tokens, positions, pages = (torch.cat(x) for x in zip(*parts, strict=True))
        step = self._kv.step(positions, pages, by_decode, by_chunk, self._batch_invariant)
        return tokens, step

    def _to_rows(self, numbers: list[tuple[int, int, int]]) -> Tensor:
        """int64 (3, n) of n triples, on the device."""
        (flat,) = to_device([[x for row in zip(*numbers, strict=True) for x in row]], self._device)
        return flat.view(3, -1)

    def _table_width(self, chunks: list[Chunk]) -> int:
        return max(len(chunk.sequence.pages) for chunk in chunks)
