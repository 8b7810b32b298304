"""plan, estimate, memory: what they print, what they write, how they end."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

import trainwright as tw

SMALL = ("llama-3.2-1b", "--on", "8xH100", "--seq-len", "2048", "--global-batch", "64")
Run = Callable[..., Any]


def test_plan_writes_a_run_spec_that_every_command_reads(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    ran = run("plan", *SMALL, "--top", "3", "-o", str(path))
    assert ran.status == 0, ran.err
    assert "wrote" in ran.out
    best = tw.plan({"model": "llama-3.2-1b", "cluster": "8xH100", "training": {"seq_len": 2048, "global_batch_size": 64}}, top=1)[0]
    again = tw.estimate(path)
    assert again.step_s == best.step_s
    assert again.peak_bytes == best.peak_bytes
    assert json.loads(run("estimate", str(path), "--json").out)["time"]["step_s"] == best.step_s


def test_json_is_one_document_and_nothing_else(run: Run) -> None:
    document = json.loads(run("plan", *SMALL, "--top", "2", "--json").out)
    assert len(document["plans"]) == 2
    first = document["plans"][0]
    assert set(first) >= {
        "spec",
        "fits",
        "gpus",
        "parameters",
        "memory",
        "time",
        "communication",
        "throughput",
        "run",
        "reasons",
        "warnings",
    }
    assert sum(first["memory"]["breakdown"].values()) == first["memory"]["peak_bytes"]
    assert sum(first["time"]["breakdown"].values()) == pytest.approx(first["time"]["step_s"])
    assert first["fits"] is True


def test_tables_keep_the_column_order_of_published_ones(run: Run) -> None:
    rows = list(csv.reader(run("plan", *SMALL, "--top", "2", "--csv").out.splitlines()))
    assert rows[0][:11] == ["GPUs", "GBS", "MBS", "Seq", "TP", "PP", "CP", "VP", "EP", "Tokens/s/GPU", "TFLOP/s/GPU"]
    assert len(rows) == 3
    markdown = run("plan", *SMALL, "--top", "1", "--markdown").out
    assert markdown.startswith("| GPUs | GBS")


def test_what_is_assumed_is_said(run: Run) -> None:
    out = " ".join(run("plan", "llama-3.2-1b", "--on", "8xH100", "--top", "1").out.split())
    assert "assumed: sequence length 8,192" in out
    assert "assumed: global batch 512" in out


def test_nothing_fits_ends_with_one_and_the_cheapest_change(run: Run) -> None:
    ran = run("plan", "llama-3.1-405b", "--on", "8xH100", "--offload", "none")
    assert ran.status == 1
    assert "Nothing fits" in ran.out
    assert "cheapest change" in ran.out


def test_an_estimate_that_does_not_fit_ends_with_one(run: Run) -> None:
    ran = run("estimate", "llama-3.1-70b", "--on", "8xH100", "--micro-batch", "1", "--global-batch", "8")
    assert ran.status == 1
    assert "Does not fit" in ran.out


def test_explain_prints_terms_with_sources(run: Run) -> None:
    out = run("estimate", *SMALL, "--explain").out
    assert "term by term" in out
    assert "source" in out


def test_memory_tells_phases_and_levers(run: Run) -> None:
    out = run("memory", *SMALL).out
    for word in ("forward", "backward", "optimizer", "full recomputation", "half the sequence length", "Allocated", "reserved"):
        assert word in out


@pytest.mark.parametrize("name", ["--tensor-model-parallel-size", "--tp"])
def test_megatrons_long_names_are_aliases(run: Run, name: str) -> None:
    found = json.loads(run("estimate", *SMALL, "--framework", "megatron", name, "2", "--json").out)
    assert found["spec"]["strategy"]["tp"] == 2


def test_stdin_is_a_run_spec_or_a_config(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = {"model": "llama-3.2-1b", "cluster": "8xH100", "training": {"seq_len": 2048, "global_batch_size": 64}}
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(json.dumps(spec).encode())))
    assert json.loads(run("memory", "-", "--json").out)["gpus"] == 8
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4}
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(json.dumps(config).encode())))
    assert json.loads(run("memory", "-", "--on", "1xA100", "--json").out)["gpus"] == 1


@pytest.mark.parametrize("width", ["60", "80", "200"])
def test_no_line_is_wider_than_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch, width: str) -> None:
    monkeypatch.setenv("COLUMNS", width)
    out = run("plan", *SMALL, "--top", "3").out
    assert max(map(len, out.splitlines())) <= int(width)
    assert "\x1b" not in out


def test_a_prime_number_of_gpus_has_a_plan(run: Run) -> None:
    assert run("plan", "llama-3.2-1b", "--on", "7xH100", "--seq-len", "2048", "--global-batch", "49", "--top", "1").status == 0


@pytest.mark.parametrize("command", ["models", "gpus", "prices"])
def test_catalogues(run: Run, command: str) -> None:
    rows = json.loads(run(command, "--json").out)
    assert len(rows) > 20
    assert run(command, "--markdown").out.startswith("| ")
    assert run(command, "nothing-like-this").status == 2


def test_explain_reads_the_log_of_a_run_that_ran_out_of_memory(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(
        "step 1\nCUDA out of memory. Tried to allocate 9.47 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.00 GiB is free. Of the allocated memory "
        "70.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated.\n"
    )
    ran = run("explain", str(log), "--model", "gpt2", "--on", "8xH100", "--json")
    said = json.loads(ran.out)
    assert said["message"]["allocated"] == 70 * 2**30
    assert "7.5 GiB too little" in said["conclusions"][0]
    assert "more than the plan's peak" in said["conclusions"][1]
