"""K41: published figures that arithmetic refutes: more memory than the card has or less than the states take, degrees that do not multiply to the GPUs, rates
that contradict each other or the model's FLOPs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import TrainwrightError
from ...units import format_bytes
from ..findings import Check, Example, Finding
from ..formats.claim import claimed
from ..setup import Place, Setup
from ..view import View, as_number, whole
from ._tools import ERROR
from .names import SIZE, catalogued

GIB, GB = 2**30, 10**9
PRECISE = 0.05  # published figures are rounded; what differs by more is another number
MOST_MFU = 0.8  # dense products alone reach about that of the dense peak; a whole step never has


@dataclass(frozen=True)
class Claim:
    """The numbers of one claim; None where it does not say."""

    table: Mapping[str, Any]
    gpus: int | None
    parameters: int | None
    vocabulary: int | None
    capacity_bytes: float | None
    peak_flops: float | None
    peak_bytes: float | None
    strategy: str


def figures(setup: Setup) -> Iterator[Finding]:
    for view in setup.seen("claim"):
        claim = _claim(claimed(view.document))
        for key, what in (*_card(claim), *_degrees(claim), *_states(claim), *_rates(claim), *_two_gpus(claim)):
            yield Finding("K41", ERROR, _place(view, key), what, "Ask the source, or measure again.")


def _place(view: View, key: str) -> Place:
    found = view.get(key)
    return view.place(found) if found else view.place()


def _claim(table: Mapping[str, Any]) -> Claim:
    name = str(table.get("model") or "")
    model = catalogued(name) if name else None
    size = [float(n) for n in SIZE.findall(name.replace("_", " ").replace("-", " "))]
    gpu = _gpu(str(table.get("gpu") or ""))
    return Claim(
        table=table,
        gpus=whole(table.get("n_gpus", table.get("gpus"))),
        parameters=model.parameters if model is not None else int(size[-1] * 1e9) if size else None,
        vocabulary=model.vocab if model is not None else 128256 if "llama-3" in name.lower() else None,
        capacity_bytes=gpu.capacity_bytes if gpu is not None else None,
        peak_flops=gpu.peak("bf16") if gpu is not None else None,
        peak_bytes=_peak(table),
        strategy=str(table.get("strategy") or ""),
    )


def _gpu(text: str) -> Any:
    """The GPU that a claim names first, with the memory it names."""
    from ...catalog.load import load_gpu

    word = text.split("(")[0].strip()
    parts = word.split("-")
    for candidate in (word, "-".join(parts[:2]), "-".join([parts[0], "SXM", *parts[1:]]), parts[0]):
        try:
            return load_gpu(candidate)
        except TrainwrightError:
            continue
    return None


def _peak(table: Mapping[str, Any]) -> float | None:
    found = as_number(table.get("measured_peak_gb", table.get("peak_gb")))
    return None if found is None else found * (GIB if "GiB" in str(table.get("peak_unit") or "") else GB)


def _card(c: Claim) -> Iterator[tuple[str, str]]:
    named = re.search(r"(\d+)GB", str(c.table.get("gpu") or ""))
    capacity = float(named.group(1)) * GB if named else c.capacity_bytes
    if c.peak_bytes and capacity and c.peak_bytes > capacity * (1 + 0.074 * (named is None)):
        yield (
            "measured_peak_gb",
            f"A peak of {c.peak_bytes / GB:.1f} GB ({format_bytes(int(c.peak_bytes))}) on a card of {capacity / GB:.0f} GB.",
        )


def _degrees(c: Claim) -> Iterator[tuple[str, str]]:
    found = {axis: whole(c.table.get(axis)) for axis in ("dp", "tp", "pp", "cp")}
    for axis, number in re.findall(r"\b(dp|tp|pp|cp|ep)\s*=?\s*(\d+)", c.strategy, re.IGNORECASE):
        if axis.lower() in found:
            found[axis.lower()] = found[axis.lower()] or int(number)
    said = {k: v for k, v in found.items() if v}
    product = math.prod(said.values())
    words = " x ".join(f"{k} {v}" for k, v in said.items())
    if c.gpus and said and (("dp" in said and product != c.gpus) or c.gpus % product):
        yield "n_gpus", f"{words} = {product}, but the figure is for {c.gpus} GPUs."


def _states(c: Claim) -> Iterator[tuple[str, str]]:
    """What weights, gradients and optimizer take at the very least: everything 16-bit, and nothing else alive."""
    if not c.parameters or not c.peak_bytes:
        return
    least, words = _least(c)
    if least > c.peak_bytes * (1 + PRECISE):
        yield "measured_peak_gb", f"{words} are {least / GB:.1f} GB at least, more than the {c.peak_bytes / GB:.1f} GB that are claimed."
    elif c.capacity_bytes and least > c.capacity_bytes:
        yield "measured_peak_gb", f"{words} are {least / GB:.1f} GB at least, more than the card holds ({c.capacity_bytes / GB:.1f} GB)."


def _least(c: Claim) -> tuple[float, str]:
    strategy, optimizer = c.strategy.lower(), str(c.table.get("optimizer") or "").lower()
    n, count = float(c.parameters or 0), c.gpus or 1
    split = (whole(c.table.get("tp")) or 1) * (whole(c.table.get("pp")) or 1)
    if "lora" in strategy:
        base = 0.5 if "qlora" in strategy or "4bit" in strategy else 1.0
        tokens = (whole(c.table.get("seq_len")) or 0) * (whole(c.table.get("micro_batch")) or 1)
        logits = tokens * (c.vocabulary or 0) * (2 + 4)  # 16-bit logits and their 32-bit copy for the loss
        kind = "a 4-bit" if base == 0.5 else "an 8-bit"
        return (
            n * base / split + logits,
            f"{kind} base ({n * base / GB:.1f} GB) and the logits of {tokens:,} tokens ({logits / GB:.1f} GB, unless the loss is fused)".replace(
                "a", "A", 1
            ),
        )
    state = 1.0 if "8bit" in optimizer else 2.0
    moments = 0 if "sgd" in optimizer else 1 if "lion" in optimizer else 2
    stage = re.search(r"zero[-_ ]?([0-3])", strategy)
    level = int(stage.group(1)) if stage else 3 if "fsdp" in strategy else 0
    shards = max(1, count // split)
    weights = 2 * n / split / (shards if level == 3 else 1)
    gradients = 2 * n / split / (shards if level >= 2 else 1)
    held = moments * state * n / split / (shards if level >= 1 else 1)
    return weights + gradients + held, f"16-bit weights, gradients and {moments} optimizer states of {n / 1e9:.2f} billion parameters"


def _rates(c: Claim) -> Iterator[tuple[str, str]]:
    t = c.table
    per_gpu, total = as_number(t.get("tokens_per_s_per_gpu")), as_number(t.get("tokens_per_s_total", t.get("tokens_per_s")))
    if per_gpu is None and total is not None and c.gpus:
        per_gpu = total / c.gpus
    implied = as_number(t.get("global_batch_times_seq_over_step_over_gpus"))
    if implied is None:
        batch, length, step = (as_number(t.get(k)) for k in ("global_batch_size", "seq_len", "step_s"))
        implied = batch * length / step / c.gpus if batch and length and step and c.gpus else None
    if per_gpu and implied and abs(per_gpu / implied - 1) > PRECISE:
        yield (
            "tokens_per_s_per_gpu",
            f"Batch x length / step time / GPUs is {implied:.0f} tokens/s, but {per_gpu:.0f} are claimed: {_times(implied / per_gpu, c.gpus)}.",
        )
    ratio = as_number(t.get("reported_over_implied_tflops"))
    if ratio and abs(ratio - 1) > PRECISE:
        yield (
            "reported_over_implied_tflops",
            f"The TFLOP/s that are reported are {ratio:g} of what step time and batch imply: {_times(1 / ratio, c.gpus)}.",
        )
    rate = as_number(t.get("tflops_per_gpu"))
    if rate and c.peak_flops and rate * 1e12 > MOST_MFU * c.peak_flops:
        yield (
            "tflops_per_gpu",
            f"{rate:g} TFLOP/s are {rate * 1e12 / c.peak_flops:.0%} of the dense peak of {t.get('gpu')}: no whole step reaches that.",
        )
    if per_gpu and c.parameters and c.peak_flops:
        mfu, claimed_mfu = 6 * c.parameters * per_gpu / c.peak_flops, as_number(t.get("claimed_mfu"))
        if claimed_mfu and not 1 / 1.35 < claimed_mfu / mfu < 1.35:
            yield (
                "claimed_mfu",
                f"6 x {c.parameters / 1e9:.0f}e9 x {per_gpu:.1f} tokens/s is {mfu:.1%} of the peak of a GPU, not {claimed_mfu:.1%}: "
                f"{_times(claimed_mfu / mfu, c.gpus)}.",
            )
        elif mfu > MOST_MFU:
            yield "tokens_per_s_per_gpu", f"The rate is {mfu:.0%} of the dense peak: no whole step reaches that."


def _times(ratio: float, gpus: int | None) -> str:
    if gpus and gpus > 1 and abs(ratio / gpus - 1) < 0.1:
        return f"a factor of {ratio:.1f}, the number of GPUs was forgotten"
    return f"a factor of {ratio:.2g}" if ratio >= 1 else f"a factor of 1/{1 / ratio:.2g}"


def _two_gpus(c: Claim) -> Iterator[tuple[str, str]]:
    """One figure of two kinds of GPU."""
    names = dict.fromkeys(re.findall(r"\b([ABHVL]\d{2,4}[SX]?|GB\d{3}|MI\d{3}X?)\b", str(c.table.get("gpu") or "")))
    if len(names) > 1:
        first, second = (_gpu(n) for n in list(names)[:2])
        share = (
            f": their dense peaks are {first.peak('bf16') / 1e12:.0f} and {second.peak('bf16') / 1e12:.0f} TFLOP/s, so a rate of one is impossible on the other"
            if first and second
            else ""
        )
        yield "gpu", f"The figure names {' and '.join(names)}{share}."


CHECK = Check(
    "K41", "published figures against arithmetic", figures,
    Example({"claim.json": '{"model": "llama-2-70b", "gpu": "A100-SXM-80GB", "gpus": 16, "tokens_per_s_total": 337, "claimed_mfu": 0.455}\n'}),
    "error",
)  # fmt: skip
