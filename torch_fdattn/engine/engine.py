"""A static batch of sequences from one model and one cache: prefill, then a token at a time.

    prefill   ragged prompts, padded on the left, `prefill_chunk` columns at a time; on CUDA a captured graph
              of the next larger width (`prefill.py`)
    step      one token a sequence; on CUDA a captured graph over static buffers
    generate  prefill, then draw and step until every sequence has ended

Every rank that shares the model (tensor parallel) or the cache (sharded by position) runs the same
loop. Rank 0 of them draws each token and broadcasts it, so that ranks whose arithmetic differs in a
last bit cannot drift apart.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from torch_fdattn.checks import expect_shape
from torch_fdattn.dist.consensus import assume_equal_on_all_ranks
from torch_fdattn.dist.decode.op import COLLECTIVES_ALONE
from torch_fdattn.dist.groups import Group, name_of, pair_of_names, rank_and_size
from torch_fdattn.dist.symm.faults import check
from torch_fdattn.engine.caches import make_cache
from torch_fdattn.engine.graphs import CapturedStep
from torch_fdattn.engine.prefill import MAX_TOKENS, Pass, PrefillGraphs, default_widths
from torch_fdattn.engine.prompts import check_prompts
from torch_fdattn.engine.sampling import GREEDY, NO_TOKEN, LogitsError, Sampling
from torch_fdattn.engine.stats import Stats, weight_bytes
from torch_fdattn.models import InferenceTransformer, Transformer


class _Output(NamedTuple):
    """What a pass over the model gives for each sequence's last token."""

    logits: Tensor  # (B, vocab)
    greedy: Tensor  # (B, 1) the most likely token: within the captured step, it costs no launch


