"""The command line: `fdattn generate`, `chat`, `serve`, `bench`, `explain`, `tune` and `doctor`.

`generate`, `chat`, `serve` and `bench serve` run on one process, or on every rank of torchrun: with the pages of the KV
cache shared by them, the model split over them (--tensor-parallel), or both. Generated text alone goes to stdout;
progress and statistics go to stderr, from rank 0. An error that the user can mend is one line and exit
code 2; 1 where the output cannot be written, or a rank of `serve` is lost.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from torch_fdattn import stdout
from torch_fdattn.cli.chat import converse
from torch_fdattn.cli.errors import UsageError, one_line_errors
from torch_fdattn.cli.options import (
    ApiKey,
    Device,
    DTypeOption,
    KVDTypeOption,
    MaxBatchTokens,
    MaxModelLen,
    MaxNewTokens,
    MaxNumSeqs,
    Model,
    NgramTokens,
    Pages,
    PageSize,
    PrefixCaching,
    PromptGraphTokens,
    Seed,
    ServedPromptGraphTokens,
    StrategyOption,
    Temperature,
    TensorParallel,
    TopP,
    TPStrategyOption,
)  # fmt: skip
from torch_fdattn.cli.setup import (
    DType,
    EngineOptions,
    KVDType,
    KVStrategy,
    TPStrategy,
    check_ranks,
    load,
    make_params,
)
from torch_fdattn.cli.terminal import any_text, note, report, write
from torch_fdattn.cli.world import join
from torch_fdattn.engine import Chat, PromptError, Stats, stream_text
from torch_fdattn.engine.llm_setup import MAX_BATCH_TOKENS
from torch_fdattn.models import load_tokenizer, resolve
from torch_fdattn.version import __version__

_HELP = {"help_option_names": ["-h", "--help"]}  # of the commands too
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=_HELP,
)
bench = typer.Typer(no_args_is_help=True, context_settings=_HELP, help="Benchmarks of the engine.")
app.add_typer(bench, name="bench")
_CONTEXT = 4096  # tokens of a chat, where neither the user nor the model says fewer


def _version(requested: bool) -> None:
    if requested:
        print(f"fdattn {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and end.")
    ] = False,
) -> None:
    """Attention kernels for PyTorch, with a small engine that puts them to work."""


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="What to continue, or with --chat to answer.")],
    max_new_tokens: MaxNewTokens = 128,
    chat: Annotated[bool, typer.Option(help="Put the prompt into the chat template.")] = False,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    dtype: DTypeOption = DType.auto,
    device: Device = None,
    max_batch_tokens: MaxBatchTokens = MAX_BATCH_TOKENS,
    page_size: PageSize = 16,
    kv_dtype: KVDTypeOption = KVDType.auto,
    ngram_tokens: NgramTokens = 0,
    strategy: StrategyOption = KVStrategy.auto,
    tensor_parallel: TensorParallel = 1,
    tp_strategy: TPStrategyOption = TPStrategy.auto,
) -> None:
    """Write text that continues a prompt, streaming to the terminal."""
    with one_line_errors(), join(device) as world:
        check_ranks(tensor_parallel, world)
        options = EngineOptions(
            max_batch_tokens=max_batch_tokens, page_size=page_size, kv_dtype=kv_dtype,
            enable_prefix_caching=False, ngram_tokens=ngram_tokens, strategy=strategy,
            tensor_parallel=tensor_parallel, tp_strategy=tp_strategy,
        )  # fmt: skip
        params = make_params(max_new_tokens, temperature, top_p, seed)
        path = resolve(model)
        tokenizer = load_tokenizer(path)
        prompt = prompt.encode("utf-8", "replace").decode()  # bytes that were no UTF-8
        turn = [{"role": "user", "content": prompt}]
        ids = tokenizer.chat(turn) if chat else tokenizer.encode(prompt)
        network = load(path, dtype, world)
        capacity = len(ids) + max_new_tokens
        if capacity > network.config.max_positions:
            raise PromptError(
                f"prompt and --max-new-tokens take {capacity} positions, the model has "
                f"{network.config.max_positions}"
            )
        options = options.of_one_sequence(capacity, world)
        with closing(options.make(network, tokenizer, world)) as llm:
            stats = Stats()
            any_text()
            for text in stream_text(llm, ids, params, stats=stats):
                write(text, world)
            write("\n", world)
            report(stats, llm, page_size, world)


@app.command()
def chat(
    model: Model,
    system: Annotated[str | None, typer.Option(help="What the system message says.")] = None,
    max_new_tokens: MaxNewTokens = 512,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the conversation, replies included.")
    ] = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    dtype: DTypeOption = DType.auto,
    device: Device = None,
    max_batch_tokens: MaxBatchTokens = MAX_BATCH_TOKENS,
    page_size: PageSize = 16,
    kv_dtype: KVDTypeOption = KVDType.auto,
    ngram_tokens: NgramTokens = 0,
    strategy: StrategyOption = KVStrategy.auto,
    tensor_parallel: TensorParallel = 1,
    tp_strategy: TPStrategyOption = TPStrategy.auto,
) -> None:
    """Talk with a model: a line is a turn; /help says what is possible; Ctrl-C stops a reply."""
    with one_line_errors(), join(device) as world:
        check_ranks(tensor_parallel, world)
        options = EngineOptions(
            max_batch_tokens=max_batch_tokens, page_size=page_size, kv_dtype=kv_dtype,
            enable_prefix_caching=True, ngram_tokens=ngram_tokens, strategy=strategy,
            tensor_parallel=tensor_parallel, tp_strategy=tp_strategy,
        )  # fmt: skip
        params = make_params(max_new_tokens, temperature, top_p, seed)
        path = resolve(model)
        tokenizer = load_tokenizer(path)
        if tokenizer.chat_template is None:
            raise UsageError("this model has no chat template: use fdattn generate")
        network = load(path, dtype, world)
        tokens = max_model_len or min(_CONTEXT, network.config.max_positions)
        options = options.of_one_sequence(tokens, world)
        with closing(options.make(network, tokenizer, world)) as llm:
            conversation = Chat(
                llm, system=system, params=params, note=lambda sentence: note(sentence, world)
            )
            converse(conversation, path.stem if path.is_file() else model, world)


@app.command()
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="An address of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8000,
    api_key: ApiKey = None,
    model_name: Annotated[
        str | None, typer.Option(help="What requests call the model; default as --model.")
    ] = None,
    dtype: DTypeOption = DType.auto,
    device: Device = None,
    max_num_seqs: MaxNumSeqs = 256,
    max_batch_tokens: MaxBatchTokens = MAX_BATCH_TOKENS,
    max_model_len: MaxModelLen = None,
    pages: Pages = None,
    page_size: PageSize = 16,
    kv_dtype: KVDTypeOption = KVDType.auto,
    prefix_caching: PrefixCaching = True,
    ngram_tokens: NgramTokens = 0,
    prompt_graph_tokens: ServedPromptGraphTokens = None,
    strategy: StrategyOption = KVStrategy.auto,
    tensor_parallel: TensorParallel = 1,
    tp_strategy: TPStrategyOption = TPStrategy.auto,
    max_sequences: Annotated[
        int, typer.Option(min=1, help="Answers in progress; 429 beyond.")
    ] = 256,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of one prompt; 400 beyond.")
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="413 beyond.")] = 4 << 20,
    grace_seconds: Annotated[
        float, typer.Option(min=0.1, help="For answers in progress at the end.")
    ] = 30.0,
) -> None:
    """Serve a model by OpenAI's HTTP API, and a page to talk with it."""
    from torch_fdattn.cli.serve import run

    engine = EngineOptions(
        max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens, max_model_len=max_model_len,
        pages=pages, page_size=page_size, kv_dtype=kv_dtype, enable_prefix_caching=prefix_caching,
        ngram_tokens=ngram_tokens, prompt_graph_tokens=prompt_graph_tokens, strategy=strategy,
        tensor_parallel=tensor_parallel, tp_strategy=tp_strategy,
    )  # fmt: skip
    server = {
        "model_name": model_name, "host": host, "port": port, "api_key": api_key,
        "max_sequences": max_sequences, "max_prompt_tokens": max_prompt_tokens,
        "max_body_bytes": max_body_bytes, "grace_seconds": grace_seconds,
    }  # fmt: skip
    with one_line_errors(), join(device) as world:
        code = run(world, model, dtype, engine, server)
    raise typer.Exit(code)


