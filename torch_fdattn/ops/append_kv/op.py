"""The ops `fdattn::append_kv` and `fdattn::paged_append_kv`: new keys and values into a cache, in place.

    append_kv(k_cache!, v_cache!, k, v, kv_lens, …)                    -> ()
    paged_append_kv(k_cache!, v_cache!, page_table, k, v, kv_lens, …)  -> ()

Raw ops without a composite: what is written has no gradient. A compiled graph writes in place too, since
Inductor sees from the schema what is mutated.
"""

from __future__ import annotations

import torch

from torch_fdattn.launch import prepared
from torch_fdattn.launch.prepared import PreparedCall
from torch_fdattn.ops import library
from torch_fdattn.ops.append_kv.arguments import Append, check
from torch_fdattn.ops.append_kv.reference import writer_of

_OPTIONS = (
    "Tensor? new_lens=None, Tensor? k_scale=None, Tensor? v_scale=None, Tensor(c!)? q=None, "
    "Tensor? cos=None, Tensor? sin=None, Tensor? positions=None"
)


def _run(call: Append, key: tuple | None = None) -> None:
    known = prepared.checked(key)
    if known is None:
        check(call)
        # Both: keys in fp32 do not make a cache in bf16 right for the interpreter.
        if library.use_triton(call.k) and library.use_triton(call.k_cache):
            known = prepared.prepare(key)
        else:
            known = writer_of(call)
            prepared.remember(key, known)
    if not isinstance(known, PreparedCall):
        library.launches["append_kv/cpu"] += 1
        known(call)
        return
    from torch_fdattn.ops.append_kv.kernel import append_launches

    if known.by_driver(call):
        library.launches["append_kv/triton"] += 1
    else:
        known.run(call, append_launches(call))


def _append(k_cache, v_cache, k, v, kv_lens, *options):
    _run(Append(k_cache, v_cache, None, k, v, kv_lens, *options))


def _append_fake(k_cache, v_cache, k, v, kv_lens, *options):
    check(Append(k_cache, v_cache, None, k, v, kv_lens, *options))


def append_eagerly(*arguments) -> None:
    """The raw ops' kernel, with their page table in its place or None, where nobody sees them."""
    call = Append(*arguments)
    torch.autograd.graph.increment_version(
        [x for x in (call.k_cache, call.v_cache, call.q) if x is not None]
    )
    key = ("append_kv", *prepared.metadata(*call))
    if call.k_cache.is_cuda:
        _run(call, key)
    else:
        # As where the op is dispatched: the reference may write to inference tensors in any mode.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            _run(call, key)


library.define_raw(
    f"append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor kv_lens, {_OPTIONS}) -> ()",
    _append,
    _append_fake,
)
library.define_raw(
    "paged_append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor page_table, Tensor k, Tensor v, "
    f"Tensor kv_lens, {_OPTIONS}) -> ()",
    lambda *args: _run(Append(*args)),
    lambda *args: check(Append(*args)),
)
