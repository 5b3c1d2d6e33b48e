# Everything runs in .venv, made from the locks by `make setup`. Paths are relative: the checkout may lie anywhere.
#   make test                        what CI runs: lint, types, tests
#   make demo                        synthetic videos -> shards -> four models, in demo/: see demo/index.html
#   make demo VIDEOS=DIR             shards and a contact sheet from your own videos
#   make test PYTHON=python3.13 VENV=.venv-313
#   make setup PART=prep VENV=.venv-prep    a part: prep; columns (prep with torch); train
#   make nightly                     the long tests that make test leaves out, and a campaign of faults
#   make torture MINUTES=60 SEED=1   faults on purpose: see tests/torture
#   make docs                        the documentation site, in build/site/
#   make pages                       opens the pages of `make demo` in Chromium, checks them, and takes the pictures of the documents
#   make peers                       what the benchmarks `decode`, `latents` and `search` compare with, in .venv-peers
#   make lerobot                     LeRobot, which `make nightly` compares with, in .venv-lerobot (8 GB)
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PARTS := prep columns train
PART ?=
$(if $(filter-out $(PARTS),$(PART)),$(error PART=$(PART) is not one of: $(PARTS)))
# The extras of each part. KubeRay runs its jobs by the extra cluster.
EXTRAS_prep := prep cluster
EXTRAS_columns := prep cluster columns
EXTRAS_train := train
LOCK := requirements$(addprefix -,$(PART)).lock
READY := $(VENV)/.ready$(addprefix -,$(PART))
UV_READY := $(VENV)/.uv-ready
UV := $(BIN)/uv
COMPILE := $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-annotate --no-emit-index-url --custom-compile-command "make lock" $(LOCK_FLAGS)
PYTEST_FLAGS ?=
BENCHMARKS ?= caption caption_pipeline chunk decode encoding latents losses mae manifest memory plan rerun search
PEERS_VENV := .venv-peers
LEROBOT_VENV := .venv-lerobot
PACKAGES := manifests shards prep train benchmarks scripts
# pip believes the certificates of the system; uv shall too.
export UV_SYSTEM_CERTS ?= 1

SEED ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup lint style types test pytest nightly torture demo docs pages peers lerobot benchmarks lock clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(READY)

$(UV_READY): requirements-uv.lock
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
		echo "error: $(PYTHON) does not run as Python 3.11, 3.12 or 3.13" >&2; \
		echo "hint: make setup PYTHON=python3.12" >&2; exit 2; }
	@"$(PYTHON)" scripts/setup_plan.py "$(VENV)" $(PART)
	@echo "setup 1/3: uv, which installs the packages"
	@"$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-uv.lock
	@touch $@

# Compiled at once, because every test and every Ray worker that starts a process would wait for it. The build
# backend comes from the lock as well, hence no build isolation.
$(READY): $(UV_READY) $(LOCK) pyproject.toml
	@rm -f $(VENV)/.ready*
	@echo "setup 2/3: the packages of $(LOCK), downloaded, unpacked and compiled"
	@$(UV) pip sync --python $(BIN)/python --require-hashes --compile-bytecode $(LOCK)
	@echo "setup 3/3: clipmill"
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@
	@echo "Ready: $(if $(PART),$(BIN)/$(firstword $(EXTRAS_$(PART))),$(BIN)/prep and $(BIN)/train. To see what they do: make demo)"

lint: style types

style: setup
	$(BIN)/ruff check .
	@$(BIN)/ruff check --quiet --select C901,PLR0913 --output-format concise --exit-zero $(PACKAGES)
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

# It prints once, at its end.
types: setup
	$(BIN)/python -m mypy

# From an empty cache mypy takes longer than any test, on one core: it runs beside them, and both run to their end.
test: style
	@$(MAKE) --no-print-directory --keep-going --jobs=2 types pytest

# One process more than there are cores, because a third of the time of the tests is waiting for others. A file stays in
# one process, which makes its runs and data once, and the files keep their order: the longest come first.
pytest: setup
	$(BIN)/python -m compileall -q $(PACKAGES)
	$(BIN)/python -m pytest --numprocesses $$(($$(nproc) + 1)) --maxprocesses 4 --dist loadfile \
		--no-loadscope-reorder $(PYTEST_FLAGS)

# What `make test` leaves out, and a campaign of all parts.
nightly: setup
	$(BIN)/python -m pytest -m nightly --numprocesses $$(nproc) --dist worksteal $(PYTEST_FLAGS)
	$(BIN)/python -m tests.torture --seed $(SEED) --cases points=100 damage=50 hostile=50 buckets=10 sources=75 \
		unfinished=20 variants=10 marks=10 runs=10 answers=10

