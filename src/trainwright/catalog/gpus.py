"""GPUs: ``gpus.csv``, one row a device, with its source in every row.

Columns: dense TFLOP/s by number format (no sparsity; GeForce at its rate with fp32 accumulation), GB/s of memory (decimal), links one way and
summed over their lanes (``link_p2p_uni_gbs``: what one pair gets where that is less), Gb/s of network per GPU and direction, GB of host memory
and TB of NVMe a node. A row is one device as a system shows it: half of a module for an MI250X, a TPU v7x, an Ascend 910C.

``capacity_mib`` is the total of nvidia-smi; where nobody published it, the label's GB times 1,019 MiB (a label of "80 GB" is GiB-like:
an A100 shows 1,024 MiB a GB, an H100 1,019). ``tdp_w`` 0 = not published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import SpecError, nearest, unknown
from ..spec.cluster import GpuSpec
from . import tables
from .measured import read_measured
from .user_files import read_user_catalog

MIB_PER_LABEL_GB = 1019
FORMATS = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")
TEXTS = ("id", "aliases", "vendor", "form", "cc_or_arch", "mem_type", "link", "notes", "source", "confidence")
NUMBERS = (
    *FORMATS,
    "compute_units",
    "mem_label_gb",
    "capacity_mib",
    "mem_bw_gbs",
    "link_uni_gbs",
    "link_p2p_uni_gbs",
    "scaleup_domain_gpus",
    "gpus_per_node",
    "nic_default_gbps",
    "host_ram_gb_per_node",
    "nvme_tb_per_node",
    "pcie_uni_gbs",
    "tdp_w",
)
WHOLE = ("compute_units", "capacity_mib", "scaleup_domain_gpus", "gpus_per_node")
# Other names of the same keys, with what the column's unit is worth in theirs: the field names of GpuSpec.
SYNONYMS: dict[str, tuple[str, float]] = {
    "name": ("id", 1),
    "arch": ("cc_or_arch", 1),
    "memory_type": ("mem_type", 1),
    "memory_label_gb": ("mem_label_gb", 1),
    "memory_gb": ("mem_label_gb", 1),
    "capacity_bytes": ("capacity_mib", 2**20),
    "hbm_bytes_per_s": ("mem_bw_gbs", 1e9),
    "link_bytes_per_s": ("link_uni_gbs", 1e9),
    "link_pair_bytes_per_s": ("link_p2p_uni_gbs", 1e9),
    "scaleup_gpus": ("scaleup_domain_gpus", 1),
    "pcie_bytes_per_s": ("pcie_uni_gbs", 1e9),
    "host_memory_bytes": ("host_ram_gb_per_node", 1e9),
    "host_memory_gb": ("host_ram_gb_per_node", 1),
    "nvme_bytes": ("nvme_tb_per_node", 1e12),
    "network_gbps_per_gpu": ("nic_default_gbps", 1),
}
# What an own GPU gets where its table is silent: a PCIe 4 card without a faster link in a node of eight.
FALLBACK = {"scaleup_domain_gpus": 8, "gpus_per_node": 8, "nic_default_gbps": 100, "pcie_uni_gbs": 31.5, "link_uni_gbs": 0, "tdp_w": 0}
EXTRA = ("base", "peak_flops", "_file")

Row = Mapping[str, Any]


def gpu_rows(catalog_files: Sequence[str] = ()) -> dict[str, Row]:
    """Every row by id; a user's files override by id and add."""
    found: dict[str, Row] = {row["id"]: row for row in tables.rows("gpus.csv")}
    for table in read_user_catalog(catalog_files).gpus if catalog_files else ():
        where = f"{table['_file']}: gpu {table['id'][:40]!r}"
        row = merged(table, found, where)
        found[str(row["id"])] = row
        spec_of(row, where)
    return found


def names(found: Mapping[str, Row]) -> dict[str, str]:
    return tables.index((i, str(row.get("aliases") or "").split("|")) for i, row in found.items())


