# Two commands: `make demo` and `make test`. Each makes the virtual environment it needs, once.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
STAMP   = $(VENV)/.installed
PEERS   = runs/peers

.PHONY: demo test check clean docs bench-methods bench-attacks bench-verdict

demo: $(STAMP)
	$(BIN)/steelman demo

# Doctests of the package, then the tests. There is one process more than cores, for some tests wait for others.
test: $(STAMP) check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --doctest-modules src tests -n $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --dist worksteal

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The tables that the documentation takes from the registries.
docs: $(STAMP)
	$(BIN)/python docs/generate.py

# Every objective on MNIST, three seeds (about an hour on two cores); interrupted, it goes on where it was.
bench-methods: $(STAMP)
	$(BIN)/steelman data get mnist
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/methods_mnist.py

# Every attack beside torchattacks, foolbox and ART, on 1,000 images of two models (over an hour on two cores).
bench-attacks: $(STAMP) $(PEERS)
	$(BIN)/steelman data get mnist
	$(BIN)/steelman data get cifar10
	PYTHONPATH=$(PEERS) $(BIN)/python benchmarks/attacks.py

# The verdict beside AutoAttack (about two and a half hours on two cores, most of it AutoAttack's);
# interrupted, it goes on at the next part.
bench-verdict: $(STAMP) $(PEERS)
	$(BIN)/steelman data get mnist
	$(BIN)/steelman data get cifar10
	PYTHONPATH=$(PEERS) $(BIN)/python benchmarks/verdict.py --all

$(PEERS): benchmarks/peers.txt | $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps --target $(PEERS) --upgrade -r benchmarks/peers.txt
	touch $(PEERS)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit("steelman needs Python 3.11 or newer, found " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt torch setuptools
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) runs build dist
