"""Into how many splits decode cuts its work: shares of an SM, over contiguous and paged caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn.launch.device import num_sms
from torch_fdattn.ops.attention import trials
from torch_fdattn.ops.decode import schedule
from torch_fdattn.ops.decode.inputs import Cache, DecodeCall
from torch_fdattn.ops.decode.launch import launch_decode
from torch_fdattn.ops.launch import padded
from torch_fdattn.ops.options import DecodeOptions
from torch_fdattn.ops.positions import Mask
from torch_fdattn.tune.session import Session, name_of

SECTION = "decode_splits"
#: Splits an SM that are tried besides the shipped number.
SHARES, QUICK_SHARES = (0.5, 1.0, 2.0, 3.0, 4.0), (1.0, 2.0)
PAGE = 16
#: Bytes of a cache at most.
MAX_BYTES = 4 << 30


class DecodeCase(NamedTuple):
    """A batch of sequences of kv_len keys each; few enough query heads a KV head that they are one block of rows."""

    head_dim: int
    paged: bool
    batch: int
    kv_len: int
    heads: int = 32
    kv_heads: int = 8

    @property
    def work_tiles(self) -> int:
        return self.batch * self.kv_heads

    def cache_bytes(self, itemsize: int) -> int:
        return 2 * self.work_tiles * self.kv_len * self.head_dim * itemsize

    def __str__(self) -> str:
        cache = "paged" if self.paged else "contiguous"
        return f"D{self.head_dim} {cache}, {self.work_tiles} work tiles of {self.kv_len} keys"


def measure(session: Session) -> list[dict]:
    entries: list[dict] = []
    cases = list(_cases(session))
    for number, case in enumerate(cases):
        if session.expired():
            session.note(f"{SECTION}: time is up after {number} of {len(cases)} cases")
            break
        entries += _entries(session, case)
    return entries


def _cases(session: Session) -> Iterable[DecodeCase]:
    if session.quick:
        yield DecodeCase(16, False, 1, 256, heads=2, kv_heads=1)
        yield DecodeCase(16, True, 2, 128, heads=2, kv_heads=1)
        return
    free, _ = torch.cuda.mem_get_info(session.device) if session.clock.on_gpu else (0, 0)
    limit = min(MAX_BYTES, free // 4)
    for head_dim in (128, 64):
        for paged in (False, True):
            for kv_len in (4096, 32768):
                for batch in (1, 4, 16, 64):
                    case = DecodeCase(head_dim, paged, batch, kv_len)
                    if case.cache_bytes(session.half.itemsize) <= limit:
                        yield case


def _entries(session: Session, case: DecodeCase) -> list[dict]:
    """The entry of a case; none where nothing could be timed."""
    sms = num_sms(session.device)
    shipped = schedule.target_splits(case.work_tiles, sms) / sms
    copies = session.clock.copies(case.cache_bytes(session.half.itemsize))
    made = [_drawn(session, case, seed) for seed in range(copies)]
    expected = _run(made[0], round(shipped * sms))()
    calls = {str(shipped): [_run(call, round(shipped * sms)) for call in made]}
    for share in QUICK_SHARES if session.quick else SHARES:
        runs = [_run(call, max(1, round(share * sms))) for call in made]
        results = session.clock.together(runs[0])
        if results is None or trials.difference(results, expected) is not None:
            session.note(
                f"{SECTION}: {case}: {share} splits an SM are left out: it raised, or its result differs"
            )
            continue
        calls.setdefault(str(share), runs)
    times = session.clock.compare(calls)
    if not times:
        session.note(f"{SECTION}: {case} is left out: nothing could be timed")
        return []
    about = dict(head_dim=padded(case.head_dim), dtype=name_of(session.half), paged=case.paged)
    sizes = dict(work_tiles=case.work_tiles, kv_len=case.kv_len)
    chosen = session.choose(SECTION, str(case), str(shipped), times)
    return [about | sizes | dict(splits_per_sm=float(chosen))]


def _drawn(session: Session, case: DecodeCase, seed: int) -> DecodeCall:
    made = torch.Generator(session.device).manual_seed(seed)
    new = partial(torch.randn, generator=made, device=session.device, dtype=session.half)
    lens = torch.full((case.batch,), case.kv_len, dtype=torch.int32, device=session.device)
    page_table, shape = None, (case.batch, case.kv_heads, case.kv_len, case.head_dim)
    if case.paged:
        pages = case.batch * (case.kv_len // PAGE)
        order = torch.randperm(pages, generator=made, device=session.device).to(torch.int32)
        page_table, shape = (
            order.view(case.batch, -1),
            (pages, case.kv_heads, PAGE, case.head_dim),
        )
    cache = Cache(new(shape), new(shape), page_table)
    q = new((case.batch, case.heads, 1, case.head_dim))
    return DecodeCall(q, cache, DecodeOptions(Mask(lens, window_right=0), case.head_dim**-0.5))


def _run(call: DecodeCall, target_splits: int) -> Callable[[], tuple[Tensor, Tensor]]:
    out = torch.empty_like(call.q)
    lse = call.q.new_empty(call.q.shape[:3], dtype=torch.float32)

    def run() -> tuple[Tensor, Tensor]:
        launch_decode(call, out, lse, target_splits=target_splits)
        return out, lse

    return run
