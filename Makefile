# The only entry: `make run` for the product, `make test` for every check.
.PHONY: run test lint format accuracy retrace dockerfile

run: .venv/.installed
	@scripts/run.sh

test: .venv/.installed-dev
	@scripts/test.sh

lint: .venv/.installed-dev
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy

format: .venv/.installed-dev
	@.venv/bin/ruff check --fix . && .venv/bin/ruff format .

accuracy: .venv/.installed
	@.venv/bin/python scripts/write_accuracy_doc.py
	@.venv/bin/python scripts/write_readme_figures.py
	@.venv/bin/python scripts/write_zero_doc.py
	@.venv/bin/python scripts/write_throughput_doc.py
	@.venv/bin/python scripts/write_ranking_doc.py
	@.venv/bin/python scripts/write_kernels_doc.py
	@.venv/bin/python scripts/write_serving_doc.py
	@.venv/bin/python scripts/write_quality_doc.py

# Trace every template again and name every difference (an hour of processor time).
retrace: .venv/.installed
	@.venv/bin/python -m runners.trace.build --check $(FAMILIES)

dockerfile: .venv/.installed-dev
	@.venv/bin/python scripts/check_dockerfile.py

.venv/.installed: pyproject.toml
	@scripts/setup.sh

.venv/.installed-dev: pyproject.toml
	@scripts/setup.sh dev
