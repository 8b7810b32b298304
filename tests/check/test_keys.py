"""The lists of keys: where each comes from, that none says what another says, and what is made of a key that no list has."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from trainwright.check.checks.keys import vocabulary
from trainwright.check.findings import Severity
from trainwright.check.formats import FORMATS
from trainwright.check.known import keys
from trainwright.check.run import check
from trainwright.check.view import plain

FOLDER = resources.files("trainwright.check").joinpath("keys")
LISTED = sorted(f.name.removesuffix(".json") for f in FOLDER.iterdir() if f.name.endswith(".json") and f.name != "vocabulary.json")


@pytest.mark.parametrize("name", LISTED)
def test_a_list_names_its_source_and_version(name: str) -> None:
    found = keys(name)
    assert name in FORMATS
    assert found.source
    assert found.version
    assert all(found.tables.values())


def test_the_formats_that_people_write_by_hand_have_lists() -> None:
    assert {"gpt_neox", "nemo", "automodel", "torchtune", "llm_foundry", "torchrun"} <= set(LISTED)


def test_the_vocabulary_says_nothing_that_a_list_says() -> None:
    for name, words in vocabulary().items():
        listed = {plain(k) for names in keys(name).tables.values() for k in names}
        assert not words & listed, name


def test_every_entry_is_a_word() -> None:
    document = json.loads(FOLDER.joinpath("vocabulary.json").read_text(encoding="utf-8"))
    assert all(row["source"] and row["keys"] == sorted(set(row["keys"])) for row in document.values())


NEOX = "pipe_parallel_size: 1\nnum_layers: 12\nhidden_size: 768\nnum_attention_heads: 12\nseq_length: 2048\nmax_position_embeddings: 2048\nnorm: rmsnorm\n"
TUNE = "model:\n  _component_: torchtune.models.llama3.llama3_8b\ntokenizer:\n  _component_: torchtune.models.llama3.llama3_tokenizer\nbatch_size: 2\n"
FOUNDRY = (
    "max_seq_len: 2048\nglobal_train_batch_size: 8\nmax_duration: 10ba\ntrain_loader: {name: text}\nprecision: amp_bf16\neval_interval: 1\n"
)
AUTOMODEL = "step_scheduler:\n  global_batch_size: 8\n  local_batch_size: 1\n  {}\ndistributed:\n  dp_size: 8\ndist_env:\n  backend: nccl\n"
NEMO = "trainer:\n  devices: 8\n  num_nodes: 1\nmodel:\n  micro_batch_size: 1\n  global_batch_size: 8\n  {}\n"


@pytest.mark.parametrize(
    ("file", "text", "wrong", "right", "severity"),
    [
        ("neox.yml", NEOX + "gradient_acumulation_steps: 2\n", "gradient_acumulation_steps", "gradient_accumulation_steps", Severity.ERROR),
        ("tune.yaml", TUNE + "gradient_acumulation_steps: 2\n", "gradient_acumulation_steps", "gradient_accumulation_steps", Severity.WARNING),
        ("mosaic.yaml", FOUNDRY + "device_train_microbatchsize: 1\n", "device_train_microbatchsize", "device_train_microbatch_size", Severity.WARNING),
        ("auto.yaml", AUTOMODEL.format("ckpt_every_step: 5"), "ckpt_every_step", "ckpt_every_steps", Severity.WARNING),
        ("nemo.yaml", NEMO.format("tensor_model_paralel_size: 2"), "tensor_model_paralel_size", "tensor_model_parallel_size", Severity.WARNING),
        ("run.sh", "torchrun --nproc-per-nod 8 train.py --lr 1e-4\n", "nproc-per-nod", "nproc_per_node", Severity.WARNING),
    ],
)  # fmt: skip
def test_a_misspelt_key_is_named_with_the_right_one(file: str, text: str, wrong: str, right: str, severity: Severity) -> None:
    (finding,) = [f for f in check({file: text}).findings if f.check == "K01"]
    assert wrong in finding.what
    assert right in finding.what + finding.mend
    assert finding.severity is severity


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("neox.yml", NEOX + "train-iters: 100\nzero_optimization: {stage: 1}\n"),
        ("tune.yaml", TUNE + "optimizer:\n  _component_: torch.optim.AdamW\n  lr: 2e-5\n"),
        ("mosaic.yaml", FOUNDRY + "my_own_thing: 1\n"),
        ("run.sh", "torchrun --standalone --nproc_per_node 8 --rdzv-backend c10d --max-restarts 3 train.py --anything 1\n"),
        ("run.sh", "python -m torch.distributed.launch --nproc_per_node 8 --use_env train.py --lr 1\n"),
    ],
)
def test_what_the_engine_reads_and_what_a_program_may_have_is_no_fault(file: str, text: str) -> None:
    assert not [f for f in check({file: text}).findings if f.check == "K01"]
