# Two commands do everything: `make bench` and `make test`. Both make .venv, install, and run.
# TORCH names the torch to install where none is importable; a torch that is already there is used as it is.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

.PHONY: bench test sanitize golden readme clean

bench: $(VENV)/installed
	$(BIN)/python -m bench $(ARGS)

test: $(VENV)/installed
	$(BIN)/python -m pytest $(ARGS)

# compute-sanitizer over one small call per path; says so where there is no GPU
sanitize: $(VENV)/installed
	$(BIN)/python -m tests.sanitize $(ARGS)

golden: $(VENV)/installed
	$(BIN)/python -m pytest tests/unit/test_golden.py --update-golden

readme: $(VENV)/installed
	$(BIN)/python -m bench.readme

# with a torch already importable the environment sees it, and pip leaves it alone
$(VENV)/installed: pyproject.toml Makefile .ci/venv.py
	$(PYTHON) .ci/venv.py $(VENV) "$(TORCH)"
	$(BIN)/python -m pip install --disable-pip-version-check -e ".[toolchain,plot,test]"
	@touch $@

clean:
	rm -rf $(VENV)
