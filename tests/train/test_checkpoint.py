"""Checkpoints: whole or not there, read by any layout, never unpickled. Four gloo ranks run the cases (checkpoint_ranks.py)."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import checkpoint_ranks
import torch
from workers import Workers

from trainwright.train.checkpoint import Checkpoints
from trainwright.train.whole import MANIFEST, Damaged, check, latest_step, read_manifest, step_folders

RANKS = 4


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, ranks: Callable[[int], Workers]) -> dict[str, list[Any]]:
    found = ranks(RANKS)("checkpoint_ranks:every_case", str(tmp_path_factory.mktemp("checkpoints")), timeout_s=400)
    return {name: json.loads(json.dumps([rank[name] for rank in found])) for name in found[0]}


def each(answers: dict[str, list[Any]], name: str) -> Any:
    """The answer that every rank gives."""
    assert all(a == answers[name][0] for a in answers[name]), answers[name]
    return answers[name][0]


def test_zero3_on_four_ranks_becomes_every_other_layout_to_the_bit(answers: dict[str, list[Any]]) -> None:
    found = each(answers, "zero3_on_four_ranks_to_every_other_layout")
    assert found == dict.fromkeys(["ddp", "hsdp 2x2", "zero3 on two ranks", "tp2", "pp2"], True)


def test_tensor_parallel_becomes_a_pipeline_to_the_bit(answers: dict[str, list[Any]]) -> None:
    assert each(answers, "tp2_to_pp2") is True


@pytest.mark.parametrize("name", checkpoint_ranks.MOVES)
def test_a_trainer_goes_on_in_another_layout_as_if_nothing_had_happened(name: str, tmp_path: Path, ranks: Callable[[int], Workers]) -> None:
    loss, other, norm, other_norm, steps = ranks(RANKS)("checkpoint_ranks:moved", str(tmp_path), name)[0]
    limit = 1e-3 if name == "masters" else 2e-6
    assert abs(loss - other) < limit
    assert abs(norm - other_norm) < limit * 10
    assert steps == 3
    if name == "zero3 to the same":
        assert loss == other


def test_a_save_holds_the_state_of_its_step_although_training_goes_on(answers: dict[str, list[Any]]) -> None:
    assert each(answers, "a_save_holds_the_state_of_its_step_although_training_goes_on") is True


def test_the_last_two_are_kept_and_latest_names_the_newest(answers: dict[str, list[Any]]) -> None:
    found = each(answers, "the_last_two_are_kept_and_latest_names_the_newest")
    assert found == [["latest", "step-00000003", "step-00000004"], "step-00000004"]


def test_damage_falls_back_to_the_one_before_and_is_named(answers: dict[str, list[Any]]) -> None:
    found = each(answers, "damage_falls_back_and_names_what_is_damaged")
    for how, says in (("flipped", "damaged between bytes"), ("cut", " of "), ("no manifest", "No such file")):
        step, skipped = found[how]
        assert step == 1, found[how]
        assert len(skipped) == 1
        assert "step-00000002" in skipped[0], how
        assert says in skipped[0], skipped
    assert found["all"].startswith("Damaged: no checkpoint is whole: ")
    assert "step-00000001/manifest.json: damaged" in found["all"]
    assert "\n" not in found["all"]


def test_another_model_is_refused_by_every_rank_in_one_line(answers: dict[str, list[Any]]) -> None:
    found = each(answers, "another_model_is_refused_by_every_rank")
    assert "is a checkpoint of another model: width 12 there, 16 here" in found["width"]
    assert "0.weight is [12, 6] there, [16, 6] here" in found["shape"]
    assert "it has no model.other" in found["name"]
    assert "was made with the optimizer adamw, here sgd" in found["optimizer"]


def test_a_full_disk_leaves_the_last_checkpoint_and_nothing_else(answers: dict[str, list[Any]]) -> None:
    said, step, left = each(answers, "a_full_disk_on_one_rank_leaves_the_last_checkpoint")
    assert said.startswith("CheckpointFailed: the checkpoint of step 2 cannot be written: ")
    assert "File too large" in said
    assert "\n" not in said
    assert (step, left) == (1, ["latest", "step-00000001"])


def test_half_written_folders_are_removed_and_never_read(answers: dict[str, list[Any]]) -> None:
    assert each(answers, "half_written_folders_are_removed_and_never_read") == [1, ["latest", "step-00000001"]]


def test_nothing_to_load_is_no_error_and_an_unusable_folder_is_one_line(answers: dict[str, list[Any]]) -> None:
    assert each(answers, "nothing_to_load_is_none") is True
    said = each(answers, "a_file_where_the_folder_should_be_is_said")
    assert said.startswith("checkpoints cannot be written: ")
    assert "File exists" in said


def test_export_puts_shards_together_under_other_names(answers: dict[str, list[Any]]) -> None:
    names, size, error = answers["export_puts_shards_together"][0]
    assert names == ["0.bias", "1.1.weight", "2.bias", "2.weight", "first.weight"]
    assert size == 4 * (6 * 12 + 12 + 12 * 5 + 10)
    assert error < 1e-6


# --- one process


def save_one(folder: Path, state: dict[str, torch.Tensor], step: int = 1) -> Path:
    checkpoints = Checkpoints(folder, {"model": {}})
    checkpoints.clean()
    checkpoints.save(step, state, {})
    checkpoints.wait()
    checkpoints.close()
    return step_folders(folder)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_every_dtype_and_scalars_come_back_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {"a": torch.randn(3, 5).to(dtype), "step": torch.tensor(7).to(dtype), "none": torch.zeros(0, 4).to(dtype)}
    save_one(tmp_path, state)
    found = {k: torch.zeros_like(v) for k, v in state.items()}
    assert Checkpoints(tmp_path, {"model": {}}).load(found) is not None
    assert all(
        torch.equal(found[k].view(torch.uint8) if k == "a" else found[k].float(), v.view(torch.uint8) if k == "a" else v.float())
        for k, v in state.items()
    )


def test_the_files_are_safetensors_and_json(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    folder = save_one(tmp_path, {"a": torch.arange(6.0).reshape(2, 3)})
    assert sorted(p.name for p in folder.iterdir()) == [MANIFEST, "rank-00000.safetensors"]
    found = library.load_file(str(folder / "rank-00000.safetensors"))
    assert [torch.equal(v, torch.arange(6.0).reshape(2, 3)) for v in found.values()] == [True]


class Bomb:
    def __reduce__(self) -> Any:
        return (os.abort, ())


def test_nothing_is_ever_unpickled(tmp_path: Path) -> None:
    """A pickle under any name of a checkpoint is damage; reading it would end this process."""
    folder = save_one(tmp_path, {"a": torch.ones(4)})
    bomb = pickle.dumps(Bomb())
    size = (folder / "rank-00000.safetensors").stat().st_size
    (folder / "rank-00000.safetensors").write_bytes(bomb.ljust(size, b"\0"))
    with pytest.raises(Damaged, match=r"rank-00000.safetensors: damaged between bytes"):
        Checkpoints(tmp_path, {"model": {}}).load({"a": torch.zeros(4)})
    (folder / MANIFEST).write_bytes(bomb)
    with pytest.raises(Damaged, match=r"manifest.json: damaged"):
        Checkpoints(tmp_path, {"model": {}}).load({"a": torch.zeros(4)})
    with pytest.raises(Exception, match="is no tensor"):
        save_one(tmp_path / "b", {"a": Bomb()})  # type: ignore[dict-item]


@pytest.mark.parametrize("edit", [b"", b"{", b"null", b'{"crc32":0,"body":{}}', b'{"crc32":2745614147,"body":{}}', b"[" * 100_000])
def test_any_other_manifest_is_damage(edit: bytes, tmp_path: Path) -> None:
    folder = save_one(tmp_path, {"a": torch.zeros(4)})
    (folder / MANIFEST).write_bytes(edit)
    with pytest.raises(Damaged, match="damaged"):
        read_manifest(folder)


def test_latest_is_a_marker_and_a_run_may_be_set_back_by_it(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_one(tmp_path, {"a": torch.full((1,), float(step))}, step)
    (tmp_path / "latest").write_text("step-00000002\n")
    assert [p.name[-1] for p in step_folders(tmp_path)] == ["2", "3", "1"]
    found = {"a": torch.zeros(1)}
    loaded = Checkpoints(tmp_path, {"model": {}}).load(found)
    assert loaded is not None
    assert (loaded.step, found["a"].item()) == (2, 2.0)
    save_one(tmp_path, {"a": torch.full((1,), 30.0)}, 3)  # the step is written anew
    assert Checkpoints(tmp_path, {"model": {}}).load(found)
    assert found["a"].item() == 30.0
    assert not list(tmp_path.glob("*.tmp"))


def test_the_step_that_is_said_to_be_saved_is_the_last_that_loads(tmp_path: Path) -> None:
    """One flipped byte of a tensor, a cut file, a manifest that is gone: each sets a run back by one checkpoint, and so does what is said of it."""
    folders = [save_one(tmp_path, {"a": torch.full((1000,), float(step))}, step) for step in (1, 2, 3, 4)]
    assert latest_step(tmp_path) == 4
    data = bytearray((folders[3] / "rank-00000.safetensors").read_bytes())
    data[-5] ^= 1
    (folders[3] / "rank-00000.safetensors").write_bytes(data)
    with pytest.raises(Damaged, match="damaged between bytes"):
        check(folders[3])
    assert latest_step(tmp_path) == 3
    (folders[2] / "rank-00000.safetensors").write_bytes(b"short")
    assert latest_step(tmp_path) == 2
    loaded = Checkpoints(tmp_path, {"model": {}}).load({"a": torch.zeros(1000)})
    assert loaded is not None
    assert loaded.step == 2
    (folders[1] / MANIFEST).unlink()
    assert latest_step(tmp_path) is None
    assert latest_step(tmp_path / "nothing") is None
