"""GPUs: every number has a source, peaks are dense, memory follows the rule, names resolve."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.catalog import tables
from trainwright.catalog.gpus import FORMATS, MIB_PER_LABEL_GB, NUMBERS, gpu_rows, names, spec_of
from trainwright.catalog.load import list_gpus, load_gpu
from trainwright.errors import SpecError

ROWS = tables.rows("gpus.csv")
IDS = [row["id"] for row in ROWS]


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_every_row_has_a_source_and_whole_numbers_in_range(row: dict[str, str]) -> None:
    gpu = spec_of(row)
    assert row["source"]
    assert row["confidence"]
    assert row["vendor"]
    assert gpu.hbm_bytes_per_s > 1e11
    assert 8 * 2**30 < gpu.capacity_bytes < 600 * 2**30
    assert gpu.nic_default_gbps > 0
    assert gpu.pcie_bytes_per_s > 1e10
    assert gpu.compute_units > 0
    assert gpu.gpus_per_node >= 1
    assert gpu.scaleup_gpus >= 1
    assert all(1e12 < peak < 2e16 for peak in gpu.peak_flops.values())
    if gpu.link_pair_bytes_per_s is not None:
        assert gpu.link_pair_bytes_per_s < gpu.link_bytes_per_s


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_what_nobody_published_is_marked_as_assumed(row: dict[str, str]) -> None:
    """A round default that stands in for a missing figure is named in the notes."""
    if row["nic_default_gbps"] == "12.5" and row["id"] not in ("A10G-24GB", "L4-24GB"):
        assert "Assumed, not published" in row["notes"]


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_peaks_are_dense_and_narrower_formats_are_never_slower(row: dict[str, str]) -> None:
    peaks = spec_of(row).peak_flops
    order = [peaks[f] for f in ("fp32", "bf16", "fp8", "fp4") if f in peaks]
    assert order == sorted(order)
    if "bf16" in peaks and "fp8" in peaks:
        assert 1 <= peaks["fp8"] / peaks["bf16"] < 2.03
    if "fp16" in peaks and "bf16" in peaks:
        assert peaks["fp16"] == peaks["bf16"]


# torchtitan's get_peak_flops (torchtitan/tools/utils.py), dense bf16; the two dies of an MI250X are two devices there as well.
TORCHTITAN = {
    "A100-SXM-80GB": 312e12,
    "H100-NVL-94GB": 835e12,
    "H100-PCIe-80GB": 756e12,
    "H100-SXM-80GB": 989e12,
    "H200-SXM-141GB": 989e12,
    "B200-SXM-180GB": 2250e12,
    "MI300X": 1300e12,
    "MI325X": 1300e12,
    "MI250X": 191.5e12,
    "L40S-48GB": 362e12,
}


@pytest.mark.parametrize("gpu", TORCHTITAN)
def test_dense_peaks_agree_with_an_independent_table(gpu: str) -> None:
    assert load_gpu(gpu).peak("bf16") == pytest.approx(TORCHTITAN[gpu], rel=0.01)


def test_a_gpu_without_the_format_computes_in_a_wider_one() -> None:
    assert load_gpu("A100-SXM-80GB").peak("fp8") == load_gpu("A100-SXM-80GB").peak("bf16") == 312e12


@pytest.mark.parametrize(
    ("gpu", "mib"),
    [("H100-SXM-80GB", 81559), ("A100-SXM-80GB", 81920), ("H200-SXM-141GB", 143771), ("B200-SXM-180GB", 183359), ("L4-24GB", 23034)],
)
def test_memory_is_the_total_of_nvidia_smi(gpu: str, mib: int) -> None:
    assert load_gpu(gpu).capacity_bytes == mib * 2**20


@pytest.mark.parametrize(("gpu", "label"), [("MI300X", 192), ("H100-SXM-96GB", 96), ("GB300-NVL72", 279)])
def test_memory_that_nobody_published_follows_the_label(gpu: str, label: int) -> None:
    assert load_gpu(gpu).capacity_bytes == label * MIB_PER_LABEL_GB * 2**20


@pytest.mark.parametrize("gpu", ["H100-SXM-80GB", "A100-SXM-80GB", "B200-SXM-180GB"])
def test_links_are_one_way(gpu: str) -> None:
    """The headline (900, 600, 1,800 GB/s) is the sum of both directions."""
    assert load_gpu(gpu).link_bytes_per_s == {"H": 450e9, "A": 300e9, "B": 900e9}[gpu[0]]


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("h100", "H100-SXM-80GB"), ("h100_80gb", "H100-SXM-80GB"), ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"), ("H100-80GB", "H100-SXM-80GB"),
        ("A100-40GB", "A100-SXM-40GB"), ("a100", "A100-SXM-80GB"), ("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB"), ("gb200", "GB200-NVL72"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"), ("AMD Instinct MI300X", "MI300X"), ("NVIDIA GeForce RTX 4090", "RTX-4090-24GB"),
        ("  H200 ", "H200-SXM-141GB"), ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"), ("B200", "B200-SXM-180GB"),
    ],
)  # fmt: skip
def test_names_that_people_and_nvidia_smi_write(name: str, gpu: str) -> None:
    assert load_gpu(name).id == gpu


def test_no_alias_names_two_gpus() -> None:
    owner: dict[str, str] = {}
    for row in ROWS:
        for alias in (row["id"], *row["aliases"].split("|")):
            if alias:
                assert owner.setdefault(tables.plain(alias), row["id"]) == row["id"], alias


@given(st.sampled_from(sorted(names(gpu_rows()))), st.sampled_from(["-", "_", " "]), st.booleans())
def test_case_and_separators_do_not_matter(alias: str, separator: str, upper: bool) -> None:
    written = alias.replace("-", separator)
    assert load_gpu(written.upper() if upper else written) == load_gpu(alias)


@pytest.mark.parametrize(
    ("reference", "line"),
    [
        ("h10", r"cluster.gpu: unknown GPU 'h10' \(nearest: .*H100-SXM-80GB"), ("", "names no GPU"), ("  ", "names no GPU"), (7, "'7' names no GPU"),
        ("x" * 10000, "unknown GPU"), ({}, "has no dense peak"), ({"bf16": 100}, "mem_label_gb is missing"),
        ({"bf16": 100, "mem_label_gb": 10}, "mem_bw_gbs is missing"), ({"id": "h100", "bf15": 3}, r"unknown key 'bf15' \(nearest: bf16"),
        ({"id": "h100", "bf16": -3}, "cluster.gpu.bf16: -3 is not between"), ({"id": "h100", "bf16": "fast"}, "'fast' is not a number"),
        ({"id": "h100", "bf16": float("nan")}, "bf16: nan is not between"), ({"id": "h100", "bf16": 1e30}, "is not between"),
        ({"id": "h100", "bf16": 0}, "is not between"), ({"id": "h100", "bf16": True}, "'True' is not a number"),
        ({"id": "h100", "gpus_per_node": 2.5}, r"gpus_per_node: 2.5 is not a whole number"), ({"base": "h1000"}, "base: unknown GPU 'h1000'"),
        ({"id": "h100", "vendor": 3}, "vendor: '3' is not text"), ({"id": "h100", "peak_flops": 3}, "peak_flops: is a table"),
        ({"id": "h100", "mem_label_gb": [80]}, "is not a number"),
    ],
)  # fmt: skip
def test_a_wrong_gpu_is_refused_in_one_line(reference: object, line: str) -> None:
    with pytest.raises(SpecError, match=line) as caught:
        load_gpu(reference)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_table_overrides_a_known_gpu() -> None:
    changed, known = load_gpu({"id": "h100", "nic_default_gbps": 200, "tdp_w": 500}), load_gpu("h100")
    assert (changed.nic_default_gbps, changed.tdp_w) == (200, 500)
    assert (changed.peak_flops, changed.capacity_bytes, changed.id) == (known.peak_flops, known.capacity_bytes, known.id)
    assert changed.source.startswith("given by the user")


def test_another_label_means_another_capacity() -> None:
    assert load_gpu({"id": "h100", "mem_label_gb": 96}).capacity_bytes == 96 * MIB_PER_LABEL_GB * 2**20
    assert load_gpu({"id": "h100", "capacity_mib": 97871}).capacity_bytes == 97871 * 2**20


def test_fields_of_the_spec_are_keys_as_well() -> None:
    gpu = load_gpu(
        {"name": "mine", "peak_flops": {"bf16": 100e12}, "capacity_bytes": 32 * 2**30, "hbm_bytes_per_s": 1e12, "link_bytes_per_s": 1e11}
    )
    assert (gpu.id, gpu.peak("bf16"), gpu.capacity_bytes, gpu.hbm_bytes_per_s, gpu.link_bytes_per_s) == (
        "mine",
        100e12,
        32 * 2**30,
        1e12,
        1e11,
    )
    assert (gpu.gpus_per_node, gpu.scaleup_gpus) == (8, 8)


def test_a_base_gives_a_new_name_to_a_changed_gpu() -> None:
    gpu = load_gpu({"id": "H100-cloud", "base": "h100", "nic_default_gbps": 100})
    assert (gpu.id, gpu.nic_default_gbps, gpu.peak("bf16")) == ("H100-cloud", 100, load_gpu("h100").peak("bf16"))


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_a_spec_survives_the_way_through_its_own_columns(row: dict[str, str]) -> None:
    """A row given back as a table of columns, numbers as numbers, is the same GPU."""
    table = {k: (float(v) if k in NUMBERS else v) for k, v in row.items() if v}
    assert load_gpu(table) == spec_of(row)


def test_the_table_for_people_lists_every_gpu() -> None:
    listed = list_gpus()
    assert [row["id"] for row in listed] == IDS
    h100 = next(row for row in listed if row["id"] == "H100-SXM-80GB")
    assert (h100["bf16_tflops"], h100["memory_gib"], h100["link_gb_per_s"]) == (989.4, 79.65, 450)
    assert set(FORMATS) >= {"fp32", "bf16", "fp8", "fp4"}


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-5, 10**30), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=2))


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*NUMBERS, "id", "base", "vendor", "aliases", "peak_flops", "capacity_bytes", "x"]), VALUES, max_size=4
    ),
    st.booleans(),
)
def test_any_table_is_a_gpu_or_one_line(table: dict[str, Any], known: bool) -> None:
    try:
        gpu = load_gpu({"base": "h100", **table} if known else table)
    except SpecError as error:
        assert "\n" not in str(error)
    else:
        assert gpu.capacity_bytes > 0
        assert gpu.hbm_bytes_per_s > 0
        assert max(gpu.peak_flops.values()) > 0
