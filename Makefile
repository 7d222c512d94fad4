# make demo         text from the embedded checkpoint, with the time of each step
# make test         linter and the fast tests
# make lint         linter only
# make test-oldest  golden tests on the oldest supported JAX, in an environment of its own
# make setup        only prepares the environment; the others do it by themselves

VENV = .venv
BIN = $(VENV)/bin
OLDEST = jax==0.11.2 jaxlib==0.11.2 flax==0.12.10
PROMPT = The Python interpreter
# A file's tests stay together: they share models and compiled programs.
WORKERS = -n auto --maxprocesses 4 --dist loadfile

.PHONY: setup demo lint test test-oldest

setup:
	@scripts/setup.sh $(VENV)

demo: setup
	@began=$$(date +%s); $(BIN)/python -m deepinfer_jax.cli generate "$(PROMPT)" --seed 3; \
	code=$$?; echo "with imports $$(( $$(date +%s) - began )) s in all" >&2; exit $$code

lint: setup
	@$(BIN)/python -m ruff check .

test: lint
	@$(BIN)/python -m pytest $(WORKERS)

test-oldest:
	@scripts/setup.sh $(VENV)-oldest $(OLDEST)
	@$(VENV)-oldest/bin/python -m pytest $(WORKERS) -m "golden and not slow and not gpu"
