"""The options that commands share: their types, limits and help."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from typer.models import OptionInfo

from torch_fdattn.cli.setup import (
    SERVED_PROMPT_GRAPH_TOKENS,
    DType,
    KVDType,
    KVStrategy,
    TPStrategy,
)


def _one_of(kind: type[StrEnum], what: str) -> OptionInfo:
    """An option with names to choose from, in its help: as the option's type a table breaks them in mid-word."""
    return typer.Option(metavar="<name>", help=f"{what} One of {', '.join(kind)}.")


Model = Annotated[
    str, typer.Option(help="Folder with safetensors, .gguf file, hub id, or smollm2.")
]
MaxNewTokens = Annotated[int, typer.Option(min=1, max=2**31 - 1)]
Temperature = Annotated[float, typer.Option(min=0.0, help="0: greedy.")]
TopP = Annotated[float, typer.Option(max=1.0, help="Draw from this share of the mass.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text.")]
DTypeOption = Annotated[DType, _one_of(DType, "auto: the checkpoint's.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …")]
KVDTypeOption = Annotated[
    KVDType, _one_of(KVDType, "How K and V are stored; auto: in the model's dtype.")
]
StrategyOption = Annotated[
    KVStrategy, _one_of(KVStrategy, "How ranks that share the cache merge their results.")
]
TensorParallel = Annotated[
    int, typer.Option(min=1, help="Ranks that split the model; the others split the cache.")
]
TPStrategyOption = Annotated[
    TPStrategy,
    _one_of(TPStrategy, "Activations replicated, or sharded along tokens; auto: as measured."),
]
MaxNumSeqs = Annotated[int, typer.Option(min=1, help="Completions in a step.")]
MaxBatchTokens = Annotated[int, typer.Option(min=1, help="Tokens of a step, prompts included.")]
MaxModelLen = Annotated[
    int | None, typer.Option(min=1, help="Tokens of a prompt with its answer; default the model's.")
]
Pages = Annotated[
    int | None, typer.Option(min=1, help="Pages of the KV cache; default what the memory holds.")
]
PageSize = Annotated[int, typer.Option(min=1, max=2**30, help="Positions of a page of one rank.")]
PrefixCaching = Annotated[
    bool,
    typer.Option("--prefix-caching/--no-prefix-caching", help="Keep prompts' pages for others."),
]
NgramTokens = Annotated[
    int,
    typer.Option(min=0, max=15, help="Tokens proposed by n-grams in a step; 0: no speculation."),
]
PromptGraphTokens = Annotated[
    int,
    typer.Option(
        min=0, help="Capture passes of prompts of up to so many tokens in CUDA graphs; 0: none."
    ),
]
ServedPromptGraphTokens = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Capture passes of prompts of up to so many tokens in CUDA graphs; 0: none. Default: "
        f"{SERVED_PROMPT_GRAPH_TOKENS} on one GPU of sm_90 without --kv-dtype, else 0.",
    ),
]
ApiKey = Annotated[
    str | None, typer.Option(envvar="FDATTN_API_KEY", help="What clients send as a bearer token.")
]
