# make pretrain   set up and train the best MiniMind for ten minutes on the documentation inside Python (a CPU is enough);
#                 make pretrain BUDGET=1h: for an hour
# make chat       train a small model from scratch that answers questions on Python, within 20 minutes on two CPU cores
# make reference  the same text with settings that no machine changes: one figure everywhere, after 15 to 80 minutes on two cores
# make electra    set up and train a small ELECTRA
# make test       set up and run the quick tests; make test-core: those of the model, packing, the loop, resuming and the tour
# make test-all   all tests, with the slow ones
# make bench      set up and compare the training speed with the plain loop and the Hugging Face Trainer
# make lint       format, style, types and sizes; make clean: remove the environment, caches and the embedded corpora, not out/
# make gpu        check that training is correct and fast on this machine's GPU, in nine minutes; make gpu-speed: speed alone, in five
# make report     whether training works on this machine: a table to post, without names or paths, in two minutes
# make findings   what other libraries do that one would not guess (findings/README.md); installs each of them, outside the environment
# TORCH=cpu or TORCH=cuda chooses the build of PyTorch, TORCH_INDEX=... a package index for PyTorch alone.

PYTHON ?= python3
VENV   ?= .venv
RUN     = $(VENV)/bin/python

.PHONY: pretrain reference chat electra test test-core test-all bench report findings gpu gpu-speed lint clean

PIP     = $(RUN) -m pip install --quiet --disable-pip-version-check

# Without an NVIDIA GPU the CUDA build is useless, and pip's own index has no other for Linux.
TORCH ?= $(if $(shell command -v nvidia-smi),cuda,cpu)
ifeq ($(TORCH),cpu)
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
BUILD = the CPU (no nvidia-smi is seen, or TORCH=cpu): about 0.4 GB to download with all other packages
else
BUILD = NVIDIA GPUs: about 3 GB to download with all other packages; TORCH=cpu takes 0.4 GB
endif
PINNED_TORCH = $(shell grep -o '^torch==[0-9.]*' requirements.txt)

