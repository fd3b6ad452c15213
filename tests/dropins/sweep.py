"""Every causal, sequence-to-sequence and encoder class of transformers' under `attn_implementation="fdattn"`.

    python -m tests.dropins.sweep [CLASS …]

A tiny random model of each class is compared with itself under "eager": without padding, padded on either side,
and in greedy text. Of causal ones a later token must not change earlier logits. `make sweep` writes sweep.md.
"""

from __future__ import annotations

import contextlib
import io
import logging
import multiprocessing
import signal
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from tests.dropins.tiny_models import classes, pair
from torch_fdattn.dropins import transformers as dropin
from torch_fdattn.ops.library import launches

LENGTH, PADDED, NEW = 20, 5, 4
TOLERANCE = 2e-3  #: of the largest logit
SECONDS = 90
VERDICTS = ("taken", "refused", "no attention of ours", "not built", "DIFFERENT")


@dataclass
class Found:
    """What became of one class: its verdict, and remarks on what eager does, too."""

    name: str
    use: str
    verdict: str = "taken"  #: one of VERDICTS
    reason: str = ""
    remarks: list[str] = field(default_factory=list)

    def row(self) -> str:
        said = "; ".join(x for x in (self.reason, *self.remarks) if x)
        return f"| {self.name} | {self.use} | {self.verdict} | {said} |"


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:240].replace("|", "\\|")


class Refused(Exception):
    """An error of ours where eager has none."""


class Different(Exception):
    """Numbers that differ where nothing was said."""


def logits(model, seq2seq: bool, ids, mask=None, **more):
    options = {**more}
    if mask is not None:
        options["attention_mask"] = mask
    if seq2seq:
        target = options.pop("target", ids)
        options["decoder_input_ids"] = target
        if mask is not None and target.shape == mask.shape:
            options["decoder_attention_mask"] = mask
    with torch.no_grad():
        out = model(ids, **options)
    for name in ("logits", "prediction_logits", "last_hidden_state"):
        if getattr(out, name, None) is not None:
            return getattr(out, name)
    return out[0]


def compared(name: str, ours, eager) -> None:
    if ours.shape != eager.shape:
        raise Different(f"{name}: shapes {tuple(ours.shape)} and {tuple(eager.shape)}")
    ours, eager = ours.float(), eager.float()
    error = (ours - eager).abs().max() / eager.abs().max().clamp_min(1e-6)
    if not error <= TOLERANCE:
        raise Different(f"{name}: off by {error:.1e}")


def tried(call, *arguments, **options):
    """(result, error) with nothing printed."""
    try:
        return call(*arguments, **options), None
    except Exception as error:
        return None, error


def ask(model_class: type, use: str, changes: dict | None = None) -> Found:
    found = Found(model_class.__name__, use)
    try:
        eager, ours = pair(model_class, changes)
    except KeyError as error:
        built = error.args != ("fdattn",)
        found.verdict, found.reason = (
            ("not built", first_line(error))
            if built
            else (
                "refused",
                'by transformers: its table of attention classes has no "fdattn" (KeyError)',
            )
        )
        return found
    except Exception as error:
        found.verdict, found.reason = "not built", first_line(error)
        return found
    try:
        compare(found, eager, ours)
    except Refused as error:
        found.verdict, found.reason = "refused", str(error)
    except Different as error:
        found.verdict, found.reason = "DIFFERENT", str(error)
    return found