def load_gpu(reference: str | Mapping[str, Any], catalog_files: Sequence[str] = (), where: str = "cluster.gpu") -> GpuSpec:
    """A catalogue id or alias, or a table of the catalogue's columns (or of `GpuSpec`'s fields); a table whose ``id`` or ``base`` is known
    overrides that row.

    Raises `SpecError` for an unknown name (with the nearest), an unknown key, a number out of range, or an own GPU without its dense peak, memory
    and memory bandwidth.
    """
    found = gpu_rows(catalog_files)
    if isinstance(reference, Mapping):
        return spec_of(merged(reference, found, where), where)
    if not isinstance(reference, str) or not reference.strip():
        raise SpecError(f"{str(reference)[:40]!r} names no GPU", where, ["H100-SXM-80GB", "h100"])
    return spec_of(found[resolve_gpu(reference, found, where)], where)


def resolve_gpu(reference: str, found: Mapping[str, Row], where: str = "cluster.gpu") -> str:
    """The id behind a name or an alias."""
    known = names(found)
    if len(reference) <= 200 and tables.plain(reference) in known:
        return known[tables.plain(reference)]
    near = nearest(tables.plain(reference[:80]), known)
    raise unknown("GPU", reference, [known[n] for n in near] or found, where)


def merged(table: Mapping[str, Any], found: Mapping[str, Row], where: str) -> Row:
    """A user's table over the row that it overrides, in the catalogue's columns."""
    base: dict[str, Any] = dict(FALLBACK)
    for key in ("base", "id", "name"):
        name = table.get(key)
        if isinstance(name, str) and tables.plain(name) in (known := names(found)):
            base = {**found[known[tables.plain(name)]]}
            break
        if key == "base" and name is not None:
            raise unknown("GPU", name, found, f"{where}.base")
    own = _columns(table, where)
    if not ({*FORMATS} & own.keys()) and not any(base.get(f) for f in FORMATS):
        raise SpecError("has no dense peak: TFLOP/s of at least one number format", where, FORMATS)
    for key in ("mem_label_gb", "mem_bw_gbs"):
        if key not in own and not base.get(key) and not (key == "mem_label_gb" and own.get("capacity_mib")):
            raise SpecError(f"{key} is missing", where)
    if "mem_label_gb" in own and "capacity_mib" not in own:
        base.pop("capacity_mib", None)
    row = {**base, **own}
    row.setdefault("mem_label_gb", float(own.get("capacity_mib") or 0) / MIB_PER_LABEL_GB)
    row.setdefault("id", "custom")
    if table.get("base") is None and base.get("id") and row["id"] != base["id"]:
        row["id"] = base["id"]
    if not own.get("source"):
        row["source"] = "given by the user" + (f", otherwise: {base['source']}" if base.get("source") else "")
    return row


