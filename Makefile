# Every target sets up .venv by itself.
#   make demo    train a real network on two ranks and show how it went
#   make test    check, then all tests
#   make coverage    the same tests, counting the lines they run
#   make check   format, lint and types
#   make docs    build the site of these pages into build/site
#   make pictures    draw the pages' pictures again
#   make bench   step times against DDP, ZeRO and FSDP2, interleaved

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test coverage check docs pictures bench

demo: .venv/ready
	$(BIN)/syncline train examples/digits.toml --report demo.html

test: check
	$(BIN)/pytest -n 4 --dist worksteal

coverage: check
	rm -f .coverage .coverage.*
	$(BIN)/coverage run -m pytest -n 4 --dist worksteal
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: .venv/ready
	$(BIN)/python -m website

pictures: .venv/ready
	$(BIN)/python -m website.pictures

bench: .venv/ready
	$(BIN)/python -m benchmarks.step --check

# torch first, from the pinned version alone: a range would fetch a build with several GB of CUDA.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[data,dev,docs]'
	touch $@
