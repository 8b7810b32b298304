"""The emitted files loaded by the targets' own parsers, on plans at random. Each needs its package and says so where it is absent.

pip install torch==2.13.0 transformers accelerate deepspeed torchtitan torchao kubeflow-trainer-api skypilot
TRAINWRIGHT_ACCEPTED=300 TRAINWRIGHT_MEGATRON=/path/to/Megatron-LM pytest -s -m slow tests/emit/test_real_parsers.py
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from trainwright.emit import TARGETS, Options, settled
from trainwright.emit.nearest import mended
from trainwright.resolve import Run

from .cases import documents, legal, run_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ACCEPTED = int(
    os.environ.get("TRAINWRIGHT_ACCEPTED", "15")
)  # plans that each parser must have accepted; a third to all of those drawn are legal
SHARDINGS = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}


def needs(package: str) -> types.ModuleType:
    return pytest.importorskip(package, reason=f"{package} is not installed: its parser cannot be asked")


def over_plans(name: str, framework: str | None, accept: Callable[[Run, dict[str, str]], None]) -> None:
    """`accept` on the files of random legal plans, mended to what the target can express, until `ACCEPTED` have been; a refusal is a failure."""
    target, seen = TARGETS[name], []

    @settings(max_examples=5 * ACCEPTED, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(documents(framework))
    def check(document):
        run = legal(document) if len(seen) < ACCEPTED else None
        if run is None:
            return
        run = settled(mended(run, target), target)
        accept(run, target.write(run, Options()))
        seen.append(run)

    check()
    assert len(seen) == ACCEPTED
    print(f"{name}: {len(seen)} plans accepted")


@pytest.fixture
def environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_deepspeed(environment, monkeypatch):
    os.environ["DS_ACCELERATOR"] = "cpu"
    needs("deepspeed")
    import deepspeed.comm as dist
    from deepspeed.runtime.config import DeepSpeedConfig

    world = [1]
    monkeypatch.setattr(dist, "get_rank", lambda *a, **k: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda *a, **k: world[0])

    def accept(run: Run, files: dict[str, str]) -> None:
        p = run.plan
        world[0] = run.cluster.gpus // (p.tp * p.pp)  # the engine divides by what its mesh takes; cp it finds in the file
        config = DeepSpeedConfig(json.loads(files["ds_config.json"]))
        assert config.zero_config.stage == SHARDINGS[p.structure.sharding]
        assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (p.micro_batch_size, p.accumulation)

    over_plans("deepspeed", "deepspeed", accept)


def test_trainer(environment):
    transformers = needs("transformers")
    needs("accelerate")

    def accept(run: Run, files: dict[str, str]) -> None:
        document = json.loads(files["training_args.json"])
        unknown = document.keys() - {f.name for f in transformers.TrainingArguments.__dataclass_fields__.values()}
        assert not unknown
        document |= {"use_cpu": True, "bf16": False, "fp16": False}  # no GPU here
        document.pop("deepspeed", None)
        (arguments,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_dict(document)
        assert arguments.gradient_accumulation_steps == run.plan.accumulation
        assert bool(arguments.fsdp) == (run.plan.structure.framework in ("fsdp1", "fsdp2"))

    over_plans("trainer", None, accept)


def test_accelerate(environment, tmp_path: Path, monkeypatch):
    needs("accelerate")
    needs("yaml")
    from accelerate import ParallelismConfig
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import FullyShardedDataParallelPlugin

    monkeypatch.chdir(tmp_path)

    def accept(run: Run, files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        config = load_config_from_file(str(tmp_path / "accelerate_config.yaml"))
        assert config.num_processes == run.cluster.gpus
        if not config.fsdp_config:
            return
        plugin = {k.removeprefix("fsdp_"): v for k, v in config.fsdp_config.items()}
        first = {"sync_module_states": False, "cpu_ram_efficient_loading": False} if plugin["version"] == 1 else {}  # need a device
        keys = ("reshard_after_forward", "activation_checkpointing", "state_dict_type", "auto_wrap_policy", "cpu_ram_efficient_loading")
        FullyShardedDataParallelPlugin(
            **{k: plugin[k] for k in keys} | first, fsdp_version=plugin["version"], cpu_offload=plugin["offload_params"]
        )
        degrees = {k.removeprefix("parallelism_config_"): v for k, v in (config.parallelism_config or {}).items()}
        if degrees:
            degrees.pop("cp_comm_strategy", None)
            assert ParallelismConfig(**degrees).total_size == run.cluster.gpus

    over_plans("accelerate", None, accept)


def test_torchtitan(environment, monkeypatch):
    needs("torchtitan")
    needs("torchao")
    from torchtitan.components.quantization import float8, mx
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims

    for module in (float8, mx):
        monkeypatch.setattr(module, "has_cuda_capability", lambda *a: True)
    modes = {"full": "FullAC.Config", "selective": "SelectiveAC.Config", "none": "NoneType"}

    def accept(run: Run, files: dict[str, str]) -> None:
        module = types.ModuleType("plan_config")
        exec(compile(files["plan_config.py"], "plan_config.py", "exec"), module.__dict__)
        monkeypatch.setitem(sys.modules, "plan_config", module)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            config = ConfigManager().parse_args(TARGETS["torchtitan"].program(run, Options()).arguments[2:])
        p, degrees = run.plan, config.parallelism
        ParallelDims(
            dp_replicate=degrees.data_parallel_replicate_degree,
            dp_shard=degrees.data_parallel_shard_degree,
            cp=degrees.context_parallel_degree,
            tp=degrees.tensor_parallel_degree,
            pp=degrees.pipeline_parallel_degree,
            ep=degrees.expert_parallel_degree,
            world_size=run.cluster.gpus,
        )
        assert type(config.activation_checkpoint).__qualname__ == modes[p.structure.recompute]
        assert config.compile.enable == p.structure.compile
        if p.pp > 1:
            parts = [name for part in degrees.module_fqns_per_model_part for name in part]
            assert parts == ["tok_embeddings", *(f"layers.{i}" for i in range(run.model.num_layers)), "norm", "lm_head"]

    over_plans("torchtitan", "fsdp2", accept)


def test_megatron(environment, monkeypatch):
    checkout = os.environ.get("TRAINWRIGHT_MEGATRON", "")
    if not (Path(checkout) / "megatron" / "training" / "arguments.py").is_file():
        pytest.skip("TRAINWRIGHT_MEGATRON names no checkout of Megatron-LM: its argument parser cannot be asked")
    torch = needs("torch")
    import typing

    import typing_extensions

    monkeypatch.setattr(typing, "override", typing_extensions.override, raising=False)
    monkeypatch.syspath_prepend(checkout)
    card = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, name="H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *a, **k: card)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a, **k: (9, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    from megatron.training.arguments import parse_args, validate_args

    target = TARGETS["megatron"]
    # What the kernels of this machine, which has none, are asked for.
    local = ["--no-persist-layer-norm", "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"]

    def accept(run: Run, files: dict[str, str]) -> None:
        words = [w if w != "transformer_engine" else "local" for w in target.program(run, Options()).arguments[1:]]
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        os.environ.update({s.name: s.value for s in target.settings(run)} | {"WORLD_SIZE": str(run.cluster.gpus), "RANK": "0"})
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words, *local])
        with contextlib.redirect_stdout(io.StringIO()):
            arguments = validate_args(parse_args(), {})
        p = run.plan
        assert (arguments.data_parallel_size, arguments.tensor_model_parallel_size) == (p.dp, p.tp)
        assert (arguments.virtual_pipeline_model_parallel_size or 1) == p.virtual_stages

    over_plans("megatron", "megatron", accept)


def test_kubernetes(environment):
    needs("yaml")
    models = needs("kubeflow_trainer_api.models")
    import yaml

    def accept(run: Run, files: dict[str, str]) -> None:
        job = models.TrainerV1alpha1TrainJob.from_dict(yaml.safe_load(files["trainjob.yaml"]))
        assert job.spec.trainer.num_nodes == run.cluster.nodes
        assert job.spec.trainer.num_proc_per_node == run.cluster.gpus_per_node

    over_plans("kubernetes", None, accept)


def test_skypilot(environment, tmp_path: Path, monkeypatch):
    sky = needs("sky")
    monkeypatch.chdir(tmp_path)

    def accept(run: Run, files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        assert sky.Task.from_yaml(str(tmp_path / "task.yaml")).num_nodes == run.cluster.nodes

    over_plans("skypilot", None, accept)


TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256, "max_position_embeddings": 128,
}  # fmt: skip


TIED = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 256, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        (TINY, {"sharding": "zero3", "recompute": "selective"}),
        (TIED, {"sharding": "zero3"}),
        (TINY, {"sharding": "zero2", "recompute": "full", "recompute_every": 2}),
        (TINY, {"sharding": "zero3", "offload": "params-cpu", "dp_replicate": 2}),
        (TINY, {"sharding": "zero3", "offload": "activations-cpu", "micro_batch_size": 2}),
    ],
    ids=["selective", "tied", "every-second-block", "hybrid-offload", "activations"],
)
@pytest.mark.parametrize("loss", ["plain", "chunked"])
def test_the_fsdp_script_has_the_losses_of_one_process(model, strategy, loss, tmp_path: Path, environment):
    """Three steps on two processes against one, to the last printed digit but one."""
    needs("torch")
    needs("transformers")
    ranks = 4 if "dp_replicate" in strategy else 2
    losses = {}
    for n in (ranks, 1):
        alone = {k: v for k, v in strategy.items() if n > 1 or k != "dp_replicate"}
        run = run_of(
            {
                "model": model,
                "cluster": {"gpu": "h100", "nodes": 1, "gpus_per_node": n},
                "training": {"seq_len": 64, "global_batch_size": 8, "tokens": 3 * 512, "precision": "fp32", "loss": loss},
                "strategy": alone,
            }
        )
        folder = tmp_path / str(n)
        folder.mkdir()
        for name, text in TARGETS["fsdp"].write(run, Options(checkpoint_steps=2)).items():
            (folder / name).write_text(text)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        where = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        done = subprocess.run(["bash", "launch.sh"], cwd=folder, env=where, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        losses[n] = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step ")]
        assert (folder / "outputs" / "step-3" / ".metadata").exists()
    assert len(losses[1]) == 3
    assert losses[ranks] == pytest.approx(losses[1], abs=2e-6)


def test_a_checkpoint_of_two_processes_goes_on_with_one(tmp_path: Path, environment):
    """Saved by two ranks, resumed by two and by one: the next loss is the same."""
    needs("torch")
    needs("transformers")
    training = {"seq_len": 64, "global_batch_size": 8, "tokens": 2 * 512, "precision": "fp32"}
    run = run_of({"model": TINY, "cluster": {"gpu": "h100", "nodes": 1, "gpus_per_node": 2}, "training": training, "strategy": {}})
    for name, text in TARGETS["fsdp"].write(run, Options()).items():
        (tmp_path / name).write_text(text)
    where = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}

    def steps(ranks: int, *words: str) -> list[list[str]]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "train_fsdp.py", *words]
        done = subprocess.run(launcher, cwd=tmp_path, env=where, capture_output=True, text=True, timeout=400, check=True)
        return [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]

    assert [row[1] for row in steps(2)] == ["1", "2"]
    (one,) = steps(1, "--steps", "3")
    assert one[1] == "3"
    shutil.rmtree(tmp_path / "outputs" / "step-3")
    (two,) = steps(2, "--steps", "3")
    assert float(one[3]) == pytest.approx(float(two[3]), abs=2e-6)
