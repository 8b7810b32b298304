"""`trainwright verify --memory` without PyTorch: what is refused and why, how a measurement is held against an estimate."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib import util
from typing import Any

import pytest

import trainwright as tw
from trainwright.cli import main
from trainwright.errors import SpecError
from trainwright.measure.verify import Measurement, SentMessage, Verification
from trainwright.resolve import resolve
from trainwright.spec.run import validate
from trainwright.train.scope import EXTRA, measurable

LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}


def spec(training: dict[str, Any] | None = None, model: Any = None, **strategy: Any) -> dict[str, Any]:
    return {
        "model": model or LLAMA,
        "cluster": {"gpu": "H100-SXM-80GB", "nodes": 1, "gpus_per_node": 4 if strategy.get("dp") != 1 else 2},
        "training": {"seq_len": 64, "global_batch_size": 8, **(training or {})},
        "strategy": {"framework": "fsdp2", **strategy},
    }


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "megatron": (spec(framework="megatron"), "strategy.framework.*nearest: fsdp2, ddp"),
    "deepspeed": (spec(framework="deepspeed"), "strategy.framework.*nearest: fsdp2, ddp"),
    "mixture of experts": (spec(model="mixtral-8x7b"), "model: .*mixture of experts"),
    "family": (spec(model="gemma-2-9b"), "model: the family gemma2 .*nearest: gpt2, llama"),
    "tensor parallel family": (
        spec(model=LLAMA | {"model_type": "olmo2"}, tp=2),
        "model: the family olmo2 .*tensor parallelism.*nearest: gpt2",
    ),
    "offload": (spec(offload="optimizer-cpu"), "strategy.offload.*nearest: none"),
    "compile": (spec(compile=True), "strategy.compile.*nearest: False"),
    "context parallel": (spec(cp=2), "strategy.cp.*nearest: 1"),
    "schedule": (spec(pp=2, schedule="v-half"), "strategy.schedule.*nearest: .*1f1b, .*zb-v"),
    "split backward past DDP's hooks": (
        spec({"master_weights": "none"}, framework="ddp", pp=2, schedule="zb-v"),
        "strategy.framework: zb-v .*nearest: fsdp2",
    ),
    "split backward of weights that are sharded again": (
        spec(sharding="zero3", pp=2, schedule="dualpipe-v"),
        "strategy.sharding: dualpipe-v .*nearest: zero2",
    ),
    "8-bit optimizer": (spec({"optimizer": "adam8bit"}), "training.optimizer.*nearest: adamw"),
    "fp8": (spec({"precision": "fp8"}), "training.precision.*nearest: bf16"),
    "qlora": (spec({"method": "qlora"}), "training.method.*nearest: full, lora"),
    "dropout": (spec({"dropout": 0.1}), "training.dropout.*nearest: 0.0"),
    "masters of DDP": (spec(framework="ddp"), "training.master_weights.*autocast"),
    "plain TP": (spec({"master_weights": "none"}, sharding="none", tp=2, pp=1, dp=1), "optimizer_kernel.*nearest: for-loop"),
    "options": (spec(options={"bucket_mb": 3}), "strategy.options"),
    "adapters": (spec({"method": "lora", "lora_targets": ["router"]}), "training.lora_targets.*nearest: .*q_proj"),
    "modules": (spec(recompute="selective", recompute_modules=["mlp"]), "strategy.recompute_modules"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_measured_names_the_field_and_what_can(name: str) -> None:
    document, says = REFUSED[name]
    with pytest.raises(SpecError, match=says) as refused:
        measurable(resolve(validate(document)))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved-1f1b", 2), ("zb-v", 2), ("dualpipe-v", 2)])
def test_a_schedule_brings_its_chunks_where_nobody_says_how_many(schedule: str, chunks: int) -> None:
    assert resolve(validate(spec(pp=2, schedule=schedule))).plan.virtual_stages == chunks
    assert resolve(validate(spec(schedule=schedule))).plan.virtual_stages == 1
    assert resolve(validate(spec(pp=2, schedule=schedule, virtual_stages=3))).plan.virtual_stages == 3


def test_sizes_and_catalogue_models_are_measurable_with_every_field_filled() -> None:
    for model in ("7B", "llama-3.1-8b", "qwen3-8b", "gpt2", "mistral-7b"):
        table = measurable(resolve(validate(spec(model=model))))
        assert table["model"]["model_type"] in ("llama", "qwen3", "gpt2", "mistral")
        assert table["strategy"]["dp"] == 4
        assert table["training"]["optimizer_kernel"] == "fused"


def as_predicted(**changes: Any) -> Verification:
    """A measurement that says what the estimate says, but for `changes`."""
    estimate = tw.estimate(spec())
    memory = estimate.memory_dict()
    states = memory["states"]
    found = Measurement(
        parameter_bytes=states["parameters"] + states["master_weights"],
        gradient_bytes=states["gradients"],
        optimizer_bytes=states["optimizer"],
        saved_bytes=memory["saved_bytes"],
        after_forward_bytes=0,
        after_backward_bytes=0,
        peak_bytes=memory["peak_bytes"] - memory["breakdown"]["framework"],
        phases={k: memory["phases"][k] for k in ("forward", "backward", "optimizer")},
        messages=tuple(
            SentMessage("dp", m["collective"], m["ranks"], "bfloat16", m["count"], m["bytes_per_rank"]) for m in estimate.communication()
        ),
        rank=0,
        software="torch 0",
        seconds=0.0,
    )
    return Verification(estimate, replace(found, **changes))


def test_rows_are_signed_and_decide() -> None:
    same = as_predicted()
    assert same.exact
    assert {r.difference for r in same.rows} == {0}
    peak = same.measurement.peak_bytes
    assert as_predicted(peak_bytes=peak - 8192).exact
    off = as_predicted(peak_bytes=peak + 8193)
    assert not off.exact
    assert {r.what: r.difference for r in off.rows if not off.within(r)} == {"peak": -8193}


def test_a_message_that_was_not_foreseen_and_a_call_too_few_are_found() -> None:
    sent = as_predicted().measurement.messages
    more = as_predicted(messages=(*sent, SentMessage("tp", "all_reduce", 2, "bfloat16", 4, 40_000)))
    assert {r.what: (r.predicted, r.measured) for r in more.rows if not more.within(r)} == {
        "tp all_reduce": (0, 40_000),
        "tp all_reduce, calls": (0, 4),
    }
    fewer = as_predicted(messages=(replace(sent[0], count=sent[0].count - 1), *sent[1:]))
    assert [r.difference for r in fewer.rows if not fewer.within(r)] == [1]


def test_tolerance_is_a_number_of_bytes() -> None:
    same = as_predicted()
    with pytest.raises(SpecError, match="tolerance"):
        Verification(same.estimate, same.measurement, -1)


def line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["verify", *arguments])
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, len(err.splitlines())) == (2, "", 1), err
    return err


def test_what_another_engine_runs_is_not_run_by_pytorch_without_a_word() -> None:
    pytest.importorskip("torch")
    from trainwright.train.verify import require_engine

    require_engine(resolve(validate(spec())))
    for sharding in ("zero1", "zero3"):
        plan = spec({"gradient_dtype": "bf16"}, framework="deepspeed", sharding=sharding)
        with pytest.raises(SpecError, match=r"strategy.framework: .*not DeepSpeed, .*--engine deepspeed. runs .nearest: fsdp2, ddp"):
            require_engine(resolve(validate(plan)))
    with pytest.raises(SpecError, match=r"training\.method"):
        require_engine(resolve(validate(spec({"method": "lora"}))))


def test_the_command_says_what_there_is_to_verify(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--memory" in line(capsys, "10M", "--on", "8xH100")
    assert "strategy.framework" in line(capsys, "10M", "--on", "8xH100", "--framework", "megatron", "--memory")
    assert "tolerance" in line(capsys, "10M", "--on", "8xH100", "--memory", "--tolerance", "-1")


@pytest.mark.skipif(util.find_spec("torch") is not None, reason="torch is installed: nothing is missing")
def test_without_torch_one_line_says_how_to_get_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert EXTRA in line(capsys, "10M", "--on", "8xH100", "--memory")


def test_the_package_and_its_commands_import_no_torch() -> None:
    code = "import sys, trainwright.api, trainwright.cli, trainwright.train.scope; trainwright.cli.build(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_a_batch_that_this_machine_is_too_slow_for_is_told_with_one_that_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainwright.train import verify

    def asked(batch: int) -> None:
        training = {"seq_len": 1024, "global_batch_size": batch}
        verify.require_room(resolve(validate({"model": "10M", "cluster": "2xH100", "training": training})))

    monkeypatch.setattr(verify, "hardware", lambda: ("cpu", 2, 1))
    with pytest.raises(SpecError, match="takes at least") as refusal:
        asked(4096)
    fits = int(refusal.value.nearest.rpartition(" a batch of ")[2])
    assert 0 < fits < 4096
    asked(fits)