def _columns(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The user's keys as columns, in the columns' units."""
    own: dict[str, Any] = {}
    known = (*TEXTS, *NUMBERS, *SYNONYMS, "base", "peak_flops", "measured")
    for key, value in table.items():
        column, factor = SYNONYMS.get(key, (key, 1))
        if key in EXTRA:
            continue
        if key == "measured":
            read_measured(value, f"{where}.measured")
            own["measured"] = value
            continue
        if column in TEXTS:
            if isinstance(value, (list, tuple)) and column == "aliases":
                value = "|".join(str(v) for v in value)
            if not isinstance(value, str):
                raise SpecError(f"{str(value)[:40]!r} is not text", f"{where}.{key}")
            own[column] = value
        elif column in NUMBERS:
            found = tables.number(table, key, where, most=1e18, zero=column in ("link_uni_gbs", "tdp_w"))
            if found is not None:
                own[column] = found / factor
        else:
            raise SpecError(f"unknown key {str(key)[:60]!r}", where, nearest(key, known) or known[:8])
    peaks = table.get("peak_flops")
    if peaks is not None:
        if not isinstance(peaks, Mapping) or not set(peaks) <= set(FORMATS):
            raise SpecError("is a table of FLOP/s by number format", f"{where}.peak_flops", FORMATS)
        own |= {k: (tables.number(peaks, k, f"{where}.peak_flops", most=1e21) or 0) / 1e12 for k in peaks}
    return own


def spec_of(row: Row, where: str = "gpu") -> GpuSpec:
    """A row as a GpuSpec, in bytes and FLOP/s."""

    def value(key: str, most: float = 1e12) -> float:
        return tables.number(row, key, where, most=most, zero=True) or 0.0

    def optional(key: str, factor: float) -> float | None:
        found = tables.number(row, key, where, zero=True)
        return None if found is None else found * factor

    def whole(key: str, most: float = 1e9) -> int:
        found = value(key, most)
        if found != int(found):
            raise SpecError(f"{found:g} is not a whole number", f"{where}.{key}", [int(found), int(found) + 1])
        return int(found)

    mib = tables.number(row, "capacity_mib", where)
    capacity = round(mib * 2**20) if mib else round(value("mem_label_gb") * MIB_PER_LABEL_GB) * 2**20
    if not capacity:
        raise SpecError("less than a MiB is no card's memory", f"{where}.{'capacity_mib' if mib else 'mem_label_gb'}", [80])
    return GpuSpec(
        id=str(row["id"]),
        aliases=tuple(a for a in str(row.get("aliases") or "").split("|") if a),
        vendor=str(row.get("vendor") or ""),
        form=str(row.get("form") or ""),
        arch=str(row.get("cc_or_arch") or ""),
        compute_units=whole("compute_units"),
        peak_flops={f: value(f, 1e9) * 1e12 for f in FORMATS if row.get(f)},
        memory_label_gb=value("mem_label_gb", 1e6),
        capacity_bytes=capacity,
        memory_type=str(row.get("mem_type") or ""),
        hbm_bytes_per_s=value("mem_bw_gbs") * 1e9,
        link=str(row.get("link") or "none"),
        link_bytes_per_s=value("link_uni_gbs") * 1e9,
        scaleup_gpus=max(1, whole("scaleup_domain_gpus")),
        gpus_per_node=max(1, whole("gpus_per_node", 1024)),
        nic_default_gbps=value("nic_default_gbps", 1e6),
        pcie_bytes_per_s=value("pcie_uni_gbs") * 1e9,
        tdp_w=value("tdp_w", 1e6),
        link_pair_bytes_per_s=optional("link_p2p_uni_gbs", 1e9),
        host_memory_bytes=optional("host_ram_gb_per_node", 1e9),
        nvme_bytes=optional("nvme_tb_per_node", 1e12),
        notes=str(row.get("notes") or ""),
        source=str(row.get("source") or ""),
        confidence=str(row.get("confidence") or ""),
        measured=read_measured(row["measured"], f"{where}.measured") if row.get("measured") else None,
    )


def list_gpus(catalog_files: Sequence[str] = ()) -> list[dict[str, Any]]:
    """One plain row a GPU, for tables: units in the names, dense peaks, bandwidths per GPU and one way."""
    from .prices import default_price

    listed = []
    for gpu_id, row in gpu_rows(catalog_files).items():
        gpu = spec_of(row)
        listed.append(
            {
                "id": gpu_id,
                "vendor": gpu.vendor,
                **{f"{f}_tflops": gpu.peak_flops[f] / 1e12 if f in gpu.peak_flops else None for f in ("fp32", "bf16", "fp8", "fp4")},
                "memory_gib": round(gpu.capacity_bytes / 2**30, 2),
                "memory_gb_per_s": gpu.hbm_bytes_per_s / 1e9,
                "link": gpu.link,
                "link_gb_per_s": gpu.link_bytes_per_s / 1e9,
                "scaleup_gpus": gpu.scaleup_gpus,
                "gpus_per_node": gpu.gpus_per_node,
                "network_gbps_per_gpu": gpu.nic_default_gbps,
                "tdp_w": gpu.tdp_w or None,
                "usd_per_gpu_hour": default_price(gpu_id, catalog_files)[0],
                "aliases": ", ".join(gpu.aliases),
                "source": gpu.source,
                "confidence": gpu.confidence,
            }
        )
    return listed