class Engine:
    """Generates with `batch` sequences at a time in a cache of `capacity` tokens each.

    Args:
        model: on the device to run on, already parallelised where `tp_group` is given. A `Transformer` runs in its
            inference form, which shares its weights (`Transformer.for_inference`); other models run as they are.
        batch, capacity: sequences, and tokens that each can hold.
        kv_group: the process group that shards the cache by position: itself, its name or a DeviceMesh of one
            dimension; None keeps it whole.
        kv_block, strategy, hierarchy: how positions are dealt and partial results travel; see ShardedKVCache.
        invariant_block: None, or keys of a block (1024, say), by which logits have the same bits on any number of ranks of
            kv_group, one included; see ShardedKVCache.
        tp_group: the process group that the model is parallelised over.
        sync_group: the group of all ranks of this engine. By default the one group given, and
            the default group where both are.
        prefill_chunk: columns of prompt a pass.
        cuda_graph: whether steps and prefill passes are captured in CUDA graphs: the decode step here and
            once, a pass of each width when the first one comes. None: on CUDA.
        prefill_widths: columns of the passes that are captured. None: four an octave, up to prefill_chunk and
            16384 tokens of the whole batch; (): none, passes run eagerly.
        kv_cache: "contiguous" or "paged".
        page_size, pages: of a paged cache; see PagedKVCache.
        kv_dtype: None, or "fp8_e4m3", "fp8_e5m2", "int8". The first chunk of the first prompt sets the
            scales; see torch_fdattn.dist.kv_cache.scales.
        fused: False: a `Transformer` runs as it is too, with its hooks and compiled modules.

    Attributes:
        model: what runs: the inference form, or the model that was given.
        cache: a ShardedKVCache or PagedKVCache; `cache.held` says how many tokens each sequence has stored.

    Raises:
        ValueError: a size below 1, a group or a name that is not known, cuda_graph without a CUDA device,
            prefill_widths beyond the capacity or 16384 tokens, or without captured graphs.
        PeerTimeout: from `generate`, before it yields a token, where a rank did not come to an exchange of a
            one-sided strategy.

    Examples:
        >>> config = torch_fdattn.models.ModelConfig("qwen3", 64, 32, 48, 1, 4, 2, 16, 128)
        >>> model = torch_fdattn.models.Transformer(config).eval()
        >>> engine = torch_fdattn.engine.Engine(model, batch=2, capacity=64)
        >>> steps = engine.generate([[5, 9, 33], [44]], 8)  # prompts may differ in length
        >>> [len(tokens) for tokens in steps]  # a token for each sequence, eight times
        [2, 2, 2, 2, 2, 2, 2, 2]
        >>> engine.cache.held  # the last tokens are not stored
        [10, 8]
    """

    def __init__(
        self, model: Transformer | InferenceTransformer, *, batch: int = 1, capacity: int, kv_group: Group = None,
        kv_block: int | None = None, tp_group: Group = None, sync_group: Group = None,
        prefill_chunk: int = 512, cuda_graph: bool | None = None, strategy: str = "auto",
        kv_cache: str = "contiguous", page_size: int = 16, pages: int | None = None,
        kv_dtype: str | None = None, hierarchy: tuple[Group, Group] | None = None,
        prefill_widths: Sequence[int] | None = None, fused: bool = True, invariant_block: int | None = None,
    ) -> None:  # fmt: skip
        weight = model.norm.weight
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be at least 1, got {prefill_chunk}")
        if cuda_graph and not weight.is_cuda:
            raise ValueError(
                f"cuda_graph must be None or False where the model is on {weight.device}, got True"
            )
        self.model = model.for_inference() if fused and type(model) is Transformer else model
        self.batch, self.capacity = batch, capacity
        self.prefill_chunk, self.device = prefill_chunk, weight.device
        kv_group, tp_group, sync_group = (
            None if group is None else name_of(group, argument)
            for argument, group in (("kv_group", kv_group), ("tp_group", tp_group), ("sync_group", sync_group))
        )  # fmt: skip
        hierarchy = pair_of_names(hierarchy)
        self._sync_group = _group_of_all(kv_group, tp_group, sync_group)
        self.cache = make_cache(
            model, batch, capacity, kv_cache, kv_group=kv_group, kv_block=kv_block,
            strategy=strategy, hierarchy=hierarchy, page_size=page_size, pages=pages,
            kv_dtype=kv_dtype, invariant_block=invariant_block,
        )  # fmt: skip
        waits = kv_group is not None and strategy not in COLLECTIVES_ALONE
        #: Groups in whose exchanges a step may wait for a rank that died.
        self._waits_in = (kv_group, *(hierarchy or ())) if waits else ()
        # What the captured step reads. With counts of 0 its warm-up leaves the cache as it is.
        self._tokens = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self._counts = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self._counts_on_host = [0] * batch
        self._captured: CapturedStep[_Output] | None = None
        self._prefill_graphs: PrefillGraphs | None = None
        captures = weight.is_cuda if cuda_graph is None else cuda_graph
        widths = _checked_widths(prefill_widths, batch, capacity, captures)
        if captures:
            self._captured = CapturedStep(self._decode, self.device)
            self._prefill_graphs = PrefillGraphs(
                self._pass, default_widths(batch, min(prefill_chunk, capacity)) if widths is None else widths,
                batch, capacity, self.device, self.cache.shapes_follow_longest,
            )  # fmt: skip

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Stores a prompt for each sequence, after what it holds; logits (B, vocab) of the last tokens.

        Prompts may differ in length; each needs a token at least.

        Raises:
            PromptError: a prompt that is empty, does not fit, or has unknown tokens.
        """
        check_prompts(prompts, 0, self.model.config.vocab_size, self.cache)
        # a captured pass writes its logits where the last one did
        return self._prefill(prompts).logits.clone()

    @torch.inference_mode()
    def step(self, tokens: Tensor, active: Sequence[bool] | None = None) -> Tensor:
        """Stores one token for each sequence, tokens (B, 1), and gives the logits (B, vocab) after it.

        Sequences that are not `active` (default: all are) store nothing and their logits mean nothing.
        Where the step is captured the logits are overwritten by the next one.

        Raises:
            ValueError: tokens or active of another shape, or a sequence that is full; nothing runs then.
        """
        expect_shape("tokens", tokens, (self.batch, 1), "the engine's batch")
        active = [True] * self.batch if active is None else active
        if len(active) != self.batch:
            raise ValueError(
                f"active must have {self.batch} entries like the batch, got {len(active)}"
            )
        return self._step(tokens, active).logits

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *,
        sampling: Sampling = GREEDY, eos_ids: Collection[int] = (), stats: Stats | None = None,
    ) -> Iterator[list[int | None]]:  # fmt: skip
        """Tokens that continue the prompts: at each step one for every sequence, None where it has ended.

        A sequence ends with the first of eos_ids, which is yielded too, all with max_new_tokens. The last
        token of a sequence is not stored in the cache, and one that has ended stores no more. Arguments
        are checked here, before the first token is asked for. All ranks of the engine must iterate.

        Raises:
            PromptError: a prompt that is empty, does not fit with max_new_tokens, or has unknown tokens.
            LogitsError: while iterating, where the model gave NaN or inf to draw from (greedily, argmax
                of these is taken); on all ranks alike.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        check_prompts(prompts, max_new_tokens, self.model.config.vocab_size, self.cache)
        stats = Stats() if stats is None else stats
        return self._generate(prompts, max_new_tokens, sampling, frozenset(eos_ids), stats)

    def stream(
        self, prompt: Sequence[int], max_new_tokens: int, *, sampling: Sampling = GREEDY,
        eos_ids: Collection[int] = (), stats: Stats | None = None,
    ) -> Iterator[int]:  # fmt: skip
        """`generate` for a batch of one: the tokens that continue `prompt`."""
        if self.batch != 1:
            raise ValueError(f"engine must have batch 1 to stream, got {self.batch}")
        steps = self.generate(
            [prompt], max_new_tokens, sampling=sampling, eos_ids=eos_ids, stats=stats
        )
        return (token for (token,) in steps)

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens of every sequence, and all of a shorter one."""
        self.cache.truncate(length)

    def reset(self) -> None:
        """Forgets all tokens."""
        self.cache.reset()

    def close(self) -> None:
        """Lets go of the CUDA graphs, which must be gone before their process groups; all then runs eagerly."""
        self._captured = self._prefill_graphs = None

    @property
    def prefill_graph_bytes(self) -> int:
        """Bytes of GPU memory that captured prefill passes hold, all together; 0 where none was captured."""
        return 0 if self._prefill_graphs is None else self._prefill_graphs.nbytes

    def _generate(self, prompts, max_new_tokens, sampling, eos_ids, stats):
        generator = sampling.generator(self.device)
        weights = weight_bytes(self.model)
        active = [True] * self.batch
        stats.prompt_tokens, began = sum(map(len, prompts)), time.perf_counter()
        output = self._prefill(prompts)
        for count in range(max_new_tokens):
            tokens = self._draw(output, sampling, generator)
            drawn = tokens.flatten().tolist()  # the host waits for the device: the clock is right
            seconds = time.perf_counter() - began
            if NO_TOKEN in drawn:
                _expect_tokens(drawn, active, count)
                tokens = tokens.clamp(min=0)  # those of sequences that have ended mean nothing
            if count == 0:
                stats.first(self.batch, seconds)
            else:
                stats.next(sum(active), seconds, weights + self.cache.bytes_used())
            yield [token if goes_on else None for token, goes_on in zip(drawn, active, strict=True)]
            active = [on and token not in eos_ids for token, on in zip(drawn, active, strict=True)]
            if count + 1 == max_new_tokens or not any(active):
                return
            began = time.perf_counter()  # what the caller does with a token is not our time
            output = self._step(tokens, active)

    @torch.inference_mode()
    def _prefill(self, prompts: Sequence[Sequence[int]]) -> _Output:
        lengths = [len(prompt) for prompt in prompts]
        self.cache.reserve(lengths)
        width = max(lengths)
        padded = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        tokens = torch.tensor(padded, device=self.device)
        begins = width - torch.tensor(lengths, dtype=torch.int32, device=self.device)
        start, step = 0, min(self.prefill_chunk, width)
        for chunk in tokens.split(step, dim=1):
            end = start + chunk.shape[1]
            stored = zip(self.cache.held, lengths, strict=True)
            longest = max(held - min(length, width - end) for held, length in stored)
            full = width - min(lengths) <= start
            output = self._run_pass(Pass(chunk, end - begins.clamp(start, end), longest, full))
            start = end
        return output

    def _run_pass(self, given: Pass) -> _Output:
        graphs = self._prefill_graphs
        # The first pass of a quantised cache sets its scales: no part of a graph.
        if graphs is None or not self.cache.calibrated or not graphs.takes(given):
            return self._pass(given)
        if self._waits_in:  # a replay would not look
            check(*self._waits_in, synchronize=False)
        return _Output(*graphs(given))

    def _pass(self, given: Pass) -> _Output:
        return self._forward(given.tokens, given.counts, given.longest, given.full)

    @torch.inference_mode()
    def _step(self, tokens: Tensor, active: Sequence[bool]) -> _Output:
        counts = [int(goes_on) for goes_on in active]
        self.cache.reserve(counts)
        if counts != self._counts_on_host:
            self._counts.copy_(torch.tensor(counts))
            self._counts_on_host = counts
        self._tokens.copy_(tokens)
        # A first step without a prompt before it sets a quantised cache's scales: no part of the graph.
        if self._waits_in:  # a replay would not look
            check(*self._waits_in, synchronize=False)
        replays = self._captured is not None and self.cache.calibrated
        return self._captured() if replays else self._decode()

    @torch.inference_mode()
    def _decode(self) -> _Output:
        with assume_equal_on_all_ranks():
            return self._forward(self._tokens, self._counts)

    def _forward(
        self, tokens: Tensor, counts: Tensor, longest: int | None = None, full: bool = False
    ) -> _Output:
        """A pass over the last counts[b] of the columns of tokens (B, T), for each sequence b; full: over all."""
        step = self.cache.ragged_step(counts, tokens.shape[1], longest, full)
        logits = self.model(tokens, step, last_only=True)[:, -1]
        return _Output(logits, logits.argmax(-1, keepdim=True))

    @torch.inference_mode()
    def _draw(self, output: _Output, sampling: Sampling, generator: torch.Generator) -> Tensor:
        """The next tokens (B, 1), the same on all ranks."""
        greedy = sampling.temperature == 0
        tokens = output.greedy if greedy else sampling.draw(output.logits, generator)
        if self._waits_in:
            # A rank that died in the step is named here; the broadcast could only wait for it.
            if tokens.is_cuda:
                torch.cuda.current_stream(self.device).synchronize()
            check(*self._waits_in, synchronize=False)
        if self._sync_group is not None:
            dist.broadcast(tokens, group=self._sync_group, group_src=0)
        return tokens


def _checked_widths(
    widths: Sequence[int] | None, batch: int, capacity: int, captures: bool
) -> Sequence[int] | None:
    if widths is None:
        return None
    if not isinstance(widths, Sequence) or not all(type(width) is int for width in widths):
        raise TypeError(f"prefill_widths must be None or a list or tuple of int, got {widths!r}")
    if widths and not captures:
        raise ValueError(
            f"prefill_widths must be None or empty where nothing is captured, got {widths}"
        )
    most = min(MAX_TOKENS // batch, capacity)
    for width in widths:
        if not 1 <= width <= most:
            raise ValueError(
                f"prefill_widths must be from 1 to {most} columns (the capacity, and {MAX_TOKENS} tokens for a batch of "
                f"{batch}), got {width}"
            )
    return widths


def _expect_tokens(drawn: list[int], active: list[bool], count: int) -> None:
    for i, (token, goes_on) in enumerate(zip(drawn, active, strict=True)):
        if goes_on and token == NO_TOKEN:
            raise LogitsError(
                f"logits must be finite to draw from them, got NaN, inf or -inf alone for new token {count} "
                f"of sequence {i}: look at the weights and their dtype (float16 ends at 65504)"
            )


def _group_of_all(kv: str | None, tp: str | None, sync: str | None) -> dist.ProcessGroup | None:
    """The group that agrees on tokens; None for an engine of one process."""
    for name, argument in ((kv, "kv_group"), (tp, "tp_group"), (sync, "sync_group")):
        if name is not None:
            rank_and_size(name, argument)  # one clear error for a name that is not known
    if sync is None and kv is not None and tp is not None:
        sizes = [rank_and_size(name)[1] for name in (kv, tp)]
        if sizes[0] * sizes[1] != dist.get_world_size():
            raise ValueError(
                "sync_group must be given where kv_group and tp_group are not a mesh of all ranks, got "
                f"groups of {sizes[0]} and {sizes[1]} among {dist.get_world_size()} ranks"
            )
        return dist.group.WORLD
    name = sync or kv or tp
    return None if name is None else distributed_c10d._resolve_process_group(name)
