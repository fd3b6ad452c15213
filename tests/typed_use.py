"""The public API as a typed program uses it: `mypy --strict` has nothing to say of this file (test_packaging.py).

Not run: what the calls do is other tests' matter.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import torch_fdattn
from torch_fdattn.compile_backend.report import Report
from torch_fdattn.dist import SequenceShards, ShardedKVCache, ShardMap
from torch_fdattn.engine import (
    LLM,
    Chat,
    PagedKVCache,
    SamplingParams,
    Stats,
    stream_text,
)
from torch_fdattn.models import ModelConfig, Tokenizer, Transformer, load_model, load_tokenizer


def functional_ops(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, table: Tensor) -> Tensor:
    out, lse = torch_fdattn.attention(q, k, v, lens, causal=True, window=(128, 0), softcap=30.0)
    packed, _ = torch_fdattn.varlen_attention(q[0], k[0], v[0], lens, causal=True, dropout_p=0.1)
    q8, scales = torch_fdattn.quantise_per_head(q)
    eighths, _ = torch_fdattn.attention_fp8(
        q8, q8, q8, scales, scales, scales, lens, causal=True, out_dtype=torch.float16
    )
    workspace: Tensor = torch_fdattn.decode_workspace(q, k, v)
    one, one_lse = torch_fdattn.decode(q, k, v, lens, out=(out, lse), workspace=workspace)
    paged, _ = torch_fdattn.paged_decode(q, k, v, table, lens, scale=0.5)
    torch_fdattn.append_kv(k, v, k, v, lens, cos=q, sin=q)
    torch_fdattn.paged_append_kv(k, v, table, k, v, lens)
    merged, _ = torch_fdattn.merge_states(
        torch.stack([out, one]), torch.stack([lse, one_lse]), dtype=torch.float32
    )
    torch_fdattn.set_deterministic(True)
    with torch_fdattn.tiles("forward", block_m=64, num_warps=4), torch_fdattn.autotune():
        pass
    return merged + packed + paged + eighths


def over_ranks(
    q: Tensor, k: Tensor, v: Tensor, lens: Tensor, group: dist.ProcessGroup, mesh: DeviceMesh
) -> Tensor:
    out, _ = torch_fdattn.dist.decode(q, k, v, lens, mesh, strategy="ring")
    shards = SequenceShards.zigzag(1024, dist.get_world_size(group))
    mine, _ = torch_fdattn.dist.ring_attention(q, k, v, group, shards=shards)
    every: Tensor = torch_fdattn.dist.one_sided_all_gather(q, None)
    y: list[Tensor] = torch_fdattn.dist.all_gather_matmul(q, [k, v], group.group_name)
    y.append(torch_fdattn.dist.matmul_reduce_scatter(q, k, group.group_name))
    y.append(torch_fdattn.dist.matmul_all_reduce(q, k, group.group_name))
    normed, _ = torch_fdattn.dist.matmul_all_reduce_rms_norm(q, k, group.group_name, q, v, 1e-6)
    cache = ShardedKVCache(2, 1, 8, 4096, 128, dtype=torch.float16, device="cpu")
    cache.append(0, k, v)
    y.append(cache.attend(0, q))
    cache.advance(1)
    held: int = ShardMap(0, 2, 16).local_capacity(4096)
    layer = torch_fdattn.dist.DistributedDecodeAttention(
        1, 8, 4096, 128, dtype=torch.float16, device="cpu"
    )
    y.append(layer(q, k, v))
    strategy: str = torch_fdattn.dist.chosen_strategy(q, group.group_name)
    tokens, labels = torch_fdattn.dist.shard_batch(group.group_name, shards, q, k)
    with torch_fdattn.dist.context_parallel(group.group_name, shards=shards, strategy=strategy):
        (whole,) = torch_fdattn.dist.unshard_batch(group.group_name, shards, tokens)
    torch_fdattn.dist.set_timeout(10.0)
    try:
        torch_fdattn.dist.check()
    except torch_fdattn.dist.PeerTimeout:
        raise
    return out + mine + every + normed + labels[:held] + whole


def language_models(folder: Path, mesh: DeviceMesh) -> nn.Module:
    model: Transformer = load_model(folder, dtype=torch.bfloat16, device="cuda")
    config: ModelConfig = model.config
    logits: Tensor = model(torch.zeros(1, 8, dtype=torch.long))
    print(config.num_layers, logits.shape)
    return torch_fdattn.models.parallelize(model, mesh)


def generation(model: Transformer, folder: Path) -> str:
    tokenizer: Tokenizer = load_tokenizer(folder)
    drawn: list[int] = []
    stats = Stats()
    for output in LLM(model, kv_dtype="int8").generate([tokenizer.encode("Hello")]):
        drawn += output.outputs[0].token_ids
    cache = PagedKVCache(2, 1, 8, 4096, 128, dtype=torch.float16, device="cpu")
    llm = LLM(model, tokenizer, max_num_seqs=1)
    text: str = "".join(stream_text(llm, "Hello", SamplingParams(max_tokens=8), stats=stats))
    chat = Chat(llm, system="Be brief.")
    print(text, stats.tokens_per_s, cache.held, "".join(chat.reply("Hello")))
    return tokenizer.decode(drawn)


def compiling(model: nn.Module, x: Tensor) -> Report:
    compiled = torch.compile(model, backend=torch_fdattn.compile_backend.fdattn)
    compiled(x)
    report: Report = torch_fdattn.explain(model)(x)
    again: Report = torch_fdattn.compile_backend.explain(model, tensor_parallel="off")(x)
    print(again, report.fdattn_calls)
    return report


def dropins() -> str:
    torch_fdattn.dropins.transformers.register()
    return torch_fdattn.__version__