torture: setup
	$(BIN)/python -m tests.torture --seed $(SEED) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(CASES),--cases $(CASES)) \
		$(if $(PART),--part $(PART)) $(if $(CASE),--case '$(CASE)') $(if $(KEEP),--keep) $(if $(JSON),--json "$(JSON)")

ifdef VIDEOS
# Some shells leave the ~ of an argument NAME=~/DIR alone.
ifneq ($(filter ~/%,$(firstword $(VIDEOS))),)
override VIDEOS := $(patsubst ~/%,$(HOME)/%,$(VIDEOS))
endif
# Exit code 1 of `prep chunk`: it has named the videos that failed, and the page shows the others.
demo: setup
	$(BIN)/prep manifest folder "$(VIDEOS)" --data demo/videos-data --yes
	$(BIN)/prep chunk --len 15s --data demo/videos-data; made=$$?; \
	[ $$made -le 1 ] || exit $$made; \
	$(BIN)/prep status --data demo/videos-data && \
	$(BIN)/prep inspect --html demo/videos.html --data demo/videos-data && \
	echo "Your videos as chunks: demo/videos.html" && \
	if [ $$made -eq 1 ]; then echo "Some videos failed: they are named above" >&2; exit 1; fi
else
demo: setup
	rm -rf demo/data demo/run demo/run-* demo/embedded demo/chunks.html demo/chunks.files demo/search.html demo/index.html
	$(BIN)/prep manifest synthetic --videos 40 --minutes 1 --data demo/data
	$(BIN)/prep chunk --len 15s --data demo/data
	$(BIN)/prep latents --vae tiny --size 64 --data demo/data
	$(BIN)/prep text --clip tiny --data demo/data
	$(BIN)/prep status --data demo/data
	$(BIN)/prep inspect --html demo/chunks.html --data demo/data
	$(BIN)/train dual-encoder --shards demo/data --preset tiny --evaluate.every 50 --out demo/run
	$(BIN)/train eval retrieval demo/run --shards demo/data
	$(BIN)/train embed demo/run --shards demo/data --split val --out demo/embedded
	$(BIN)/train search demo/embedded "a red circle moves to the left" "a green triangle grows" \
		"a yellow square moves up" --top 8 --page demo/search.html
	$(BIN)/train dual-encoder --shards demo/data --preset tiny-latents --out demo/run-latents
	$(BIN)/train eval retrieval demo/run-latents --shards demo/data
	$(BIN)/train mae --shards demo/data --preset tiny --steps 500 --out demo/run-mae
	$(BIN)/train eval probe demo/run-mae --shards demo/data --label motion --label shape --neighbours 5
	$(BIN)/train caption --shards demo/data --preset tiny --steps 250 --out demo/run-caption
	$(BIN)/train eval caption demo/run-caption --shards demo/data
	$(BIN)/train overview demo/run demo/run-latents demo/run-mae demo/run-caption --link demo/search.html \
		--out demo/index.html
	@echo "The chunks: demo/chunks.html    The results: demo/index.html    A search: demo/search.html"
endif

docs: setup
	$(BIN)/python -m scripts.site.build

pages: setup
	$(BIN)/python -m scripts.pages.build

# Other libraries need other versions than the lock has, hence an environment of their own.
peers: $(PEERS_VENV)/.ready

$(PEERS_VENV)/.ready: $(UV_READY) benchmarks/peers.txt
	$(UV) venv --quiet --clear --python $(BIN)/python $(PEERS_VENV)
	$(UV) pip install --quiet --python $(PEERS_VENV)/bin/python -r benchmarks/peers.txt
	@touch $@

lerobot: $(LEROBOT_VENV)/.ready

$(LEROBOT_VENV)/.ready: $(UV_READY) benchmarks/lerobot.txt
	$(UV) venv --quiet --clear --python $(BIN)/python $(LEROBOT_VENV)
	$(UV) pip install --quiet --python $(LEROBOT_VENV)/bin/python -r benchmarks/lerobot.txt
	@touch $@

benchmarks: setup
	for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name || exit; done

# After a change in pyproject.toml; pins that still fit stay. LOCK_FLAGS=--upgrade takes the newest of everything.
lock: $(UV_READY)
	$(COMPILE) --all-extras pyproject.toml --output-file requirements.lock
	echo uv | $(COMPILE) - --output-file requirements-uv.lock
	$(foreach part,$(PARTS),echo hatchling | $(COMPILE) $(addprefix --extra ,$(EXTRAS_$(part))) \
		--constraint requirements.lock pyproject.toml - --output-file requirements-$(part).lock &&) true

clean:
	rm -rf $(VENV) $(PEERS_VENV) $(LEROBOT_VENV) demo build .mypy_cache .ruff_cache .pytest_cache
