# make demo, make test: everything they need is set up first.
#   PYTHON=python3   use an existing environment instead (nothing is installed)
# make aot: the kernels, compiled for all GPU generations with the oldest and the newest supported Triton.

VENV := .venv
TRITONS := 3.6.0 3.9.0
STAMP := $(VENV)/.installed
ifdef PYTHON
  RUN := PYTHONPATH=. $(PYTHON)
  READY :=
  AOT := aot-installed
else
  RUN := $(VENV)/bin/python
  READY := $(STAMP)
  AOT := $(TRITONS:%=aot-%)
endif
DEMO_PROFILE := build/demo.safetensors

.PHONY: demo test aot $(AOT) lint clean

demo: $(READY)
	$(RUN) -m calibrate.cli --model demo --budget-mse 1e-4 $(DEMO_LENGTHS) --out $(DEMO_PROFILE)
	$(RUN) scripts/run_patched.py $(DEMO_PROFILE)

# one thread in every worker: threads of several processes that wait for one another on few cores stand still
test: $(READY)
	if $(RUN) -c "import xdist" 2> /dev/null; \
	then OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --maxprocesses 4 --dist loadfile; \
	else $(RUN) -m pytest; fi

aot: $(AOT)

aot-installed:
	mkdir -p build
	$(RUN) tests/aot.py > build/$@.jsonl

$(TRITONS:%=aot-%): aot-%: build/triton-%/.installed
	PYTHONPATH=build/triton-$* $(VENV)/bin/python tests/aot.py > build/$@.jsonl

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

clean:
	rm -rf $(VENV) build dist *.egg-info

# torch first and exactly pinned, so that no newer one is pulled in by what needs it
$(STAMP): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet $$(grep -E '^torch==' constraints.txt)
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt --editable '.[calibrate,dev]'
	touch $@

$(TRITONS:%=build/triton-%/.installed): build/triton-%/.installed: | $(READY)
	rm -rf $(@D)
	$(VENV)/bin/python -m pip install --quiet --no-deps --target $(@D) triton==$*
	touch $@
