"""From seconds that were measured of this machine to the constants of the laws in `cost`, and the profile that holds them.

Every constant keeps its meaning of ``catalog/kernels.toml``: a row's passes are as many reads and writes of its tensor as its time is worth at the measured
bandwidth. Matrix products and attention are fitted by the mean of |log(predicted / measured)| over all measured shapes; the rest is a ratio.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tomli_w

from ..cost.kernels import Rates, attention_seconds, constants, matmul_seconds
from ..errors import SpecError
from ..spec.cluster import GpuSpec
from ..spec.precision import DTYPE_BYTES

HALVES = (0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
# Below one pass nothing was read or written; the measurement then says that the row is free beside its neighbors.
LEAST_RESIDUAL, MOST_RESIDUAL = 0.05, 3.0


@dataclass(frozen=True)
class Fit:
    """One law fitted to `points` measured shapes: constants, and the mean and largest |predicted / measured - 1| on them."""

    what: str
    constants: Mapping[str, Any]
    points: int
    mean_error: float
    largest_error: float


@dataclass(frozen=True)
class Machine:
    """What was found: a GPU's table for a user's catalogue file, the fits behind it, and what each number replaces."""

    gpu: Mapping[str, Any]
    fits: tuple[Fit, ...]
    raw: Mapping[str, Any]
    seconds: float

    @property
    def id(self) -> str:
        return str(self.gpu["id"])

    @property
    def pulse_s(self) -> float | None:
        """Seconds of a fixed piece of work (`train.pulse`) while the rest was measured; None on a GPU."""
        return self.gpu["measured"]["kernels"].get("host", {}).get("pulse_s") if "measured" in self.gpu else None

    def to_toml(self) -> str:
        """A profile: the same file serves ``--profile`` and ``--catalog``."""
        return tomli_w.dumps({"gpu": [dict(self.gpu)]})

    def rows(self) -> list[dict[str, Any]]:
        """What was measured, for people: one row a law or number."""
        found: list[dict[str, Any]] = []
        for f in self.fits:
            text = ", ".join(f"{k} {_short(k, v)}" for k, v in f.constants.items() if not isinstance(v, str))
            found.append({"measured": f.what, "points": f.points, "mean error": f"{f.mean_error:.1%}", "found": text})
        known = self.gpu["measured"]["kernels"]
        found.append({"measured": "copy", "points": 1, "mean error": "", "found": f"{self.gpu['mem_bw_gbs']:.1f} GB/s read and written"})
        for dtype, passes in known.get("passes", {}).items():
            text = ", ".join(f"{k} {v[0]:.1f}/{v[1]:.1f}" for k, v in passes.items())
            found.append({"measured": f"passes forward/backward, {dtype}", "points": len(passes), "mean error": "", "found": text})
        for name in ("loss", "optimizer", "host", "overlap"):
            table = {k: v for k, v in known.get(name, {}).items() if k not in ("groups", "tp", "cp")}
            text = ", ".join(f"{k} {_short(k, v)}" for k, v in table.items())
            if text:
                found.append({"measured": name, "points": 1, "mean error": "", "found": text})
        found += [{"measured": what, "points": 2, "mean error": "", "found": text} for what, text in _sending(known.get("host", {}))]
        curves = self.gpu["measured"].get("collective", [])
        for c in curves:
            text = f"{c['seconds'][0] * 1e6:,.0f} us at {c['bytes'][0]:,.0f} B, {c['bytes'][-1] / c['seconds'][-1] / 1e9:.2f} GB/s at {c['bytes'][-1]:,.0f} B"
            found.append({"measured": f"{c['kind']}, {c['ranks']} ranks", "points": len(c["bytes"]), "mean error": "", "found": text})
        return found


def _short(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{k} {v:.3g}" for k, v in value.items())
    if name == "flops":
        return f"{value / 1e9:,.1f} GFLOP/s"
    return f"{value * 1e6:.1f} us" if name.endswith("_s") else f"{value:.3g}"


def _sending(host: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a rank itself spends around messages, a line each."""
    for sharding, lines in host.get("groups", {}).items():
        for name, (call, byte) in lines.items():
            yield f"a group of FSDP2 ({sharding}), {name}", f"{call * 1e6:,.0f} us + {byte * 1e9:.2f} ns a byte"
    for axis in ("tp", "cp"):
        for name, line in host.get(axis, {}).items():
            text = f"{line * 1e6:,.0f} us" if isinstance(line, float) else f"{line[0] * 1e6:,.0f} us + {line[1] * 1e9:.2f} ns a byte"
            yield f"host, {axis} {name.removesuffix('_s').replace('_', '-')}", text


