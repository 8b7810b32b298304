"""From and to Hugging Face's layout on the command line: begin with a folder of transformers, train, write a folder that transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_run import PLAN, ended, train

from trainwright.cli import main
from trainwright.errors import SpecError
from trainwright.train import weights
from trainwright.train.export import checkpoint_of, export

CONFIG = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
CONFIG |= {"vocab_size": 257, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
TOKENS = torch.arange(40).view(2, 20) * 7 % 257


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan, transformers' own files in `theirs`, and a run of one step with a learning rate of nothing that began with them and was exported."""
    where = tmp_path_factory.mktemp("export")
    (where / "plan.toml").write_text(PLAN)
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    for p in made.parameters():
        torch.nn.init.normal_(p, 0.5 if p.dim() == 1 else 0.0, 0.1)
    made.save_pretrained(where / "theirs")
    still = ["--learning-rate", "0", "--min-learning-rate", "0", "--weight-decay", "0"]
    status, _, err = ended(train(where, "plan.toml", "-o", "run", "--steps", "1", "--init", "theirs", "--export", "ours", *still))
    assert status == 0, err
    assert "exported: ours" in err
    return where


def logits(folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=TOKENS).logits
    return found


@pytest.mark.filterwarnings("ignore")
def test_logits_are_equal_on_the_way_there_and_back(folder: Path) -> None:
    """Through two ranks, ZeRO-3 and a checkpoint."""
    assert torch.equal(logits(folder / "theirs"), logits(folder / "ours"))
    found = export(folder / "run", folder / "low", "bf16")
    assert (found.step, found.parameters) == (1, sum(p.numel() for p in load_file(folder / "theirs" / weights.SINGLE).values()))
    torch.testing.assert_close(logits(folder / "low").float(), logits(folder / "ours"), rtol=0.1, atol=0.1)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    return int(stopped.value.code or 0), capsys.readouterr().err


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert said(capsys, "export", "run", "-o", "again") == (0, "again: 106,944 parameters, 418 KiB, of step 1\n")
    assert said(capsys, "export", "run", "-o", "again") == (2, "trainwright: again: holds a model already\n")
    assert said(capsys, "export", "nowhere", "-o", "x") == (2, "trainwright: nowhere: there is no such folder\n")
    assert said(capsys, "export", "theirs", "-o", "x") == (2, "trainwright: theirs: holds no checkpoint\n")
    status, line = said(capsys, "export", "run", "-o", "x", "--dtype", "bf61")
    assert (status, line.startswith("trainwright: dtype: 'bf61' is not a type of weights")) == (2, True)
    assert not (folder / "x").exists()


def test_a_damaged_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = checkpoint_of(folder / "run")
    file = checkpoint / "rank-00001.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    try:
        status, line = said(capsys, "export", str(folder / "run"), "-o", str(folder / "cut"))
        assert (status, "rank-00001.safetensors" in line, line.count("\n")) == (2, True, 1)
    finally:
        file.write_bytes(whole)


def other(folder: Path, name: str, change: Any) -> Path:
    """A copy of transformers' folder with its tensors changed."""
    tensors = load_file(folder / "theirs" / weights.SINGLE)
    change(tensors)
    (folder / name).mkdir()
    save_file(tensors, folder / name / weights.SINGLE, metadata={"format": "pt"})
    return folder / name


def init(folder: Path) -> str:
    """What a rank says that begins with the folder."""
    from trainwright.catalog.load import load_model
    from trainwright.train.decoder import build

    model = load_model({"model_type": "llama", **CONFIG})
    with pytest.raises(SpecError) as error:
        weights.load(model, folder, build(model, device="cpu").named_parameters())
    with pytest.raises(SpecError) as before:  # without a tensor of the files, or of the model
        weights.check(model, folder, build(model, device="meta").named_parameters())
    assert str(before.value) == str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value).replace(f"{folder}", "FOLDER")


def test_each_wrong_beginning_is_one_line(folder: Path) -> None:
    gone = "model.layers.1.mlp.up_proj.weight"
    assert init(other(folder, "missing", lambda t: t.pop(gone))) == f"init: FOLDER holds no {gone}: it is of another model"
    wide = other(folder, "vocabulary", lambda t: t.update({"model.embed_tokens.weight": torch.zeros(300, 64)}))
    assert init(wide) == "init: FOLDER has a vocabulary of 300, the model of 257"
    deep = other(folder, "deeper", lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.zeros(64)}))
    assert init(deep) == "init: FOLDER holds 3 layers, the model has 2: it is of another model"
    narrow = other(folder, "wrong", lambda t: t.update({gone: torch.zeros(96, 64)}))
    assert init(narrow) == f"init: {gone} is (96, 64) in FOLDER, (128, 64) in the model"
    cut = other(folder, "cut", lambda t: None)
    file = cut / weights.SINGLE
    file.write_bytes(file.read_bytes()[:-1000])
    assert init(cut).startswith("init: FOLDER/model.safetensors cannot be read: ")
    (folder / "empty").mkdir()
    assert init(folder / "empty") == "init: FOLDER has neither model.safetensors nor model.safetensors.index.json"
    (folder / "empty" / weights.INDEX).write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    assert init(folder / "empty").startswith("init: FOLDER/gone.safetensors cannot be read: ")


def test_what_a_run_cannot_start_from_is_said_before_a_rank_starts_and_leaves_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this very process: no rank needs to start for it."""
    monkeypatch.chdir(folder)
    never = ("train", "plan.toml", "-o", "never")
    assert said(capsys, *never, "--init", "their") == (2, "trainwright: init: there is no such folder (nearest: theirs)\n")
    gone = "model.layers.1.mlp.up_proj.weight"
    other(folder, "lacking", lambda t: t.pop(gone))
    lacking = f"trainwright: init: lacking holds no {gone}: it is of another model\n"
    assert said(capsys, *never, "--init", "lacking") == (2, lacking)
    assert said(capsys, *never, "--model-from", "json:make") == (2, "trainwright: model_from: json has no function make\n")
    assert not (folder / "never").exists()
    assert said(capsys, *never, "--export", "ours") == (2, "trainwright: ours: holds a model already\n")


def test_a_module_of_ones_own_trains_resumes_and_is_exported_under_its_names(folder: Path) -> None:
    """`own.Llama` on two ranks under ZeRO-3, from the command line; what comes out is transformers' own state."""
    (folder / "small.toml").write_text(
        PLAN.replace("vocab_size = 257", "vocab_size = 256").replace("[train]", '[train]\nmodel_from = "own:Llama"')
    )
    status, _, err = ended(train(folder, "small.toml", "-o", "mine", "--steps", "1", "--data", str(byte_data(folder))))
    assert status == 0, err
    export(folder / "mine", folder / "mine-out")
    import own

    own.Llama().load_state_dict(load_file(folder / "mine-out" / weights.SINGLE))
    status, _, err = ended(train(folder, "--resume", "mine", "--steps", "2", "--model-from", "own:Split"))
    assert status == 2, err
    assert "is a checkpoint of another model: module own:Llama there, own:Split here" in err.replace("\n", " ")


def byte_data(folder: Path) -> Path:
    """Tokens below 256, since `own.Llama` has no end-of-document token."""
    import numpy as np

    path = folder / "tokens.npy"
    np.save(path, np.arange(20_000, dtype=np.uint16) * 7 % 250)
    return path
