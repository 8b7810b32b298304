"""Runs that were measured: read, compared, and what they say about the next prediction."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainwright as tw
from trainwright.cli.calibrate import TEMPLATE
from trainwright.measure.calibrate import NOISE, SPREAD, Factor, Profile, calibrate, read_profile, shrunk, supported
from trainwright.measure.compare import Comparison, by_key, coverage, rank_correlation, summarize
from trainwright.measure.record import RunRecord, read_records

SPEC = {"model": "llama-3.2-1b", "cluster": "8xH100", "training": {"seq_len": 2048, "global_batch_size": 64}}


def measured(factor: float, **more: object) -> Comparison:
    estimate = tw.estimate(SPEC)
    return Comparison(RunRecord("r", SPEC, step_s=estimate.step_s * factor, **more), estimate)  # type: ignore[arg-type]


def test_a_csv_and_a_jsonl_of_the_same_run_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text(TEMPLATE)
    csv = read_records(tmp_path / "runs.csv")
    rows = [{"id": r.id, "spec": r.spec, "measured": {"step_s": r.step_s}} for r in csv]
    (tmp_path / "runs.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    assert read_records(tmp_path / "runs.jsonl") == csv
    assert csv[0].spec["strategy"]["micro_batch_size"] == 1
    assert csv[0].step_s == 11.2


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", "", "holds no runs"),
        ("a.jsonl", "{", "line 1: is no JSON"),
        ("a.jsonl", "[]", "is no table"),
        ("a.jsonl", '{"spec": {}}', "needs a spec and what was measured"),
        ("a.jsonl", '{"spec": {}, "measured": {"step_s": -1}}', "is no positive number"),
        ("a.jsonl", '{"spec": {}, "measured": {"peak_kind": "total"}}', "nearest: allocated"),
        ("a.csv", "id,tp\n1,2\n", "no column model"),
        ("none.csv", None, "is no file"),
    ],
)
def test_what_is_wrong_with_a_file_of_runs_is_named(tmp_path: Path, name: str, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(tw.SpecError, match=says):
        read_records(tmp_path / name)


def test_errors_keep_their_sign_and_peaks_their_kind() -> None:
    slow = measured(1.25, peak_bytes=1e9, peak_kind="device")
    assert slow.time_error == pytest.approx(1 / 1.25 - 1)
    assert slow.predicted_peak == slow.estimate.device_bytes
    live = measured(1.0, peak_bytes=1e9)
    assert live.predicted_peak < slow.predicted_peak
    assert live.inside is True
    assert measured(10.0).inside is False
    assert coverage([live, measured(10.0)]) == 0.5


def test_summaries() -> None:
    assert summarize([None]) is None
    s = summarize([0.1, -0.2, None, 0.3])
    assert s is not None
    assert (s.rows, s.median, s.bias) == (3, pytest.approx(0.2), pytest.approx(0.1))
    rows = [measured(1.0), measured(2.0)]
    assert by_key(rows, lambda c: c.estimate.cluster.gpu.id, lambda c: c.time_error)["H100-SXM-80GB"].rows == 2


@given(st.lists(st.integers(0, 5), min_size=3, max_size=12))
def test_rank_correlation_is_one_for_the_same_order(values: list[int]) -> None:
    found = rank_correlation([float(v) for v in values], [float(v) ** 3 + 1 for v in values])
    assert found is None if len(set(values)) < 2 else found == pytest.approx(1.0)


@given(st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=50))
def test_the_factor_lies_between_one_and_the_median(residuals: list[float]) -> None:
    log, middle = shrunk(residuals), float(np.median(residuals))
    assert min(0.0, middle) - 1e-12 <= log <= max(0.0, middle) + 1e-12


def test_more_runs_are_believed_more() -> None:
    one, many = shrunk([0.1]), shrunk([0.1] * 20)
    assert 0 < one < many < 0.1
    assert one == pytest.approx(0.1 / (1 + (NOISE / SPREAD) ** 2))


def test_a_factor_that_the_others_do_not_bear_out_is_not_used() -> None:
    assert supported([0.1, 0.12, 0.09, 0.11, 0.1])  # all lean the same way
    assert not supported([0.3, -0.25, 0.02, -0.01, 0.1])  # scatter
    assert not supported([0.02]), "one run within the noise of repeats"
    assert supported([0.2])
    rows = [measured(factor) for factor in (1.3, 0.8, 1.02, 0.99, 1.1)]
    assert calibrate(rows).factors[0].factor == 1.0


@given(st.lists(st.floats(-0.5, 0.5), min_size=3, max_size=12))
def test_what_is_supported_helps_the_runs_it_is_made_from_on_the_whole(residuals: list[float]) -> None:
    if supported(residuals):
        factor = shrunk(residuals)
        before, after = (sum(abs(math.expm1(f - r)) for r in residuals) for f in (0.0, factor))
        assert after < before * 1.001


def test_a_profile_moves_the_next_prediction_and_the_search_alike(tmp_path: Path) -> None:
    profile = calibrate([measured(1.2), measured(1.2), measured(1.2)])
    (tmp_path / "profile.toml").write_text(profile.to_toml())
    again = read_profile(tmp_path / "profile.toml")
    assert again == profile
    assert profile.factors[0].after < profile.factors[0].before
    factor = again.factor("H100-SXM-80GB", "fsdp2")
    before, after = tw.estimate(SPEC), tw.estimate(SPEC, profile=again)
    assert after.step_s == pytest.approx(before.step_s * factor)
    assert after.peak_bytes == before.peak_bytes
    assert sum(after.to_dict()["time"]["breakdown"].values()) == pytest.approx(after.step_s)
    best, calibrated = tw.plan(SPEC, top=1)[0], tw.plan(SPEC, top=1, profile=again)[0]
    assert calibrated.plan == best.plan
    assert calibrated.step_s == pytest.approx(best.step_s * factor)


def test_another_gpu_or_framework_keeps_its_prediction() -> None:
    profile = Profile((Factor("A100-SXM-80GB", "megatron", 2.0, 3, 0.5, 0.0),))
    assert tw.estimate(SPEC, profile=profile).step_s == tw.estimate(SPEC).step_s


@pytest.mark.parametrize(
    "text", ["", "x", "[factor]\n", '[[factor]]\ngpu = "h"\n', '[[factor]]\ngpu = "h"\nframework = "ddp"\nfactor = 99\n']
)
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(tw.SpecError):
        read_profile(tmp_path / "p.toml")


def test_nothing_measured_nothing_learned() -> None:
    with pytest.raises(tw.SpecError, match="no run has a measured step time"):
        calibrate([Comparison(RunRecord("r", SPEC), tw.estimate(SPEC))])
