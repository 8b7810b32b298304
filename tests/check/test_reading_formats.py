"""Every format is recognized by its content and says what its file says; whatever stands in a file, reading ends with an answer."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emit.cases import BY_HAND, run_of
from trainwright.api import estimate
from trainwright.check.formats import FORMATS
from trainwright.check.read import LAUNCH, read_setup
from trainwright.check.spec import to_spec
from trainwright.emit import TARGETS, Options, settled
from trainwright.emit.base import dig
from trainwright.emit.nearest import mended
from trainwright.errors import SpecError
from trainwright.resolve import resolve

from .format_cases import CASES


def test_every_format_has_a_case():
    assert set(CASES) == set(FORMATS)


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_file_is_recognized_and_understood(name):
    file, text, facts = CASES[name]
    setup = read_setup({file: text})
    assert name in {r.format for r in setup.readings}
    assert {field: setup.value(field) for field in facts} == facts
    reading = next(setup.of(name))
    assert reading.unknown == ()


@pytest.mark.parametrize("name", sorted(set(CASES) - {"shell", "program", "torchrun", "hyperpod", "primus"}))
def test_every_fact_stands_in_the_file_where_it_says(name):
    file, text, facts = CASES[name]
    setup = read_setup({file: text})
    lines = text.split("\n")
    for field in facts:
        fact = setup.fact(field)
        assert fact.place.file == file
        assert 1 <= fact.place.line <= len(lines)
        keys = [p for p in fact.place.path if isinstance(p, str)]
        if keys and fact.raw not in (None, "auto"):
            assert keys[-1] in "\n".join(lines[fact.place.line - 1 :])


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_name_of_the_file_decides_nothing_but_its_syntax(name):
    file, text, _ = CASES[name]
    other = "any." + file.rpartition(".")[2]
    assert [r.format for r in read_setup({other: text}).readings] == [r.format for r in read_setup({file: text}).readings]


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_what_is_emitted_is_read_as_it_was_meant(name):
    target = TARGETS[name]
    run = settled(mended(run_of(BY_HAND[name]), target), target)
    setup = read_setup(target.write(run, Options()))
    found = {f.field: setup.value(f.field) for r in setup.readings for f in r.facts if f.field.startswith(("strategy.", "training."))}
    for field, value in found.items():
        said = dig(run.filled, field)
        if said is not None and field != "strategy.options":
            assert value == said, field
    assert (setup.value("launch.nodes"), setup.value("launch.gpus_per_node")) == (run.cluster.nodes, run.cluster.gpus_per_node)


@pytest.mark.parametrize("name", ["megatron", "fsdp", "torchrun", "kubernetes"])
def test_what_is_emitted_describes_the_same_run(name):
    target = TARGETS[name]
    run = settled(mended(run_of(BY_HAND[name]), target), target)
    described = to_spec(read_setup(target.write(run, Options())), usual_gpu=run.cluster.gpu.id)
    assert described is not None
    document = described.document
    assert {k: document["cluster"][k] for k in ("nodes", "gpus_per_node")} == {"nodes": 2, "gpus_per_node": 8}
    assert document["training"]["global_batch_size"] == run.job.global_batch_size
    assert document["strategy"]["micro_batch_size"] == run.plan.micro_batch_size
    assert estimate(document).to_dict()["gpus"] == 16


def test_trainer_state_and_other_programs_files_are_not_taken_for_ours():
    state = '{"best_metric": null, "train_batch_size": 8, "log_history": [], "global_step": 3, "max_steps": 9, "save_steps": 5, "logging_steps": 1}'
    prime = (
        '[training]\nseq_len = 2048\nsteps = 3\n[orchestrator]\nbatch_size = 4\n[model]\nname = "x"\n[inference]\n[optimizer]\nlr = 1e-6\n'
    )
    assert {r.format for r in read_setup({"trainer_state.json": state, "rl.toml": prime}).readings} == {"unknown"}


def test_the_launch_line_wins_over_the_file_and_both_are_kept():
    setup = read_setup({"config.yaml": CASES["accelerate"][1]}, "accelerate launch --num_processes 4 --num_machines 1 train.py")
    assert setup.value("launch.world_size") == 4
    assert setup.fact("launch.world_size").place.file == LAUNCH
    assert [f.value for f in setup.facts("launch.world_size")] == [4, 16]


def test_auto_is_filled_as_the_trainer_fills_it():
    ds = '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto",\n'
    ds += '"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}, "bf16": {"enabled": "auto"}}'
    launch = "torchrun --nproc_per_node 8 train.py --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --bf16 True "
    launch += "--output_dir o --deepspeed ds.json"
    setup = read_setup({"ds.json": ds, "config.json": CASES["hf_config"][1]}, launch)
    reading = next(setup.of("deepspeed"))
    said = {f.field: f.value for f in reading.facts}
    assert said["training.global_batch_size"] == 64
    assert said["training.precision"] == "bf16"
    assert said["strategy.options"] == {
        "reduce_bucket_size": 2048**2, "stage3_prefetch_bucket_size": int(0.9 * 2048**2), "stage3_param_persistence_threshold": 20480,
    }  # fmt: skip
    assert ("train_batch_size",) in reading.open


def test_misspelt_keys_are_unknown_and_a_programs_own_are_not():
    ds = '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "stage3_param_persitence_threshold": 1}}'
    args = "output_dir: o\nper_device_train_batch_size: 1\ngradient_acumulation_steps: 2\nlearning_rate: 1.0\nmy_own_option: 3\n"
    setup = read_setup({"ds.json": ds, "a.yaml": args})
    assert [p for r in setup.readings for p in r.unknown] == [
        ("zero_optimization", "stage3_param_persitence_threshold"),
        ("gradient_acumulation_steps",),
    ]


def test_interpolations_resolve_or_stay_open():
    text = CASES["nemo"][1] + "  a: ${model.missing}\n  b: ${oc.env:HOME_OF_DATA}\n  c: ${oc.env:N,7}\n  d: ${e}\ne: ${model.d}\n"
    reading = next(read_setup({"x.yaml": text}).of("nemo"))
    model = reading.document.data["model"]
    assert model["max_position_embeddings"] == 4096
    assert model["c"] == 7
    assert {p[-1] for p in reading.open} >= {"a", "b", "d"}


HOSTILE = {
    "deep.json": "[" * 50_000, "deep.yaml": "- " * 50_000, "flow.yaml": "{a: " * 50_000, "deep.toml": "a = " + "[" * 50_000, "sub.sh": "$(" * 20_000,
    "if.sh": "if " * 20_000, "quote.sh": '"' * 20_001, "double.sh": "a=aaaaaaaa\n" + 'a="$a$a"\n' * 50 + "torchrun $a --x $a", "self.sh": "x=$x$x$x\n" * 500,
    "recursion.sh": "f() { f; f; }\nf\n", "loops.sh": "for i in 1 2 3 4; do " * 20 + "torchrun x.py --a $i;" + " done;" * 20,
    "branches.sh": "".join(f'if [ "$(x{i})" = y ]; then A{i}=1; else A{i}=2; fi\n' for i in range(60)) + "torchrun t.py --lr 1",
    "power.sh": "torchrun --nproc_per_node $((9**9**9)) t.py --lr $((1/0))", "self.yaml": "&a [*a]", "merge.yaml": "a: &a\n  <<: *a\n",
    "numbers.yaml": "a: 0x" + "f" * 5000 + "\nb: " + "9" * 6000, "binary.json": b"\x7fELF\x00\x01" * 99, "large.json": b"x" * 9_000_000,
    "cycle.yaml": "trainer: {devices: '${a.b}'}\na: {b: '${trainer.devices}'}\nmodel: {micro_batch_size: '${a.b}', num_layers: 1, hidden_size: 2}\n",
    "empty.yaml": "", "tabs.yaml": "\t\n", "header.sbatch": "#SBATCH --nodes='\n#SBATCH -N\n#SBATCH --gres=gpu:\ntorchrun", "nul.sh": "a\x00b",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_hostile_file_is_answered_soon(name):
    begin = time.perf_counter()
    setup = read_setup({name: HOSTILE[name]})
    assert time.perf_counter() - begin < 10
    assert setup.readings
    for reading in setup.readings:
        for problem in reading.document.problems:
            assert "\n" not in problem.message
            assert len(problem.message) < 300


JUNK = [
    "{",
    "}",
    "[",
    '"',
    "'",
    "`",
    "$(",
    ")",
    "${",
    "}",
    "\\",
    "\n",
    "<<EOF\n",
    "#",
    ": ",
    "- ",
    "&a ",
    "*a",
    "{{",
    "}}",
    "\t",
    "fi",
    "done",
    "esac",
    "[[ ",
    " ]]",
    "=",
    "\x00",
]


@given(
    st.sampled_from(sorted(CASES)), st.lists(st.tuples(st.floats(0, 1), st.sampled_from(JUNK), st.integers(0, 30)), min_size=1, max_size=6)
)
@settings(max_examples=250, deadline=None)
def test_a_damaged_file_is_never_a_traceback(name, damages):
    file, text, _ = CASES[name]
    for place, junk, cut in damages:
        at = int(place * len(text))
        text = text[:at] + junk + text[at + cut :]
    setup = read_setup({file: text})
    try:
        described = to_spec(setup)
        if described is not None:
            resolve_or_refuse(described.document)
    except SpecError as error:
        assert "\n" not in str(error)


def resolve_or_refuse(document):
    from trainwright.api import load

    resolve(load(document))
