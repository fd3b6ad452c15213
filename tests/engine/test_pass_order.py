"""A step of several passes: none reads pages that a later one stores."""

from __future__ import annotations

from tests.engine.expected import expect_greedy
from tests.engine.repeated import repeated as repeated
from tests.engine.tiny import greedy, random_model
from torch_fdattn.engine import LLM, SamplingParams
from torch_fdattn.engine.prompt_graphs import PromptGraphs

PAGE = 4


def slots(chunk, begin: int) -> set[tuple[int, int]]:
    """(page, place in it) of a chunk's sequence from position `begin` to the chunk's end."""
    pages = chunk.sequence.pages
    return {(pages[x // PAGE], x % PAGE) for x in range(begin, chunk.end)}


def record_readers(monkeypatch, llm, reading: str, storing: str) -> list[str]:
    """Fills up with the requests whose chunks of one kind ("decodes", "prefills") see what the other kind's of the step store."""
    forward, readers = llm._runner._forward, []

    def recorded(step):
        stored = {x for chunk in getattr(step, storing) for x in slots(chunk, chunk.start)}
        for chunk in getattr(step, reading):
            if slots(chunk, 0) & stored:
                readers.append(chunk.sequence.request.request_id)
        return forward(step)

    monkeypatch.setattr(llm._runner, "_forward", recorded)
    return readers


def test_a_decode_behind_a_chunk_of_its_step(device, monkeypatch):
    """Batch-invariant: a sequence that was preempted joins again, takes its whole prompt from pages that a chunk of the same
    step stores, and is one of the decodes."""
    model = random_model(device)
    llm = LLM(
        model, pages=8, page_size=PAGE, max_num_seqs=3, max_batch_tokens=11, max_model_len=32,
        batch_invariant=True, cuda_graph=False,
    )  # fmt: skip
    readers = record_readers(monkeypatch, llm, "decodes", "prefills")
    llm.add_request("long", [1, 2, 3, 4, 5], SamplingParams(temperature=0, max_tokens=27))
    two = SamplingParams(temperature=0, max_tokens=12, n=2)
    llm.add_request("two", list(range(20, 28)), two)  # a chunk, of two pages
    outputs = {}
    while llm.has_unfinished:
        outputs |= {output.request_id: output for output in llm.step()}
    assert readers == ["two"]
    for output in outputs.values():
        for completion in output.outputs:
            expect_greedy(model, output.prompt_token_ids, completion)


def test_a_captured_prompt_behind_a_decode_of_its_step(repeated, monkeypatch):
    """A prompt takes over a page whose last token a decode of the same step stores."""
    model = random_model("cpu")
    llm = LLM(model, max_num_seqs=4, max_model_len=40, pages=40, page_size=PAGE, run_ahead=False)
    runner = llm._runner
    runner._prompt_graphs = PromptGraphs(runner._prompts, runner.rows, 24)
    readers = record_readers(monkeypatch, llm, "prefills", "decodes")
    prompt, outputs = [5, 9, 33, 60, 2], {}
    llm.add_request("fills", prompt, SamplingParams(temperature=0, max_tokens=12))
    for _ in range(3):
        llm.step()
    # Seven are stored. The next step stores the eighth, which fills the second page.
    prefix = [*prompt, *greedy(model, prompt, 3)]
    llm.add_request("sees", [*prefix, 17, 18], SamplingParams(temperature=0, max_tokens=4))
    while llm.has_unfinished:
        outputs |= {output.request_id: output for output in llm.step()}
    assert readers == ["sees"]
    for output in outputs.values():
        expect_greedy(model, output.prompt_token_ids, output.outputs[0])
