"""Seconds of kernels: matrix products by (m, n, k), attention by kernel and length, elementwise kernels by bytes.

The laws are smooth in their arguments, so a table of plans is priced in one call. Constants come from ``catalog/kernels.toml``, each with its source;
`rates` picks those of a GPU, and says so where a GPU has no measurements of its own and is scaled from a relative.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from ..spec.cluster import GpuSpec
from ..spec.precision import DTYPE_BYTES, activation_dtype
from .table import Column

Constants = Mapping[str, Any]


@cache
def constants() -> Constants:
    """``catalog/kernels.toml``."""
    text = resources.files("trainwright.catalog").joinpath("kernels.toml").read_text("utf-8")
    return tomllib.loads(text)


@dataclass(frozen=True)
class Rates:
    """What one GPU sustains inside a training step. FLOP/s and bytes/s; `relative` names the architecture it is scaled from ("" = its own)."""

    product_flops: float
    eight_bit_flops: float
    four_bit_flops: float
    bytes_per_s: float
    compute_units: int
    attention_flops: float
    attention_half_length: float
    head_64: float
    law: Constants
    relative: str = ""
    attention_backward: float = 2.5  # times the forward pass
    head_half: float = 0.0  # measured kernels: head size at which half of the rate is reached

    def flops(self, precision: str) -> float:
        return {"fp8": self.eight_bit_flops, "fp4": self.four_bit_flops}.get(precision, self.product_flops)


def architecture(gpu: GpuSpec, table: Constants) -> tuple[str, str]:
    """(section of ``kernels.toml`` [arch], "" or why it is only a relative): by architecture, by vendor, else the nearest compute capability."""
    for name, arch in table["arch"].items():
        if gpu.arch in arch["match"] or (not gpu.arch and gpu.vendor == arch.get("vendor")):
            relative = arch.get("relative", "")
            return name, f"{gpu.id}: no published steps to hold its kernels; scaled from {relative}" if relative else ""
    try:
        version = float(gpu.arch)
    except ValueError:
        version = 8.0
    known = [(abs(float(m) - version), name) for name, arch in table["arch"].items() for m in arch["match"] if m[:1].isdigit()]
    nearest = min(known)[1]
    return nearest, f"{gpu.id}: an architecture without measurements; scaled from {nearest}"


def rates(gpu: GpuSpec, precision: str, year: float, library: str = "te", table: Constants | None = None) -> Rates:
    """The sustained rates of `gpu`; `year` (2025.5 = mid 2025) and `library` (te | sdpa) decide which attention kernel runs."""
    table = constants() if table is None else table
    if gpu.measured and gpu.measured.kernels.get("matmul"):
        return _measured(gpu, gpu.measured.kernels, precision, table)
    name, relative = architecture(gpu, table)
    arch = table["arch"][name]
    base = activation_dtype(precision)
    peak = gpu.peak(base)
    share = arch["sustained"]
    if gpu.tdp_w and "watts_per_tflops" in arch:
        share *= (gpu.tdp_w / (gpu.peak("fp16") / 1e12) / arch["watts_per_tflops"]) ** table["power"]["exponent"]
    share = min(share, table["matmul"]["burst"])
    newer = arch.get("attention", {}).get(gpu.arch)
    kernel = table["attention"][newer or attention_kernel(arch.get("relative", name), year, library)]
    return Rates(
        product_flops=peak * share,
        eight_bit_flops=gpu.peak("fp8") * share * arch.get("fp8", 1.0),
        four_bit_flops=gpu.peak("fp4") * share * arch.get("fp4", 1.0),
        bytes_per_s=gpu.hbm_bytes_per_s * table["memory"]["share"],
        compute_units=gpu.compute_units or 100,
        attention_flops=peak * kernel["share"] * min(1.0, share / arch["sustained"]),
        attention_half_length=kernel["half_length"],
        head_64=kernel["head_64"],
        law={**table["matmul"], **{k: arch[k] for k in ("quantization",) if k in arch}},
        relative=relative,
    )


def _measured(gpu: GpuSpec, known: Constants, precision: str, table: Constants) -> Rates:
    """Rates of a machine whose products, attention and copies were measured in the formats that it has."""
    dtype = activation_dtype(precision)
    formats = (dtype, "fp32", "bf16", "fp16")
    tables: tuple[Constants, Constants] = (known["matmul"], known.get("attention", {}))
    product, attention = (dict(next((t[d] for d in formats if d in t), {})) for t in tables)
    flops = product["flops"]
    return Rates(
        product_flops=flops,
        eight_bit_flops=flops * gpu.peak("fp8") / gpu.peak(dtype),
        four_bit_flops=flops * gpu.peak("fp4") / gpu.peak(dtype),
        bytes_per_s=gpu.hbm_bytes_per_s,
        compute_units=gpu.compute_units or 100,
        attention_flops=float(attention.get("flops") or flops),
        attention_half_length=attention.get("half_length", 0.0),
        head_64=1.0,
        law={**table["matmul"], **product},
        attention_backward=attention.get("backward", 2.5),
        head_half=attention.get("head_half", 0.0),
    )


def attention_kernel(arch: str, year: float, library: str) -> str:
    """The fused attention kernel that software of that time runs.

    PyTorch got FlashAttention 2 with 2.2 (January 2024); Transformer Engine (`library` "te") runs cuDNN's on Hopper from 1.6
    (May 2024), FlashAttention 2 before; on Blackwell both run
    cuDNN's or FlashAttention 4.
    """
    if arch == "blackwell":
        return "blackwell"
    if year < 2024.0:
        return "fa1_hopper" if arch == "hopper" else "fa1"
    if arch == "hopper":
        return "cudnn_hopper" if library == "te" and year >= 2024.4 else "fa2_hopper"
    return "fa2"


def misalignment(dim: Column, law: Constants, unaligned: str = "unaligned") -> Column:
    """Factor on time for a dimension of 16-bit elements that tensor cores load badly: 1 for multiples of 64, up to 1 + misaligned for multiples of 8
    (16 bytes), 1 + unaligned below, where whole vectors cannot be loaded (`unaligned`: the constant of plain or of batched products)."""
    common = np.gcd(np.maximum(np.rint(dim), 1).astype(np.int64), 64)
    return np.where(common < 8, 1.0 + law[unaligned], 1.0 + law["misaligned"] * (64.0 / np.maximum(common, 8) - 1.0) / 7.0)


def matmul_seconds(m: Column, n: Column, k: Column, count: Column, rate: Rates, precision: str, unaligned: str = "unaligned") -> Column:
    """`count` products y[m, n] = x[m, k] w[k, n] in one launch (batched or grouped).

    ``launch + max(tile work / rate x alignment, bytes / bandwidth)``: the output is cut into tiles, of the shape and with the split of k that take
    least; each wave of tiles over the units costs ``2 tile (k/split + k_ramp)``, more for small tiles, and `quantization` of the last wave's idle
    part is lost. Source: `kernels.toml` [matmul].
    """
    law = rate.law
    if "m_half" in law:
        return _ramps(m, n, k, count, rate, law)
    size = DTYPE_BYTES[precision if precision in ("fp8", "fp4") else activation_dtype(precision)]
    # 8 bits a number halve the time in a tile, so that filling it weighs twice: the ramp counts bytes
    work = rate.compute_units * tile_work(m, n, k, count, rate.compute_units, law, law["k_ramp"] * 2.0 / size)
    align = np.maximum(misalignment(n, law, unaligned), misalignment(k, law, unaligned))
    traffic = count * ((m * k + k * n) * size + m * n * 2.0)
    return law["launch_s"] + np.maximum(work * align / rate.flops(precision), traffic / (rate.bytes_per_s * law["stream_share"]))


def _ramps(m: Column, n: Column, k: Column, count: Column, rate: Rates, law: Constants) -> Column:
    """``launch + 2 m n k / rate (1 + m_half/m)(1 + n_half/n)(1 + k_half/k)``: a dimension of its half length runs at half of the rate. What a core's
    blocked loops lose at their edges; the form that is taken where it fits the measured products better than tiles and waves."""
    ramp = (1 + law["m_half"] / m) * (1 + law["n_half"] / n) * (1 + law["k_half"] / k)
    return law["launch_s"] + 2.0 * m * n * k * count * ramp / rate.product_flops


_TILES = np.array([(256, 128), (128, 256), (128, 128), (64, 256), (256, 64), (128, 64), (64, 128), (64, 64)], dtype=float)
_SPLITS = np.array([1.0, 2.0, 4.0])
_TILE_M, _TILE_N, _SPLIT = (np.ravel(x) for x in np.broadcast_arrays(_TILES[:, :1], _TILES[:, 1:], _SPLITS[None, :]))
_AREA = _TILE_M * _TILE_N


def tile_work(m: Column, n: Column, k: Column, count: Column, units: int, law: Constants, ramp: float) -> Column:
    """FLOPs of the busiest unit, for the best of 8 tile shapes and 3 splits of k."""
    m, n, k, count = (np.asarray(x)[..., None] for x in (m, n, k, count))
    waves = np.ceil(m / _TILE_M) * np.ceil(n / _TILE_N) * _SPLIT * count / units
    share = law["quantization"]
    rounds = np.where(waves <= 1.0, 1.0, (1.0 - share) * waves + share * np.ceil(waves))
    small = (32768.0 / _AREA) ** law["small_tiles"]
    return np.asarray((rounds * (2.0 * _AREA * small) * (k / _SPLIT + ramp)).min(axis=-1))


def attention_seconds(flops: Column, reach: float, head_dim: int, rate: Rates) -> Column:
    """Forward seconds of a fused kernel for that many forward FLOPs; backward takes 2.5 times as many FLOPs at the same mean rate.

    rate = measured forward + backward rate x s / (s + half_length), and less for heads of 64.
    """
    if rate.head_half:
        return flops / (rate.attention_flops * head_dim / (head_dim + rate.head_half) * reach / (reach + rate.attention_half_length))
    head = 1.0 if head_dim >= 128 else rate.head_64 + (1.0 - rate.head_64) * max(0.0, (head_dim - 64) / 64)
    head *= min(1.0, head_dim / 64)
    speed = rate.attention_flops * head * reach / (reach + rate.attention_half_length)
    return flops / speed
