"""What every test shares: the CPU by default, a compilation cache, a compile counter."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
CACHE = pathlib.Path(__file__).parent.parent / ".cache" / "jax"

# Compiling dominates the suite on two cores. The cache saves time and decides nothing.
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class CompileCounter:
    """Number of programs handed to the compiler, whether or not the disk cache then has them."""

    def __init__(self):
        self.count = 0

    def __call__(self, event: str, duration: float, **_):
        """Receive one of JAX's timing events."""
        self.count += event == COMPILE_EVENT


@pytest.fixture(scope="module", autouse=True)
def programs_end_with_their_module():
    """Hundreds of compiled programs in one process end in a segmentation fault (jaxlib 0.12)."""
    yield
    jax.clear_caches()


@pytest.fixture
def compile_counter():
    """A counter whose `count` grows by one for each program compiled while the test runs."""
    counter = CompileCounter()
    jax.monitoring.register_event_duration_secs_listener(counter)
    yield counter
    jax.monitoring.unregister_event_duration_listener(counter)