# If the index cannot be reached, pip's own may have the same build.
$(VENV)/.installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit("error: Python 3.11 or newer is needed, $(PYTHON) is older; name another: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	@echo "1. an environment: $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "2. PyTorch for $(BUILD)"
	@$(if $(TORCH_INDEX),$(PIP) --no-deps --retries 1 --timeout 10 --index-url $(TORCH_INDEX) $(PINNED_TORCH) || echo "PyTorch comes from pip's own index: $(TORCH_INDEX) does not give it")
	@echo "3. the packages of requirements.txt: some minutes without a line"
	@$(PIP) -r requirements.txt
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	@echo "4. the packages of requirements-dev.txt, for tests: some minutes without a line"
	@$(PIP) -r requirements-dev.txt
	@touch $@

# For a corpus of a few megabytes: a small model that sees it several times
SMALL = --hidden_size 256 --batch_size 8 --accumulation_steps 1 --epochs 4 --optimizer muon \
        --lr_schedule linear --val_fraction 0.02 --eval_interval 300 --log_interval 25

# The rates and initial weights of --budget's plans, with a decay for text that is read several times
RATES = --init_scheme induction --muon_lr 0.014 --learning_rate 8e-3 --embed_lr 16e-3 --weight_decay 0.3

# The training text, named explicitly so that no other file in dataset/ is trained instead
DOCUMENTATION = dataset/python_docs.jsonl
QUESTIONS     = dataset/python_questions.jsonl

$(DOCUMENTATION): | $(VENV)/.installed
	$(RUN) -c "from dataset.embedded_corpus import build_embedded_corpus; build_embedded_corpus('$@')"

$(QUESTIONS): | $(VENV)/.installed
	$(RUN) -c "from dataset.embedded_corpus import build_embedded_questions; build_embedded_questions('$@')"

# Commands typed by hand afterwards need the packages of this environment.
ACTIVATE = @echo "Before further commands: . $(VENV)/bin/activate"

# Prompts of the samples
PROMPTS = --sample_prompts "Return the" "class str"

# Time of the whole command, after the set-up
BUDGET ?= 10m

pretrain: $(VENV)/.installed $(DOCUMENTATION)
	$(RUN) trainer/train_pretrain.py --data_path $(DOCUMENTATION) --budget $(BUDGET) $(PROMPTS) $(ARGS)
	$(ACTIVATE)

reference: $(VENV)/.installed $(DOCUMENTATION)
	$(RUN) trainer/train_pretrain.py --data_path $(DOCUMENTATION) $(SMALL) $(RATES) $(PROMPTS) --save_weight reference $(ARGS)
	$(ACTIVATE)

# The same for both trainings of the chat, and small, so that they end in time on a CPU without bfloat16
CHAT = --hidden_size 192 --num_hidden_layers 4 --optimizer muon --lr_schedule linear --accumulation_steps 1 --log_interval 50

# Half a pass over the text is enough. The weights have their own name: others in out/ may be half-trained or have another tokenizer.
BASE = --batch_size 8 --max_updates 150 $(RATES) --save_weight chat_base

# Also without bfloat16, where it takes longer to pay; not on a Mac's GPU, where nobody has tried it
COMPILE = $(if $(filter Darwin,$(shell uname)),,--use_compile 1)

# Memorises a megabyte of questions, with high learning rates
ANSWERS = --batch_size 4 --epochs 6 --learning_rate 2e-3 $(COMPILE) --save_interval 500 --from_weight chat_base

# --from_resume 1 continues an interrupted run and leaves a finished one as it is.
# make chat ARGS="--from_resume 0" fine-tunes again.
chat: $(VENV)/.installed $(DOCUMENTATION) $(QUESTIONS)
	$(RUN) trainer/train_pretrain.py --data_path $(DOCUMENTATION) $(CHAT) $(BASE) $(PROMPTS) --from_resume 1
	$(RUN) trainer/train_sft.py --data_path $(QUESTIONS) $(CHAT) $(ANSWERS) --from_resume 1 --sample_prompts "What does str.join do?" $(ARGS)
	$(RUN) scripts/evaluate.py answers --weight out/full_sft_192.pth
	$(ACTIVATE)

# A small ELECTRA for a quarter of an hour on a CPU
ELECTRA = --hidden_size 128 --intermediate_size 512 --num_hidden_layers 4 --embedding_size 128 --init_std 0.1 --dropout 0 \
          --position_init sinusoidal --optimizer muon --muon_lr 0.006 --learning_rate 7e-4 --lr_schedule separate_linear \
          --max_seq_len 32 --max_steps 2000 --warmup_steps 100 --val_fraction 0.02 --log_interval 50

electra: $(VENV)/.installed
	$(RUN) trainer/train_electra.py $(ELECTRA) $(ARGS)
	$(ACTIVATE)

# Most machines have cores and memory for two processes. The tests of a file share fixtures, so they stay in one process.
# They begin in the order of tests/conftest.py: pytest-xdist would start with files of many tests and end with those of few slow ones.
PROCESSES = -n 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed-dev
	$(RUN) -m pytest $(PROCESSES) -m "not slow"

# Tests that most changes to the training can break
CORE = tests/model/test_training_losses.py tests/model/test_golden.py tests/dataset/test_packing.py tests/trainer/test_engine.py \
       tests/trainer/test_loop.py tests/trainer/test_tour.py tests/faults/test_resume.py

test-core: $(VENV)/.installed-dev
	$(RUN) -m pytest $(PROCESSES) -m "not slow" $(CORE)

test-all: $(VENV)/.installed-dev
	$(RUN) -m pytest $(PROCESSES) -rfEs --durations=30

bench: $(VENV)/.installed-dev
	$(RUN) benchmarks/bench.py $(ARGS)

# Nothing is installed: without an environment of `make pretrain` they use the PyTorch of the system's Python, as GPU images have it.
HAS_TORCH = $(if $(wildcard $(RUN)),$(RUN),$(PYTHON))

gpu:
	$(HAS_TORCH) benchmarks/check.py gpu $(ARGS)

gpu-speed:
	$(HAS_TORCH) benchmarks/check.py speed $(ARGS)

report: $(VENV)/.installed
	@$(RUN) benchmarks/check.py report $(ARGS)

findings:
	@for script in findings/*.sh; do echo "== $$script"; PYTHON=$(PYTHON) bash "$$script" || { echo "$$script: it behaves otherwise now"; exit 1; }; done

lint: $(VENV)/.installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) tests/ceiling.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis dataset/.token_store dataset/python_docs.jsonl dataset/python_questions.jsonl