def compare(found: Found, eager, ours) -> None:
    seq2seq = found.use == "seq2seq"
    causal = found.use in ("causal", "seq2seq")
    torch.manual_seed(1)
    ids = torch.randint(5, 90, (2, LENGTH))
    launches.clear()

    def both(name, *arguments, at=None, **options):
        """Eager's and ours, compared; None where eager fails by itself."""
        wanted, error = tried(logits, eager, seq2seq, *arguments, **options)
        if error is not None:
            found.remarks.append(f"{name}: eager raises {first_line(error)}")
            return None
        mine, error = tried(logits, ours, seq2seq, *arguments, **options)
        if error is not None:
            raise Refused(f"{name}: {first_line(error)}")
        compared(name, *((x if at is None else x[at]) for x in (mine, wanted)))
        return wanted, mine

    plain = both("plain", ids)
    if plain is None:
        found.verdict = "not built"
        return
    again, _ = tried(logits, eager, seq2seq, ids)
    if not torch.allclose(again, plain[0]):
        found.verdict, found.reason = "not built", "eager's own results change from run to run"
        return
    if not sum(launches.values()):
        found.verdict, found.reason = (
            "no attention of ours",
            "none of its attention is asked of the interface",
        )
    if causal and plain[0].shape[1] == LENGTH:
        later = ids.clone()
        later[:, 12:] = (later[:, 12:] + 7) % 80 + 5
        options = {"target": later} if seq2seq else {}
        source = ids if seq2seq else later
        changed = [tried(logits, m, seq2seq, source, **options)[0] for m in (eager, ours)]
        own = [
            (b[:, :12] - a[:, :12]).abs().max() <= TOLERANCE * a.abs().max()
            for a, b in zip(plain, changed, strict=True)
        ]
        if not own[0]:
            found.remarks.append("not causal, under eager either")
        if own[0] and not own[1]:
            raise Different("a later token changes earlier logits")
    for side in ("left", "right"):
        mask = torch.ones_like(ids)
        mask[0, slice(0, PADDED) if side == "left" else slice(-PADDED, None)] = 0
        padded = ids * mask
        real = slice(PADDED, None) if side == "left" else slice(0, LENGTH - PADDED)
        whole = plain[0].shape[1] == LENGTH
        result = both(f"padded {side}", padded, mask, at=mask.bool() if whole else None)
        if result is None or not whole:
            continue
        alone, error = tried(logits, eager, seq2seq, ids[:1, real])
        if error is None and not torch.allclose(
            alone[0], result[0][0, real], rtol=TOLERANCE, atol=TOLERANCE * alone.abs().max().item()
        ):
            found.remarks.append(f"padded {side} is not unpadded, under eager either")
    if causal and hasattr(eager, "generate"):
        options = {
            "max_new_tokens": NEW,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        mask = torch.ones_like(ids)
        mask[0, :PADDED] = 0
        for name, cache in (
            ("dynamic", {}),
            ("static", {"cache_implementation": "static", "disable_compile": True}),
        ):
            wanted, error = tried(
                eager.generate, ids * mask, attention_mask=mask, **options, **cache
            )
            if error is not None:
                found.remarks.append(f"text, {name} cache: eager raises {first_line(error)}")
                continue
            mine, error = tried(ours.generate, ids * mask, attention_mask=mask, **options, **cache)
            if error is not None:
                raise Refused(f"text, {name} cache: {first_line(error)}")
            if not torch.equal(mine, wanted):
                raise Different(f"text, {name} cache: other tokens")


def _worker(number: int) -> Found:
    model_class, use = list(classes().items())[number]

    def too_long(*_):
        raise TimeoutError(f"took more than {SECONDS} s")

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return ask(model_class, use)
    except BaseException as error:
        return Found(model_class.__name__, use, "not built", first_line(error))
    finally:
        signal.alarm(0)


def _quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    transformers.logging.set_verbosity(50)
    torch.set_num_threads(1)
    dropin.register()


def swept(names: list[str], processes: int = 2) -> list[Found]:
    everything = list(classes())
    chosen = [i for i, one in enumerate(everything) if not names or one.__name__ in names]
    with multiprocessing.get_context("spawn").Pool(processes, _quiet, maxtasksperchild=60) as pool:
        results = []
        for found in pool.imap_unordered(_worker, chosen):
            print(found.row(), flush=True)
            results.append(found)
    return sorted(results, key=lambda one: one.name)


def table(results: list[Found]) -> str:
    counted = Counter(one.verdict for one in results)
    totals = ", ".join(f"{counted[verdict]} {verdict}" for verdict in VERDICTS)
    return "\n".join(
        (
            '# transformers\' models under `attn_implementation="fdattn"`',
            "",
            f"`make sweep`: every class of the auto-mappings of causal, sequence-to-sequence and masked language models and of "
            f"text encoders, tiny, random weights, fp32 on a CPU, torch {torch.__version__.split('+')[0]}, transformers "
            f"{transformers.__version__}. Of {len(results)} classes: {totals}.",
            "",
            'Each is compared with itself under "eager": without padding, padded on either side (at real tokens), and in '
            "greedy text over a dynamic and a static cache; of causal ones a later token must not change earlier logits. "
            'What eager does too is the model\'s own doing. "no attention of ours": the name is accepted, and the model '
            'attends by itself, as under eager. "not built": the script\'s shrinking does not suit the class, or eager '
            "itself does not run.",
            "",
            "| class | use | verdict | why, and what eager does too |",
            "|---|---|---|---|",
            *(one.row() for one in results),
            "",
        )
    )


def main() -> int:
    names = sys.argv[1:]
    results = swept(names)
    counted = Counter(one.verdict for one in results)
    print(dict(counted))
    if not names:
        (Path(__file__).parent / "sweep.md").write_text(table(results), encoding="utf-8")
    return 1 if counted["DIFFERENT"] else 0


if __name__ == "__main__":
    sys.exit(main())