def machine_of(raw: Mapping[str, Any], *, base: GpuSpec | None = None, seconds: float = 0.0) -> Machine:
    """The laws of the measured numbers `raw` (as `train.measure_machine` writes them). `base`: the catalogue's GPU of that name, which stays what it is
    but for its speeds; without one the device is described from nothing: peaks are the fastest products, memory its share of the machine's."""
    device = raw["device"]
    bandwidth = float(raw["copy_bytes_per_s"])
    fits: list[Fit] = []
    matmul: dict[str, Any] = {}
    attention: dict[str, Any] = {}
    for dtype, points in raw["matmul"].items():
        best = min((fit(points, dtype, base, bandwidth) for fit in (fit_ramps, *([fit_tiles] if base else []))), key=lambda f: f.mean_error)
        matmul[dtype] = dict(best.constants)
        fits.append(best)
    for dtype, points in raw["attention"].items():
        found = fit_attention(points, dtype)
        attention[dtype] = dict(found.constants)
        fits.append(found)
    kernels: dict[str, Any] = {"matmul": matmul, "attention": attention}
    kernels["passes"] = {d: _passes(rows, DTYPE_BYTES[d], bandwidth) for d, rows in raw["elementwise"].items()}
    kernels["loss"] = {d: {"plain": s / logits * bandwidth} for d, (logits, s) in raw["loss"].items()}
    o = raw["optimizer"]
    kernels["optimizer"] = {
        "bytes_per_parameter": o["step_s"] / o["parameters"] * bandwidth,
        "gradient_passes": o["clip_s"] / o["parameters"] * bandwidth / 4.0,
    }
    kernels["host"] = {"kernel_s": raw["launch_s"]} | ({"serial": 1.0} if device["kind"] == "cpu" else {}) | raw.get("host", {})
    kernels["step"] = {"floor_s": 0.001, "jitter": constants()["step"]["jitter"]}
    if raw.get("overlap"):
        kernels["overlap"] = overlap_of(raw["overlap"])
    measured = {"source": _source(raw), "kernels": kernels, "collective": curves_of(raw["collectives"])}
    return Machine(_gpu(raw, base, bandwidth, measured), tuple(fits), raw, seconds)


def _source(raw: Mapping[str, Any]) -> str:
    d = raw["device"]
    return f"measured: {d['name']}, {d['ranks']} ranks of {d['threads']} threads at work, {d['software']}"


