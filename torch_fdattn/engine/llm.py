"""Continuous batching: requests come and go, and every step computes tokens of all that run.

    add_request → waiting → running (row, pages) → chunks of the prompt → a token a step → ended: pages go back

`step` queues the next step first and then reads what the one before has drawn, so that the host schedules while the
device runs. With speculation it reads first: proposals follow from the tokens. docs/engine.md draws the life of a request.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from pathlib import Path

from torch_fdattn.dist.groups import Group
from torch_fdattn.engine.detokenizer import TextStream
from torch_fdattn.engine.launched_step import LaunchedStep
from torch_fdattn.engine.llm_setup import MAX_BATCH_TOKENS, chunk_size_of, make_runner
from torch_fdattn.engine.logprobs import to_dicts
from torch_fdattn.engine.ngram_speculation import NgramProposer, NgramSpeculation
from torch_fdattn.engine.outputs import EngineStats, RequestOutput
from torch_fdattn.engine.page_pool import PagePool
from torch_fdattn.engine.prompts import check_params, longest_length, prompt_tokens
from torch_fdattn.engine.requests import Request, Sequence
from torch_fdattn.engine.sampling_params import SamplingParams
from torch_fdattn.engine.scheduler import ScheduledStep, Scheduler
from torch_fdattn.engine.step_constraints import constraints_of
from torch_fdattn.engine.step_trace import StepTrace
from torch_fdattn.engine.structured import Grammars, Matcher
from torch_fdattn.models import InferenceTransformer, Tokenizer, Transformer

Prompt = str | SequenceOf[int]


class LLM:
    """Generates for many requests at the same time, over pages that they take as they grow.

    Args:
        model: on the device to run on, already parallelised where `tp_group` is given. A `Transformer` runs in its
            inference form, which shares its weights; with fused=False as it is, with its hooks and compiled modules.
        tokenizer: for prompts and answers as text, stop strings and end tokens. Without it prompts are token ids, and
            only stop_token_ids and max_tokens end a completion.
        max_num_seqs: completions that run at the same time.
        max_batch_tokens: tokens that one step computes, of prompts and completions together.
        max_model_len: tokens of a prompt and its completion. None: the model's own length.
        pages, page_size: of the KV cache. pages None: for max_num_seqs of max_model_len, or what fits into 85 % of the
            GPU's free memory, or into 1 GiB of a CPU's.
        kv_dtype: None, the model's dtype; or "fp8_e4m3", "fp8_e5m2", "int8", with a scale for each token and KV head. Chunks of
            prompts then attend over dequantised copies of their pages.
        enable_prefix_caching: whether prompts take over pages that earlier ones have computed.
        cuda_graph: whether steps of decodes alone are captured in CUDA graphs. None: on CUDA,
            except where a pass has collectives of gloo, which cannot be captured (True is refused there).
        prompt_graph_tokens: passes of up to eight prompts are captured, too, up to so many tokens in all (at most
            max_model_len and max_batch_tokens): short prompts, and decodes beside them, do not wait for the host. Not with
            kv_dtype, kv_group or batch_invariant.
        kv_group: the process group that shares the cache by position: each rank has `pages` pages, of every sequence
            page_size tokens in turn, and computes its share of the prompts' tokens. `strategy`, `hierarchy`: of `dist.decode`.
        tp_group: the process group that the model is parallelised over. All ranks of both groups make the same calls; the
            first one's draws are taken. Both together are the dimensions of a mesh of all ranks, or, where it is given, of
            those of `sync_group`: one of several engines side by side.
        batch_invariant: the same bits for a request whatever else is in the batch; what it costs says docs/engine.md.
        rank_invariant: with batch_invariant, the same bits on any number of ranks of kv_group, one included, at one page_size:
            `dist.decode`'s invariant_block is a page.
        speculation: None, or how tokens are proposed so that a step may give several; not with batch_invariant.
        run_ahead: whether `step` queues a step before it reads the one before. False gives tokens a step earlier and computes none
            behind a completion's end: for a CPU, which runs nothing meanwhile.

    Attributes:
        model, tokenizer, device: what runs, and where.
        max_model_len: as above.
        vocab_size: of the model: token ids are below it.
        page_size: tokens of a page; with kv_group of one on each rank together.
        group, num_ranks, rank: the process group of all ranks that make its calls; None, 1 and 0 of one process.

    Raises:
        ValueError, TypeError, NotImplementedError: naming the argument.

    Examples:
        >>> config = torch_fdattn.models.ModelConfig("qwen3", 64, 32, 48, 1, 4, 2, 16, 128)
        >>> llm = torch_fdattn.engine.LLM(torch_fdattn.models.Transformer(config), pages=32)
        >>> params = torch_fdattn.engine.SamplingParams(max_tokens=8, temperature=0)
        >>> outputs = llm.generate([[5, 9, 33], [44]], params)
        >>> [len(output.outputs[0].token_ids) for output in outputs]
        [8, 8]

        Requests that come while others run:

        >>> llm.add_request("a", [5, 9, 33], params)
        >>> _ = llm.step()
        >>> llm.add_request("b", [44], params)
        >>> while llm.has_unfinished:
        ...     for output in llm.step():
        ...         if output.finished:
        ...             print(output.request_id, output.outputs[0].finish_reason)
        a length
        b length
    """

    def __init__(
        self, model: Transformer | InferenceTransformer, tokenizer: Tokenizer | None = None, *,
        max_num_seqs: int = 256, max_batch_tokens: int = MAX_BATCH_TOKENS, max_model_len: int | None = None,
        pages: int | None = None, page_size: int = 16, kv_dtype: str | None = None,
        enable_prefix_caching: bool = True, cuda_graph: bool | None = None, prompt_graph_tokens: int = 0, kv_group: Group = None,
        strategy: str = "auto", hierarchy: tuple[Group, Group] | None = None, tp_group: Group = None,
        sync_group: Group = None, batch_invariant: bool = False, rank_invariant: bool = False,
        speculation: NgramSpeculation | None = None, run_ahead: bool = True, fused: bool = True,
    ) -> None:  # fmt: skip
        self._runner, sizes = make_runner(
            model, max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens, max_model_len=max_model_len,
            pages=pages, page_size=page_size, kv_dtype=kv_dtype, enable_prefix_caching=enable_prefix_caching,
            eos_ids=None if tokenizer is None else tokenizer.eos_ids,
            cuda_graph=cuda_graph, prompt_graph_tokens=prompt_graph_tokens, kv_group=kv_group, strategy=strategy, hierarchy=hierarchy, tp_group=tp_group, sync_group=sync_group,
            batch_invariant=batch_invariant, rank_invariant=rank_invariant, speculation=speculation,
            run_ahead=run_ahead, fused=fused,
        )  # fmt: skip
        self.model, self.tokenizer = self._runner.model, tokenizer
        self.max_model_len, self.page_size = sizes.max_model_len, sizes.page_size
        self.vocab_size = self.model.config.vocab_size
        self.group, self.rank = self._runner.group, self._runner.rank
        self.num_ranks, self.device = self._runner.num_ranks, self._runner.rows.device
        self._pool = PagePool(sizes.pages)
        chunk_size = None
        if batch_invariant:
            unit = page_size if rank_invariant else self.page_size
            chunk_size = chunk_size_of(unit, max_num_seqs, max_batch_tokens)
        self._scheduler = Scheduler(
            self._pool, self.page_size, max_num_seqs, max_batch_tokens, enable_prefix_caching, chunk_size,
            speculation,
        )  # fmt: skip
        self._speculation, self._runs_ahead = speculation, run_ahead
        self._requests: dict[str, Request] = {}
        self._changed: dict[str, Request] = {}
        self._in_flight: LaunchedStep | None = None
        self._grammars = Grammars(tokenizer, self.vocab_size)
        self._eos_ids = frozenset() if tokenizer is None else tokenizer.eos_ids
        self._prompt_tokens = self._generated_tokens = 0
        self._proposed_tokens = self._accepted_tokens = 0

    def generate(
        self, prompts: SequenceOf[Prompt], sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """The finished outputs of these prompts, in their order.

        prompts: texts, which are encoded with the tokenizer's special tokens, or lists of token ids.
        sampling_params: for all of them, or one for each; None: `SamplingParams()`.

        Raises:
            PromptError, ValueError, TypeError: naming the prompt or parameter; nothing runs then.
            LogitsError: as `step`.
        """
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            raise TypeError(f"prompts must be a list of prompts, got one: {prompts!r}")
        if self._requests:
            raise ValueError(
                f"generate must be called while no other request runs, got {len(self._requests)} unfinished: "
                "use add_request and step"
            )
        sampling_params = SamplingParams() if sampling_params is None else sampling_params
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"sampling_params must be one, or one for each of {len(prompts)} prompts, got {len(sampling_params)}"
            )
        outputs: dict[str, RequestOutput] = {}
        try:
            for i, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True)):
                self._add(str(i), prompt, params, f"prompts[{i}]")
            while self.has_unfinished:
                outputs |= {x.request_id: x for x in self.step() if x.finished}
        finally:
            for request_id in list(self._requests):  # after an error
                self.abort(request_id)
        return [outputs[str(i)] for i in range(len(prompts))]

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, grammar: Matcher | None = None,
    ) -> None:  # fmt: skip
        """A request that the next steps serve.

        grammar: what `compile_grammar` gave for these params; None: that is done here.

        Raises:
            PromptError: an empty prompt, unknown token ids, or more than max_model_len or the pages can hold.
            ValueError, TypeError: a request_id that an unfinished request has, or what the parameters need is not there.
        """
        self._add(request_id, prompt, params, "prompt", grammar)

    def compile_grammar(self, params: SamplingParams) -> Matcher | None:
        """What `add_request` makes of params.json_schema or params.grammar, which may take seconds: on any thread, and for
        any number of requests. None: params has neither.

        Raises:
            ValueError: it is none that llguidance takes, or beyond the limits (`grammar_limits.py`).
            ModelError, NotImplementedError: llguidance is not there, or the tokenizer is none of its.
        """
        return self._grammars.matcher(params) if params.is_structured else None

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends an unfinished request, whose pages are free at once: what there is of it, text that was held back for a stop
        string included, as vLLM has it. None, and nothing done, for others. `step` gives no further output of it."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        self._changed.pop(request_id, None)
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                sequence.finish("abort")
                self._scheduler.remove(sequence)
        return request.output()

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._requests) or self._in_flight is not None

    def step(self) -> list[RequestOutput]:
        """Queues a step of the model, reads the tokens of the one before (without `run_ahead`: its own), and gives the requests
        that these changed.

        Raises:
            LogitsError: the model gave NaN or inf to draw from. After this and any other error all requests are aborted, and
                the prefix cache is empty: what stands in its pages is uncertain.
            PeerTimeout: a one-sided strategy waited in vain for a rank of kv_group.
        """
        try:
            return self._step()
        except BaseException:
            self._in_flight = None
            for request_id in list(self._requests):
                self.abort(request_id)
            self._pool.forget_all()
            raise

    def _step(self) -> list[RequestOutput]:
        before, self._in_flight = self._in_flight, None
        if self._speculation is not None:  # proposals follow from what was drawn
            self._read(before)
        scheduled = self._scheduler.schedule()
        launched = None if scheduled is None else self._launch(scheduled)
        if self._speculation is None:
            self._read(before)
        if self._runs_ahead:
            self._in_flight = launched
        else:
            self._read(launched)
        changed, self._changed = self._changed, {}
        for request in changed.values():
            if request.finished:
                del self._requests[request.request_id]
        return [request.output() for request in changed.values()]

    def stats(self) -> EngineStats:
        """What it does now and has done so far."""
        scheduler, pool = self._scheduler, self._pool
        return EngineStats(
            len(scheduler.running), len(scheduler.waiting), pool.pages - pool.num_free, pool.pages,
            self._prompt_tokens, self._generated_tokens, scheduler.prefix_hit_tokens,
            scheduler.prefix_query_tokens, scheduler.preemptions, self._proposed_tokens,
            self._accepted_tokens, pool.peak_used, self._runner.kv_bytes,
        )  # fmt: skip

    def step_bytes(self, tokens: int) -> int:
        """Bytes of weights and KV cache that a step of one sequence reads on this rank, where so many of its tokens are stored."""
        return self._runner.bytes_read(tokens)

    def close(self) -> None:
        """Lets go of the CUDA graphs, which must be gone before their process groups; all then runs eagerly."""
        self._runner.close()

    def trace(self, path: str | Path | None = None) -> StepTrace:
        """A context in which steps are timed by layer and part; path: of a file that ui.perfetto.dev opens."""
        return StepTrace(self._runner, path)

    def _add(
        self, request_id: str, prompt: Prompt, params: SamplingParams, name: str, grammar: Matcher | None = None,
    ) -> None:  # fmt: skip
        self._runner.compare_request(request_id, prompt, params)
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a str, got {type(request_id).__name__}")
        if request_id in self._requests:
            raise ValueError(f"request_id must be of no unfinished request, got {request_id!r}")
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, got {type(params).__name__}")
        tokens = prompt_tokens(prompt, self.tokenizer, self.vocab_size, name)
        capacity = self._pool.pages * self.page_size
        max_length = longest_length(tokens, params, self.max_model_len, capacity, name)
        check_params(params, self.vocab_size, self._eos_ids, self.tokenizer is not None)
        grammar = self.compile_grammar(params) if grammar is None else grammar
        request = Request(request_id, tokens, params, self._eos_ids)
        seed = random.getrandbits(63) if params.seed is None else params.seed
        for index in range(params.n):
            text = None
            if self.tokenizer is not None:
                text = TextStream(self.tokenizer, tokens, params.stop)
            matcher = None if grammar is None else grammar.copy()
            proposer = None
            if self._speculation is not None and matcher is None:
                proposer = NgramProposer(self._speculation)
            request.sequences.append(
                Sequence(request, index, seed, max_length, text, matcher, proposer)
            )
        self._requests[request_id] = request
        for sequence in request.sequences:
            self._scheduler.add(sequence)
        self._prompt_tokens += len(tokens)

    def _launch(self, step: ScheduledStep) -> LaunchedStep:
        return self._runner.launch(step, constraints_of(step, self._runner.rows.device))

    def _read(self, step: LaunchedStep | None) -> None:
        """Gives drawn tokens to their sequences, of which some end."""
        if step is None:
            return
        tokens = step.read()
        self._runner.raise_faults()
        listed: list[dict | None] = [None] * len(tokens)
        if step.logprobs is not None:
            dicts = to_dicts(step.logprobs, step.with_logprobs.values(), self._text_of)
            for i, entries in zip(step.with_logprobs, dicts, strict=True):
                listed[i] = entries
        for chunk, found in step.prompt_logprobs:
            request = chunk.sequence.request
            counts = [request.params.prompt_logprobs] * len(found.tokens)
            dicts = to_dicts(found, counts, self._text_of)
            request.add_prompt_logprobs(chunk.start + 1, dicts)
        end = 0
        for chunk in step.samples:
            sequence, begin, end = chunk.sequence, end, end + len(chunk.draw_positions)
            if sequence.finish_reason is not None:
                continue  # it had ended before this step was known to be one too many
            taken = sequence.accept(tokens[begin:end], chunk.proposals, listed[begin:end])
            self._generated_tokens += taken
            self._proposed_tokens += len(chunk.proposals)
            self._accepted_tokens += taken - 1
            self._changed[sequence.request.request_id] = sequence.request
            if sequence.finish_reason is not None:
                self._scheduler.remove(sequence)

    def _text_of(self, token: int) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode([token])
