"""Files of any engine as those of any other: what is kept is the same, what is not is said, nothing is written by half."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainwright.check.convert import KINDS, NO_CLIPPING, _leaves, convert, optimizer_numbers
from trainwright.check.read import UNKNOWN, read_setup
from trainwright.cli import main
from trainwright.emit import TARGETS, Options, emit
from trainwright.errors import SpecError

from .cases import BY_HAND, run_of

ZERO3 = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "steps_per_print": 10,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.98], "weight_decay": 0.01}},
}
ASKED = {"model": "llama-3.1-8b", "on": "16xH100"}


def one(**files):
    return {name.replace("_json", ".json"): json.dumps(text) if isinstance(text, dict) else text for name, text in files.items()}


def rows(found, kind=None):
    return {r.field: r for r in found.rows if kind in (None, r.kind)}


@pytest.mark.parametrize("to", sorted(TARGETS))
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_every_pair_of_targets_names_every_field_and_every_key(name, to):
    """Either one clear error, or a table in which each thing that the source says is kept, differs, or was not carried."""
    files = emit(run_of(BY_HAND[name]), name)
    files.pop("README.md")
    try:
        found = convert(files, to, **ASKED)
    except SpecError as error:
        assert error.where
        return
    setup = read_setup(files, "", {"model": ASKED["model"], "on": ASKED["on"]})
    said = {f.field for r in setup.readings for f in r.facts if f.field.startswith(("training.", "strategy."))}
    known = {"training.samples"}
    assert said - set(rows(found)) - known == set()
    carried = {(r.document.name, f.place.path) for r in setup.readings for f in r.facts} | {
        (r.document.name, path) for r in setup.readings for _, _, path in optimizer_numbers(setup).values()
    }
    named = {r.field for r in found.rows if r.kind == "not carried"}
    for reading in setup.readings:
        if reading.format != UNKNOWN:
            for path, _ in _leaves(reading.document.data):
                key = ".".join(map(str, path))
                assert key in named or (reading.document.name, path) in carried or (reading.document.name, path[:-1]) in carried, key
    assert {r.kind for r in found.rows} <= set(KINDS)


@pytest.mark.parametrize("name", ["deepspeed", "megatron", "trainer"])
def test_a_target_to_itself_changes_nothing(name):
    files = emit(run_of(BY_HAND[name]), name, Options(learning_rate=1e-4, clip=0.5, betas=(0.9, 0.98), weight_decay=0.05))
    files.pop("README.md")
    found = convert(files, name, **ASKED)
    differing = {
        f: (r.before, r.after) for f, r in rows(found, "changed").items() if f.startswith(("training.", "strategy.", "optimizer."))
    }
    assert differing == {}
    kept = rows(found, "kept")
    assert kept["training.learning_rate"].after == 1e-4
    assert kept["training.clip"].after == 0.5
    assert (kept["optimizer.beta2"].after, kept["optimizer.weight_decay"].after) == (0.98, 0.05)
    main = {"deepspeed": "ds_config.json", "megatron": "launch.sh", "trainer": "training_args.json"}[name]
    assert found.files[main] == files[main]


def test_zero3_becomes_fsdp2_with_the_same_numbers():
    found = convert(one(ds_json=ZERO3), "fsdp", **ASKED)
    plan = json.loads(found.files["plan.json"])
    assert (plan["strategy"]["sharding"], plan["strategy"]["micro_batch_size"], plan["training"]["global_batch_size"]) == ("zero3", 2, 128)
    assert (plan["learning_rate"], plan["betas"], plan["weight_decay"]) == (1e-5, [0.9, 0.98], 0.01)
    assert plan["clip"] == NO_CLIPPING  # DeepSpeed clips nothing unless told; this script would take 0 for no gradient at all
    changed = rows(found, "changed")
    assert changed["strategy.framework"].before == "deepspeed"
    assert rows(found, "kept")["training.accumulation"].after == 4
    assert "steps_per_print" in rows(found, "not carried")
    assert rows(found, "assumed")["training.master_weights"].after == "fp32"


def test_the_way_the_loss_is_averaged_is_named():
    found = convert(one(ds_json=ZERO3), "torchtitan", **ASKED)
    row = rows(found, "changed")["loss over accumulated micro-batches"]
    assert "micro-batches weigh alike" in row.before
    assert "every target token" in row.after
    assert rows(found, "changed")["training.gradient_dtype"].after == "fp32"
    assert "loss over accumulated micro-batches" not in rows(convert(one(ds_json=ZERO3), "megatron", **ASKED), "changed")


def test_the_loss_scale_is_named_for_fp16_only():
    fp16 = {**ZERO3, "bf16": {"enabled": False}, "fp16": {"enabled": True, "loss_scale": 0}}
    assert "fp16 loss scale" in rows(convert(one(ds_json=fp16), "megatron", **ASKED), "changed")
    assert "fp16 loss scale" not in rows(convert(one(ds_json=ZERO3), "megatron", **ASKED))


@pytest.mark.parametrize(
    ("files", "asked", "words"),
    [
        ({"a.json": "{"}, ASKED, "a.json"),
        ({"a.json": b"\x00\x01\x02\x00"}, ASKED, "a.json"),
        ({"notes.txt": "buy milk"}, ASKED, "no training configuration"),
        ({"ds.json": json.dumps(ZERO3)}, {"on": "8xH100"}, "no file names a model"),
        ({"ds.json": json.dumps(ZERO3)}, {"model": "lama-3.1-8b", "on": "8xH100"}, "nearest"),
        ({}, ASKED, "nothing to read"),
        ({"values.yaml": "{{ if .Values.x }}\na: 1\n{{ end }}\n"}, ASKED, "values.yaml"),
    ],
)
def test_bad_input_is_one_line_with_its_place(files, asked, words):
    with pytest.raises(SpecError, match=words):
        convert(files, "fsdp", **asked)


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["convert", *words])
    return int(stopped.value.code or 0)


@pytest.mark.parametrize(("target", "model"), [("torchtitan", "mixtral-8x7b"), ("megatron", "gpt-oss-20b")])
def test_another_model_is_another_run_and_not_written(target, model):
    with pytest.raises(SpecError, match=f"model: {model}: ") as refused:
        convert({"ds.json": json.dumps(ZERO3)}, target, model=model, on="16xH100")
    assert refused.value.where == "model"


def test_the_command_writes_all_or_nothing_and_replaces_only_when_told(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    config, folder = tmp_path / "my ds $(touch x).json", tmp_path / "out"
    config.write_text(json.dumps(ZERO3))
    words = (str(config), "--to", "fsdp", "--model", "llama-3.1-8b", "--on", "16xH100", "-o", str(folder))
    assert run(*words) == 0
    said = capsys.readouterr().out
    assert "strategy.framework" in said
    assert "steps_per_print" in said
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert {"plan.json", "launch.sh", "README.md"} <= set(before)
    assert run(*words) == 2
    assert "--force" in capsys.readouterr().err
    assert run(*words, "--force", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert {r["kind"] for r in document["rows"]} <= set(KINDS)
    assert not list(tmp_path.glob(".out*"))
    assert not (tmp_path / "x").exists()


def test_a_launch_line_alone(capsys):
    line = "torchrun --nproc-per-node 8 train.py --model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 1 --bf16 True --max_grad_norm 0.3"
    assert run("--launch", line, "--to", "deepspeed", "--json") == 0
    found = json.loads(json.loads(capsys.readouterr().out)["files"]["ds_config.json"])
    assert (found["train_batch_size"], found["gradient_clipping"], found["bf16"]) == (8, 0.3, {"enabled": True})