@bench.command("serve")
def bench_serve(
    url: Annotated[
        str | None, typer.Option(help="A running server's, as http://127.0.0.1:8000.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-3, help="Requests a second (Poisson) with --url.")
    ] = None,
    shape: Annotated[str, typer.Option(help="Without --url: a published model's.")] = "Qwen3-0.6B",
    requests: Annotated[int, typer.Option(min=1)] = 256,
    shortest: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, and an answer.")] = 100,
    longest: Annotated[int, typer.Option(min=1, help="Drawn uniformly up to this.")] = 1024,
    peer: Annotated[
        list[str] | None, typer.Option(help="Another engine at the same: nano-vllm, transformers.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="The best run is shown.")] = 2,
    out: Annotated[Path | None, typer.Option(help="A file for the figures, as JSON.")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="A file for a trace of 64 more steps, with a table of layers and parts."),
    ] = None,
    api_key: ApiKey = None,
    dtype: DTypeOption = DType.auto,
    device: Device = None,
    max_num_seqs: MaxNumSeqs = 256,
    max_batch_tokens: MaxBatchTokens = MAX_BATCH_TOKENS,
    max_model_len: MaxModelLen = None,
    pages: Pages = None,
    page_size: PageSize = 16,
    kv_dtype: KVDTypeOption = KVDType.auto,
    prefix_caching: PrefixCaching = True,
    ngram_tokens: NgramTokens = 0,
    prompt_graph_tokens: PromptGraphTokens = 0,
    strategy: StrategyOption = KVStrategy.auto,
    tensor_parallel: TensorParallel = 1,
    tp_strategy: TPStrategyOption = TPStrategy.auto,
) -> None:
    """Measure serving: the engine in this process on random weights, or a server at --url."""
    from torch_fdattn.cli.bench import run_here, run_served

    lengths = shortest, longest
    with one_line_errors():
        if url is not None:
            if peer:
                raise UsageError("--peer is for the engine in this process: leave --url out")
            if trace is not None:
                raise UsageError("--trace is for the engine in this process: leave --url out")
            raise typer.Exit(run_served(url, requests, lengths, rate, api_key, out))
        if rate is not None:
            raise UsageError("--rate needs --url: in this process all requests come at the start")
        engine = EngineOptions(
            max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens, max_model_len=max_model_len,
            pages=pages, page_size=page_size, kv_dtype=kv_dtype, enable_prefix_caching=prefix_caching,
            ngram_tokens=ngram_tokens, prompt_graph_tokens=prompt_graph_tokens, strategy=strategy,
            tensor_parallel=tensor_parallel, tp_strategy=tp_strategy,
        )  # fmt: skip
        with join(device) as world:
            code = run_here(
                world, shape, dtype, requests, lengths, engine, peer or [], repeats, out, trace
            )
    raise typer.Exit(code)


@app.command()
def explain(
    target: Annotated[
        str,
        typer.Argument(
            help="FILE.py:NAME or MODULE:NAME of a function without arguments, which returns "
            "(function or module, example arguments[, keywords])."
        ),
    ],
    require_all: Annotated[
        bool, typer.Option("--require-all", help="Exit code 1 if any attention is left.")
    ] = False,
) -> None:
    """Say what torch.compile(backend="fdattn") makes of each attention of a function, which is called once."""
    from torch_fdattn import explain as explain_function
    from torch_fdattn.cli.explain import load_case, table
    from torch_fdattn.cli.user_errors import one_line_of

    with one_line_errors():
        with one_line_of(target):
            fn, args, kwargs = load_case(target)
            report = explain_function(fn)(*args, **kwargs)
        any_text()
        stdout.write(table(report) + "\n")
    if require_all and report.left:
        raise typer.Exit(1)


@app.command()
def tune(
    out: Annotated[
        Path | None,
        typer.Option(help="The file; default TORCH_FDATTN_TABLES, else one in the cache folder."),
    ] = None,
    section: Annotated[
        str | None,
        typer.Option(
            help="Of attention_tiles and decode_splits on one device; under torchrun of dist_decode, "
            "ring_attention and tensor_parallel. Separated by commas; default all."
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="What it may take in all.")] = 5.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny shapes and few candidates: to see that it runs.")
    ] = False,
    device: Device = None,
) -> None:
    """Measure what is the fastest on this machine, for "auto" and the kernels' tiles to take."""
    from torch_fdattn.cli.tune import run

    with one_line_errors(), join(device) as world:
        run(world, out, section, minutes, quick)


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Say what this machine can run, and why not."""
    from torch_fdattn.doctor import main

    raise typer.Exit(main(json=json))
