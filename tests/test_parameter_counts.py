"""Claims about sizes: the released totals of spec 2.5 and 12, from the shapes alone."""

import dataclasses
import math

import pytest
from golden_files import CASES, ROOT, read

from deepinfer_jax.checkpoint.tensor_names import parameter_specs, released_names
from deepinfer_jax.config import Config
from deepinfer_jax.parameter_counts import parameter_counts


def test_released_totals():
    counts = parameter_counts(Config.flash())
    assert counts.backbone == 552_366_103_664
    assert counts.engram_tables == 196_613_849_600
    assert counts.drafter == 14_225_362_530
    assert counts.total == 763_205_315_794
    assert counts.active_input == 7_894_958_080
    assert counts.active_output == 16_129_720_320
    assert counts.tensors == 96_085
    assert counts.nbytes == 510_286_023_000


def test_released_weights_by_kind():
    sizes = dict.fromkeys(("linear", "expert", "table", "bf16", "float32"), 0)
    for spec in parameter_specs(Config.flash()).values():
        sizes[spec.kind] += spec.size
    assert sizes["expert"] == 2 * 278_585_671_680  # two to an I8 byte
    assert sizes["linear"] + sizes["table"] == 204_015_223_296
    assert sizes["bf16"] == 1_976_441_856
    assert sizes["float32"] == 42_307_282


def test_drafter_split():
    specs = parameter_specs(Config.flash())
    drafter = {path: spec.size for path, spec in specs.items() if spec.part == "drafter"}
    matching = lambda text: sum(size for path, size in drafter.items() if text in path)  # noqa: E731
    assert matching(".ffn.experts.") == 13_589_544_960
    assert matching(".shared_experts.") == 106_168_320
    assert matching(".attn.") == 379_852_224
    assert matching(".main_") == 78_648_320
    assert matching(".markov_head.") == 66_191_360
    assert matching(".hc_") == 2_949_282
    assert matching(".gate.") == 1_966_848
    assert matching(".confidence_head.") == 5_376


@pytest.mark.filterwarnings("ignore:.*rule 1[56]")
@pytest.mark.parametrize("case", CASES)
def test_specs_name_exactly_the_tensors_of_a_golden_checkpoint(case):
    stored = read(ROOT / case / "model.safetensors")
    config = Config.read(ROOT / case)
    specs = parameter_specs(config)
    names = [name for path, spec in specs.items() for name in released_names(path, spec)]
    assert sorted(names) == sorted(name for name in stored if not name.endswith(".scale"))
    counts = parameter_counts(config)
    assert counts.tensors == len(stored)
    packed = sum(array.size for array in stored.values() if array.dtype == "int8")
    whole = sum(array.size for name, array in stored.items() if not name.endswith(".scale"))
    assert counts.total == whole + packed


def test_bytes_of_an_unquantised_model():
    config = dataclasses.replace(Config.flash(), quantized=False)
    specs = parameter_specs(config).values()
    expected = sum((4 if spec.kind == "float32" else 2) * math.prod(spec.shape) for spec in specs)
    assert parameter_counts(config).nbytes == expected
