"""Imports go one way: pallas_kernels and sharding know only jax; deepinfer_jax knows those two."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
ARRAYS = {"jax", "jaxlib", "numpy", "einops", "ml_dtypes"}
ALLOWED = {
    "pallas_kernels": ARRAYS | {"pallas_kernels"},
    "sharding": ARRAYS | {"sharding"},
}


def imports(path):
    """Top-level names of everything a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


def files(package):
    """Every Python file of a package; a package without files would make a test say nothing."""
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"{package} has no files"
    return found


@pytest.mark.parametrize("package", ALLOWED)
def test_lower_packages_import_only_arrays(package):
    allowed = ALLOWED[package] | sys.stdlib_module_names
    for path in files(package):
        assert set(imports(path)) <= allowed, path


def test_library_does_not_import_tests_or_benchmarks():
    outside = {"tests", "benchmarks", "notebooks", "training", "paper", "golden_files", "pytest"}
    for path in files("deepinfer_jax"):
        assert outside.isdisjoint(imports(path)), path


@pytest.mark.parametrize("folder", ["deepinfer_jax", "pallas_kernels", "sharding", "tests"])
def test_torch_is_nowhere(folder):
    for path in files(folder):
        assert {"torch", "torchvision", "tensorflow"}.isdisjoint(imports(path)), path


def test_relative_imports_are_not_used():
    for package in ("deepinfer_jax", "pallas_kernels", "sharding"):
        for path in files(package):
            levels = [
                n.level
                for n in ast.walk(ast.parse(path.read_text()))
                if isinstance(n, ast.ImportFrom)
            ]
            assert not any(levels), path


def modules_after(statement):
    code = f"{statement}\nimport sys\nprint(*sorted(m.split('.')[0] for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_library_stays_light():
    # flax.nnx imports optax by itself, so only what we add to it is ours.
    added = modules_after("import deepinfer_jax") - modules_after("from flax import nnx")
    assert "deepinfer_jax" in added
    heavy = {"matplotlib", "optax", "tokenizers", "orbax", "huggingface_hub", "IPython", "tqdm"}
    assert not added & heavy