def _gpu(raw: Mapping[str, Any], base: GpuSpec | None, bandwidth: float, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The table of a catalogue file."""
    device = raw["device"]
    if base is not None:
        return {"id": base.id, "base": base.id, "mem_bw_gbs": bandwidth / 1e9, "source": measured["source"], "measured": measured}
    peaks = {d: max(2.0 * m * n * k / s for m, n, k, s in points) / 1e12 for d, points in raw["matmul"].items()}
    cpu = device["kind"] == "cpu"
    return {
        "id": "this-cpu" if cpu else _slug(device["name"]),
        "vendor": "",
        "form": device["name"],
        "cc_or_arch": "cpu" if cpu else "measured",
        "compute_units": device["threads"] if cpu else 100,
        **peaks,
        "mem_label_gb": device["memory_bytes"] / 1e9,
        "capacity_mib": device["memory_bytes"] // 2**20,
        "mem_type": "host memory" if cpu else "",
        "mem_bw_gbs": bandwidth / 1e9,
        "link": "loopback" if cpu else "measured",
        "link_uni_gbs": bandwidth / 4e9,
        "scaleup_domain_gpus": device["ranks"],
        "gpus_per_node": device["ranks"],
        "nic_default_gbps": 10,
        "pcie_uni_gbs": bandwidth / 4e9,
        "host_ram_gb_per_node": device["memory_bytes"] * device["ranks"] / 1e9,
        "source": measured["source"],
        "measured": measured,
    }


def _slug(name: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in name).split()) or "this-gpu"


def _passes(rows: Mapping[str, Sequence[float]], size: float, bandwidth: float) -> dict[str, list[float]]:
    """Reads and writes of a row's output tensor that its seconds are worth, forward and backward."""
    return {name: [f * bandwidth / (e * size), b * bandwidth / (e * size)] for name, (e, f, b) in rows.items() if name != "cast"}


def overlap_of(o: Mapping[str, float]) -> dict[str, float]:
    """The share of a hidden message that shows all the same: both at once, less the longer one, over the shorter one. Above one where both want the same
    cores, and taking turns costs more than waiting."""
    shorter, longer = sorted((o["work_s"], o["sent_s"]))
    residual = min(MOST_RESIDUAL, max(LEAST_RESIDUAL, (o["both_s"] - longer) / shorter))
    return {"residual": residual, "slowdown": residual}


def curves_of(rows: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """[kind, ranks, bytes, seconds] -> one curve a kind and group size, sizes rising, times never falling."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for kind, ranks, size, seconds in rows:
        found.setdefault((kind, ranks), []).append((float(size), float(seconds)))
    curves = []
    for (kind, ranks), points in found.items():
        points.sort()
        times = np.maximum.accumulate([s for _, s in points]).tolist()
        curves.append({"kind": kind, "ranks": ranks, "bytes": [b for b, _ in points], "seconds": times})
    return curves


# ---- fits


def _errors(predicted: np.ndarray[Any, Any], seconds: np.ndarray[Any, Any]) -> tuple[float, float]:
    error = np.abs(predicted / seconds - 1.0)
    return float(error.mean()), float(error.max())


def _columns(points: Sequence[Sequence[float]], width: int) -> np.ndarray[Any, Any]:
    if not points:
        raise SpecError("nothing was measured", "calibrate")
    return np.array(points, dtype=np.float64).reshape(-1, width).T


def fit_ramps(points: Sequence[Sequence[float]], dtype: str, base: GpuSpec | None, bandwidth: float) -> Fit:
    """``launch + 2 m n k / rate (1 + m_half/m)(1 + n_half/n)(1 + k_half/k)``: halves by search, the rate by the median ratio of each."""
    m, n, k, seconds = _columns(points, 4)
    work = 2.0 * m * n * k
    best: tuple[float, dict[str, float]] | None = None
    launch = min(5e-6, 0.5 * float(seconds.min()))
    for mh, nh, kh in itertools.product(HALVES, HALVES, HALVES):
        ramp = work * (1 + mh / m) * (1 + nh / n) * (1 + kh / k)
        rate = math.exp(float(np.median(np.log(ramp / (seconds - launch)))))
        cost = float(np.abs(np.log((launch + ramp / rate) / seconds)).mean())
        if best is None or cost < best[0]:
            best = cost, {"flops": rate, "launch_s": launch, "m_half": mh, "n_half": nh, "k_half": kh}
    assert best is not None
    found = best[1]
    ramp = (1 + found["m_half"] / m) * (1 + found["n_half"] / n) * (1 + found["k_half"] / k)
    return Fit(f"matrix products, {dtype}", found, len(m), *_errors(found["launch_s"] + work * ramp / found["flops"], seconds))


def fit_tiles(points: Sequence[Sequence[float]], dtype: str, base: GpuSpec | None, bandwidth: float) -> Fit:
    """The law of tiles and waves of ``kernels.toml`` with this machine's sustained rate."""
    m, n, k, seconds = _columns(points, 4)
    units = (base.compute_units if base else 0) or 100
    law = constants()["matmul"]
    rate = Rates(1.0, 1.0, 1.0, bandwidth, units, 1.0, 1.0, 1.0, law)
    flops = 2.0 * float((m * n * k / seconds).max())
    for _ in range(30):  # the ratio moves the rate until half of the points are above
        predicted = matmul_seconds(m, n, k, np.ones_like(m), replace(rate, product_flops=flops), dtype)
        flops *= math.exp(float(np.median(np.log(predicted / seconds))))
    predicted = matmul_seconds(m, n, k, np.ones_like(m), replace(rate, product_flops=flops), dtype)
    return Fit(f"matrix products, {dtype}", {"flops": flops}, len(m), *_errors(predicted, seconds))


def fit_attention(points: Sequence[Sequence[float]], dtype: str) -> Fit:
    """Forward FLOPs of causal attention over ``rate x length / (length + half_length) x head / (head + head_half)``; backward is a multiple of it."""
    length, head, heads, forward, backward = _columns(points, 5)
    flops = 2.0 * heads * length**2 * head  # half of the square, two products
    best: tuple[float, float, float, float] | None = None
    for lh, hh in itertools.product((0.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0), (1e-3, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)):
        share = length / (length + lh) * head / (head + hh)
        rate = math.exp(float(np.median(np.log(flops / share / forward))))
        cost = float(np.abs(np.log(flops / share / rate / forward)).mean())
        if best is None or cost < best[0]:
            best = cost, rate, lh, hh
    assert best is not None
    _, rate, lh, hh = best
    ratio = math.exp(float(np.median(np.log(backward / forward))))
    found = {"flops": rate, "half_length": lh, "head_half": hh, "backward": ratio}
    law = Rates(rate, rate, rate, 1.0, 1, rate, lh, 1.0, {}, head_half=hh)
    predicted = np.array([float(attention_seconds(f, s, int(d), law)) for f, s, d in zip(flops, length, head)])
    return Fit(
        f"attention, {dtype}",
        found,
        len(length),
        *_errors(np.concatenate([predicted, ratio * predicted]), np.concatenate([forward, backward])),
    )
