"""The registry of checks: every one of them finds its own fault, and what looks wrong and is right is left in peace."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trainwright as tw
from trainwright.check.checks import CHECKS
from trainwright.check.findings import Severity
from trainwright.check.run import Report, check
from trainwright.errors import SpecError

NAMES = sorted(CHECKS)


def ids(report: Report, least: Severity = Severity.NOTE) -> set[str]:
    return {f.check for f in report.findings if f.severity >= least}


def of(report: Report, name: str) -> list[str]:
    return [f.what for f in report.findings if f.check == name]


def example(name: str) -> Report:
    e = CHECKS[name].example
    return check(e.files, e.launch, e.model or None, e.on or None)


def test_all_forty_are_there() -> None:
    assert {f"K{n:02d}" for n in range(1, 41)} <= set(CHECKS)


@pytest.mark.parametrize("name", NAMES)
def test_every_check_finds_its_own_fault_in_the_smallest_file_that_has_it(name: str) -> None:
    found = [f for f in example(name).findings if f.check == name]
    assert found
    for finding in found:
        assert finding.place.file in {*CHECKS[name].example.files, "launch line"}
        assert finding.what.endswith((".", ")"))
        assert "\n" not in finding.what


@pytest.mark.parametrize("name", NAMES)
def test_a_check_left_out_is_silent(name: str) -> None:
    e = CHECKS[name].example
    assert name not in ids(check(e.files, e.launch, e.model or None, e.on or None, [name]))


def test_findings_come_most_severe_first() -> None:
    text = (
        '{"train_batch_size": 100, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": '
        '2, "cpu_offload": true}}'
    )
    severities = [f.severity for f in check({"ds.json": text}).findings]
    assert len(set(severities)) > 1
    assert severities == sorted(severities, reverse=True)


# --- what looks wrong and is right -----------------------------------------------------------------------------------------------------------


def megatron(*flags: str, gpus: int = 8) -> dict[str, str]:
    base = (
        "--hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --lr 1e-4 "
        "--train-iters 1000 --bf16"
    )
    return {"train.sh": f"#!/bin/bash\ntorchrun --nproc_per_node {gpus} pretrain_gpt.py {base} {' '.join(flags)}\n"}


def test_embedding_and_head_may_count_as_layers() -> None:
    uneven = ("--num-layers 30", "--pipeline-model-parallel-size 4", "--global-batch-size 64")
    assert "K14" in ids(check(megatron(*uneven)), Severity.ERROR)
    slots = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
    assert "K14" not in ids(check(megatron(*uneven, *slots)))


def test_a_shorter_last_stage_is_said() -> None:
    given_ = ("--num-layers 30", "--pipeline-model-parallel-size 4", "--global-batch-size 64", "--decoder-last-pipeline-num-layers 6")
    assert "K14" not in ids(check(megatron(*given_)))


def test_a_head_size_of_its_own_frees_the_hidden_size() -> None:
    odd = {
        "train.sh": megatron("--num-layers 24", "--global-batch-size 64")["train.sh"].replace("--hidden-size 1024", "--hidden-size 1000")
    }
    assert "K15" in ids(check(odd), Severity.ERROR)
    assert "K15" not in ids(check({"train.sh": odd["train.sh"].replace("--bf16", "--bf16 --kv-channels 64")}))


def test_both_precisions_on_auto_are_the_trainers_choice() -> None:
    text = '{"train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}'
    assert "K06" not in ids(check({"ds.json": text}))
    assert "K06" in ids(check({"ds.json": text.replace('"auto"}', "true}")}), Severity.ERROR)


ACCELERATE = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmain_training_function: main\nmixed_precision: bf16\n"
    "num_machines: {}\nnum_processes: {}\nmachine_rank: 0\n"
)


def test_several_machines_without_an_address_are_no_error() -> None:
    report = check({"acc.yaml": ACCELERATE.format(8, 64)})
    assert "K38" in ids(report)
    assert not report.has_errors


def test_agreement_between_files_is_not_flagged() -> None:
    ds = '{"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": 8, "zero_optimization": {"stage": 2}}'
    launch = (
        "torchrun --nproc_per_node 8 train.py --deepspeed ds.json --per_device_train_batch_size 1 --learning_rate 1e-5 --output_dir o "
        "--gradient_accumulation_steps {}"
    )
    assert "K11" not in ids(check({"ds.json": ds}, launch.format(8)))
    assert "K11" in ids(check({"ds.json": ds}, launch.format(16)), Severity.ERROR)


def test_one_node_stands_for_many_in_an_example() -> None:
    report = check(
        megatron("--num-layers 96", "--global-batch-size 1536", "--tensor-model-parallel-size 8", "--pipeline-model-parallel-size 16")
    )
    assert {f.severity for f in report.findings if f.check == "K03"} == {Severity.BLOCKED}


def test_the_world_of_the_launch_line_decides_the_batch() -> None:
    text = (
        '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2}}'
    )
    assert not check({"ds.json": text}).has_errors
    assert not check({"ds.json": text}, "torchrun --nproc_per_node 8 train.py --deepspeed ds.json").has_errors
    wrong = check({"ds.json": text}, "torchrun --nproc_per_node 4 train.py --deepspeed ds.json")
    assert "K02" in ids(wrong, Severity.ERROR)


def test_fp16_of_a_quantized_base_is_demanded_by_its_kernels() -> None:
    text = (
        "model_name_or_path: Qwen/Qwen-7B-Chat-{}\ntorch_dtype: float16\nbf16: true\nper_device_train_batch_size: 1\n"
        "gradient_accumulation_steps: 8\nlearning_rate: 3e-4\noutput_dir: o\n"
    )
    assert "K06" in ids(check({"a.yaml": text.format("Base")}))
    assert "K06" not in ids(check({"a.yaml": text.format("GPTQ-Int4")}))


def test_a_comment_key_is_no_unknown_key() -> None:
    assert "K01" not in ids(
        check({"ds.json": '{"_comment": "ours", "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}'})
    )


def test_variables_with_defaults_and_of_schedulers_are_set() -> None:
    script = (
        "#!/bin/bash\ntorchrun --nproc_per_node ${GPUS:-8} --nnodes $SLURM_NNODES train.py --output_dir $1 "
        "--per_device_train_batch_size 1 --learning_rate 1e-5\n"
    )
    assert "K19" not in ids(check({"t.sh": script}))


# --- faults in other words than the examples' ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({"ds.json": '{"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}'}, "K02"),
        ({"ds.json": '{"steps_per_print": 10, "gradient_clipping": 1.0, "optimizer": {"type": "Adam", "params": {"lr": 1e-4}}, '
            '"zero_optimization": {"stage": 2}}'}, "K02"),
        ({"a.yaml": ACCELERATE.format(1, 8).replace("MULTI_GPU", "DEEPSPEED") + "deepspeed_config:\n  zero_stage: 2\n  zero3_init_flag: true\n"}, "K05"),
        ({"a.yaml": ACCELERATE.format("${NODES}", 8)}, "K19"),
        ({"job.sh": "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gres=gpu:4\nGPUS_PER_NODE=8\ntorchrun --nproc_per_node $GPUS_PER_NODE t.py "
            "--output_dir o\n"}, "K12"),
        ({"job.sh": "#!/bin/bash\nset -e\n#SBATCH --nodes=2\ntorchrun --nproc_per_node 8 t.py --output_dir o\n"}, "K08"),
        ({"t.sh": "#!/bin/bash\nOUT_DIR=o\ntorchrun --nproc_per_node 8 t.py --output_dir $OUTDIR --learning_rate 1e-5 "
            "--per_device_train_batch_size 1\n"}, "K19"),
        ({"a.yaml": "<<<<<<< HEAD\nlearning_rate: 1e-5\n=======\nlearning_rate: 2e-5\n>>>>>>> other\noutput_dir: o\n"}, "K08"),
        ({"ds.json": '{"train_batch_size": 8, "train_batch_size": 16, "zero_optimization": {"stage": 1}}'}, "K09"),
        ({"t.sh": "#!/bin/bash\ntorchrun --nproc_per_node 8 t.py --model_name_or_path mosaicml/mpt-7b --fsdp 'full_shard auto_wrap' "
            "--output_dir o --learning_rate 1e-5 "
                  "--fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer --per_device_train_batch_size 1\n"}, "K21"),
        ({"t.sh": megatron("--num-layers 24", "--global-batch-size 64", "--tensor-model-parallel-size 16",
            gpus=16)["train.sh"].replace("--num-attention-heads 16", "--num-attention-heads 8")}, "K15"),
    ],
)  # fmt: skip
def test_faults_seen_elsewhere(files: dict[str, str], name: str) -> None:
    assert name in ids(check(files))


# --- memory and speed ------------------------------------------------------------------------------------------------------------------------

TRAINER = (
    "model_name_or_path: meta-llama/Llama-3.1-8B\nbf16: true\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 2\n"
    "learning_rate: 1.0e-5\noutput_dir: o\nmax_length: 2048\n"
)


def test_what_does_not_fit_is_an_error_only_where_the_gpus_are_named() -> None:
    assert "K04" in ids(check({"a.yaml": TRAINER}, on="8xA100-40GB"), Severity.ERROR)
    assert not check({"a.yaml": TRAINER}).has_errors


def test_a_sharded_run_fits() -> None:
    assert "K04" not in ids(check({"a.yaml": TRAINER + "fsdp: full_shard auto_wrap\ngradient_checkpointing: true\n"}, on="8xH100"))


def test_the_change_that_is_offered_makes_it_fit() -> None:
    report = check({"a.yaml": TRAINER.replace("train_batch_size: 1", "train_batch_size: 16") + "fsdp: full_shard auto_wrap\n"}, on="8xH100")
    (finding,) = [f for f in report.findings if f.check == "K04"]
    assert "recomputation" in finding.mend


# --- published figures -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "word"),
    [
        ('{"model": "Llama-3.2-1B", "gpu": "A10G-24GB", "n_gpus": 1, "strategy": "full fine-tune", "optimizer": "AdamW", "measured_peak_gb": 8}', "at least"),
        ('{"model": "70B", "gpu": "H100-80GB", "n_gpus": 64, "strategy": "ZeRO-3", "measured_peak_gb": 90}', "on a card of 80 GB"),
        ('{"model": "7B", "gpu": "H100-80GB", "n_gpus": 8, "strategy": "dp2", "tp": 4, "pp": 2, "measured_peak_gb": 60}', "= 16"),
        ('{"model": "7B", "gpu": "H100", "gpus": 8, "tokens_per_s_total": 10000, "claimed_mfu": 0.43}', "number of GPUs"),
        ('{"tokens_per_s_per_gpu": 500, "global_batch_size": 64, "seq_len": 4096, "step_s": 32.768, "n_gpus": 8}', "a factor of 2"),
        ('{"model": "7B", "gpu": "H100-SXM-80GB", "n_gpus": 8, "tflops_per_gpu": 900, "step_s": 1}', "no whole step"),
        ('{"reported_over_implied_tflops": 0.25}', "a factor of 4"),
        ('{"model": "7B", "gpu": "B200 (as printed: H200)", "n_gpus": 8, "measured_peak_gb": 90}', "B200 and H200"),
    ],
)  # fmt: skip
def test_figures_that_arithmetic_refutes(claim: str, word: str) -> None:
    assert any(word in what for what in of(check({"claim.json": claim}), "K41"))


def test_figures_that_can_be_true() -> None:
    for claim in (
        '{"model": "Llama-3.1-8B", "gpu": "H100-80GB", "n_gpus": 8, "strategy": "FSDP", "optimizer": "AdamW", "measured_peak_gb": 40}',
        '{"model": "7B", "gpu": "H100", "gpus": 8, "tokens_per_s_total": 80000, "claimed_mfu": 0.43}',
        '{"tokens_per_s_per_gpu": 1000, "global_batch_size": 64, "seq_len": 4096, "step_s": 32.768, "n_gpus": 8}',
    ):
        assert "K41" not in ids(check({"claim.json": claim})), claim


def test_every_line_of_many_claims_is_one() -> None:
    lines = '{"reported_over_implied_tflops": 0.5}\n\n{"reported_over_implied_tflops": 1.0}\n{"reported_over_implied_tflops": 2.0}\n'
    report = check({"c.jsonl": lines})
    assert [f.place.file for f in report.findings if f.check == "K41"] == ["c.jsonl:1", "c.jsonl:4"]


# --- manners ---------------------------------------------------------------------------------------------------------------------------------


def test_the_package_is_the_verb() -> None:
    assert tw.check({"claim.json": '{"reported_over_implied_tflops": 0.5}'}).has_errors


def test_names_that_do_not_exist_are_errors_of_the_caller() -> None:
    with pytest.raises(SpecError, match="K99"):
        check({"a.json": "{}"}, ignore=["K99"])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(NAMES), st.data())
def test_a_broken_file_is_judged_and_never_a_crash(name: str, data: st.DataObject) -> None:
    files = {}
    for file, text in CHECKS[name].example.files.items():
        at = data.draw(st.integers(0, max(0, len(text) - 1)))
        files[file] = (
            text[:at]
            + data.draw(st.sampled_from(["", "{", "]", '"', "\x00", "\t", "null", "-1", "1e400", "$(rm -rf x)", "ü", "\n"]))
            + text[at + data.draw(st.integers(0, 5)) :]
        )
    report = check(files, CHECKS[name].example.launch)
    assert report.to_dict()["counts"].keys() == {"error", "cannot run as written", "warning", "note"}


def test_an_answer_takes_less_than_a_second() -> None:
    check({"a.yaml": TRAINER}, on="8xH100")  # the first call imports
    start = time.process_time()
    check({"a.yaml": TRAINER}, on="8xA100-40GB")
    assert time.process_time() - start < 1


# --- general forms of faults that were first seen in one file each ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("degrees", "formula", "severities"),
    [
        ("TP=2\nPP=2\nCP=2\nDP=1", "$((TP * PP * DP))", {Severity.ERROR}),  # CP is given to the program and does not count
        ("TP=2\nPP=2\nCP=2\nDP=1", "$((TP * PP * CP * DP))", set()),
        (
            "WIDTH=2\nDEPTH=2\nRING=2\nCOPIES=1",
            "$((WIDTH * COPIES * RING))",
            {Severity.ERROR},
        ),  # by the flag, whatever the variable is called
        ("WIDTH=2\nDEPTH=2\nRING=2\nCOPIES=1", "$((WIDTH * DEPTH * RING * COPIES))", set()),
        ("TP=2\nPP=2\nDP=2", "$((TP * PP * DP))", {Severity.NOTE}),  # no context parallelism here: worth knowing, nothing more
        ("A=2\nB=4", "$((A * B))", set()),  # nothing says that these are degrees
    ],
)
def test_a_process_count_that_leaves_out_a_degree(degrees: str, formula: str, severities: set[Severity]) -> None:
    names = [line.partition("=")[0] for line in degrees.splitlines()]
    flags = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    given = " ".join(f"--{flag} ${name}" for flag, name in zip(flags, names[: len(names) - 1], strict=False)) if "A=" not in degrees else ""
    text = f"{degrees}\nGPUS={formula}\ntorchrun --nproc_per_node={formula} pretrain_gpt.py {given} --micro-batch-size 1\n"
    found = {f.severity for f in check({"run.sh": text}, ignore=["K33"]).findings if f.check == "K03" and "process count" in f.what}
    assert found == severities


def test_a_factor_that_repeats_a_degree_counts_as_it() -> None:
    text = "TP=2\nETP=${TP}\nCP=2\ntorchrun --nproc_per_node=$((ETP * CP)) pretrain_gpt.py --tensor-model-parallel-size $TP --context-parallel-size $CP\n"
    assert not [f for f in check({"run.sh": text}).findings if f.check == "K03" and "process count" in f.what]


AUTOMATIC = '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}'


def test_a_deepspeed_file_without_an_optimizer_is_noted_where_no_trainer_stands_beside_it() -> None:
    alone = check({"ds.json": AUTOMATIC})
    assert [f.severity for f in alone.findings if f.check == "K18"] == [Severity.NOTE]
    args = "model_name_or_path: gpt2\nper_device_train_batch_size: 1\noutput_dir: o\ndeepspeed: ds.json\nlearning_rate: 1e-5\n"
    assert "K18" not in ids(check({"ds.json": AUTOMATIC, "args.yaml": args}))


@pytest.mark.parametrize(
    ("name", "axis", "minutes", "found"),
    [
        ("meta-llama/Llama-3.1-405B", "tensor", 10, True),
        ("org/model-120B", "pipeline", 10, True),
        ("org/model-120B", "tensor", 10, False),
        ("org/model-120B", "pipeline", 60, False),
        ("org/model-8B", "pipeline", 10, False),
    ],
)
def test_a_short_time_limit_beside_a_long_first_step(name: str, axis: str, minutes: int, found: bool) -> None:
    """In any format, not only in the one in which it was first seen."""
    text = (
        f"torchrun --nproc_per_node 8 pretrain_gpt.py --load /models/{name} --model-name {name} --{axis}-model-parallel-size 8 "
        f"--distributed-timeout-minutes {minutes} --micro-batch-size 1\n"
    )
    yaml = f"step_scheduler:\n  local_batch_size: 1\nmodel:\n  pretrained_model_name_or_path: {name}\ndist_env:\n  timeout_minutes: {minutes}\n"
    yaml += f"distributed:\n  {'pp' if axis == 'pipeline' else 'tp'}_size: 8\n"
    assert ("K22" in ids(check({"auto.yaml": yaml}), Severity.WARNING)) == found
    assert "K22" not in ids(check({"run.sh": text.replace(f"minutes {minutes}", "minutes 60")}), Severity.WARNING)


def test_a_switch_of_qlora_without_a_width() -> None:
    base = "torchrun --nproc_per_node 2 train.py --model_name_or_path org/m-7B --output_dir o --per_device_train_batch_size 1 {}\n"
    assert "K07" in ids(check({"a.sh": base.format("--qlora True --model_max_length 512")}))
    assert "K07" not in ids(check({"a.sh": base.format("--qlora True --load_in_4bit True")}))
    assert "K07" not in ids(check({"a.sh": base.format("--q_lora True --model_max_length 512")}))  # FastChat's is 4 bits


def test_an_option_that_accelerate_hands_to_deepspeed_alone() -> None:
    config = "compute_environment: LOCAL_MACHINE\ndistributed_type: {}\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\nmachine_rank: 0\n"
    launch = "accelerate launch --config_file a.yaml --gradient_accumulation_steps 4 train.py --lr 1e-4\n"
    fsdp = check({"a.yaml": config.format("FSDP") + "fsdp_config:\n  fsdp_version: 2\n", "run.sh": launch})
    assert [f.severity for f in fsdp.findings if f.check == "K33" and "DeepSpeed only" in f.what] == [Severity.WARNING]
    deepspeed = check({"a.yaml": config.format("DEEPSPEED") + "deepspeed_config:\n  zero_stage: 2\n", "run.sh": launch})
    assert not [f for f in deepspeed.findings if f.check == "K33" and "DeepSpeed only" in f.what]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('{"zero_optimization": {"stage": 7}}', "zero_optimization.stage is '7'"),
        ('{"bf16": {"enabled": "maybe"}, "zero_optimization": {"stage": 1}}', "bf16.enabled is 'maybe'"),
        ('{"train_batch_size": -4, "zero_optimization": {"stage": 1}}', "train_batch_size is '-4'"),
        ('{"train_batch_size": NaN, "zero_optimization": {"stage": 1}}', "train_batch_size is 'nan'"),
        ('{"zero_optimization": [], "fp16": {"enabled": true}}', "zero_optimization is '[]'"),
    ],
)
def test_values_that_deepspeed_refuses(text: str, wanted: str) -> None:
    assert any(wanted in line for line in of(check({"ds.json": text}), "K27"))


def test_words_that_deepspeed_reads_as_values_and_placeholders_are_none_of_them() -> None:
    text = '{"train_batch_size": "auto", "zero_optimization": {"stage": "3"}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "${fp16}"}}'
    assert not of(check({"ds.json": text}), "K27")


def test_a_batch_that_suits_no_number_of_ranks_is_mended_for_those_that_are_there() -> None:
    text = (
        '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}'
    )
    (found,) = (f for f in check({"ds.json": text}, on="8xA100").findings if f.check == "K02")
    assert found.changes[0].value == 48
