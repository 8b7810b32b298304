"""Mended scripts: one flag's words change and every other byte stays; what comes out of a variable that others use is left, with the place to change."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.check import syntax
from trainwright.check.findings import Change, Finding, Severity
from trainwright.check.fix import Mended, mend
from trainwright.check.read import read_document
from trainwright.check.run import check
from trainwright.check.setup import Place

LAUNCH = """#!/bin/bash
# our run
torchrun --nproc-per-node 8 \\
  pretrain_gpt.py \\
  --tensor-model-parallel-size 3 \\
  --lr=1e-4 \\
  --bf16 \\
  --seq-length 4096
echo done  # --lr 5
"""
SHARED = """TP=3
GPUS=$((TP * 4))
torchrun --nproc-per-node $GPUS pretrain_gpt.py --tensor-model-parallel-size $TP --bf16
"""
ARGUMENTS = """MODEL_ARGS="
    --num-layers 12
    --hidden-size 768
"
OPTIONS=(
    --lr 1e-4  # chosen
    --bf16
)
torchrun --nproc-per-node 8 pretrain_gpt.py $MODEL_ARGS "${OPTIONS[@]}"
"""
SLURM = """#!/bin/bash
#SBATCH --nodes=2   # both
#SBATCH -n 16
srun python train.py --lr 1e-4
"""
WRITES = """cat > ds_config.json <<'EOF'
{
  "train_micro_batch_size_per_gpu": 1,
  "zero_optimization": {"stage": 2}
}
EOF
deepspeed train.py --deepspeed ds_config.json
"""


def mended(text: str, *changes: Change, line: int | None = None, key: tuple[str, ...] = ()) -> Mended:
    finding = Finding("K00", Severity.ERROR, Place("run.sh", line, key), "x.", "", changes)
    return mend(read_document("run.sh", text), [finding], read_document)


def put(*path: str, value: object) -> Change:
    return Change("run.sh", path, value)


@pytest.mark.parametrize(
    ("text", "change", "old", "new"),
    [
        (LAUNCH, put("tensor-model-parallel-size", value=4), "parallel-size 3 \\", "parallel-size 4 \\"),
        (LAUNCH, put("lr", value=3e-05), "--lr=1e-4 \\", "--lr=3e-05 \\"),
        (LAUNCH, put("nproc-per-node", value=4), "--nproc-per-node 8 \\", "--nproc-per-node 4 \\"),
        (LAUNCH, Change("run.sh", ("bf16",), rename="fp16"), "--bf16", "--fp16"),
        (LAUNCH, Change("run.sh", ("bf16",), remove=True), "  --bf16 \\\n", ""),
        (LAUNCH, Change("run.sh", ("lr",), remove=True), "  --lr=1e-4 \\\n", ""),
        (LAUNCH, Change("run.sh", ("seq-length",), remove=True), " \\\n  --seq-length 4096", ""),
        (LAUNCH, put("use-flash-attn", value=True), "--seq-length 4096", "--seq-length 4096 \\\n  --use-flash-attn"),
        (ARGUMENTS, put("num-layers", value=24), "--num-layers 12\n", "--num-layers 24\n"),
        (ARGUMENTS, put("lr", value="2e-4"), "--lr 1e-4  # chosen", "--lr 2e-4  # chosen"),
        (ARGUMENTS, Change("run.sh", ("hidden-size",), remove=True), "    --hidden-size 768\n", ""),
        (SLURM, put("sbatch", "nodes", value=4), "--nodes=2   # both", "--nodes=4   # both"),
        (SLURM, put("sbatch", "ntasks", value=32), "-n 16", "-n 32"),
        (SLURM, put("lr", value="1e-5"), "--lr 1e-4", "--lr 1e-5"),
        (SLURM, put("warmup", value=10), "--lr 1e-4", "--lr 1e-4 --warmup 10"),
        (WRITES, put("zero_optimization", "stage", value=3), '{"stage": 2}', '{"stage": 3}'),
        ('python a.py --name "my run" --lr 1\n', put("name", value="a b"), '"my run"', "'a b'"),
        ("python a.py --lr 1 > log.txt 2>&1 &\n", put("bf16", value=True), "--lr 1", "--lr 1 --bf16"),
        ("LR=1e-4\npython a.py --lr $LR\n", put("lr", value="1e-5"), "LR=1e-4", "LR=1e-5"),
        ('LR="1e-4"  # rate\npython a.py --lr "${LR}"\n', put("lr", value="1e-5"), '"1e-4"', "1e-5"),
        ("python a.py --fp16 True --lr 1\n", put("fp16", value=False), "--fp16 True", "--fp16 False"),
        ("python a.py --fp16 --lr 1\n", put("fp16", value=False), " --fp16", ""),
        (LAUNCH, put("bf16", value=False), "  --bf16 \\\n", ""),
        ("python a.py --lr ${LR:-1e-4} --x 1\n", put("lr", value="1e-5"), "1e-4", "1e-5"),
        ('python a.py --lr "${LR-1e-4}"\n', put("lr", value="1e-5"), "1e-4", "1e-5"),
        ("LR=${LR:-1e-4}\npython a.py --lr $LR\n", put("lr", value="1e-5"), "1e-4", "1e-5"),
        ('LR="${RATE:-1e-4}"\npython a.py --lr "$LR"\n', put("lr", value="1e-5"), "1e-4", "1e-5"),
        ("python a.py --x 1 model.tp=3\n", put("model", "tp", value=2), "model.tp=3", "model.tp=2"),
    ],
)  # fmt: skip
def test_one_flag_changes_and_every_other_byte_stays(text: str, change: Change, old: str, new: str) -> None:
    assert text.count(old) == 1
    found = mended(text, change)
    assert (found.reasons, found.text) == ((), text.replace(old, new))


@pytest.mark.parametrize(
    ("text", "change", "said"),
    [
        (SHARED, put("tensor-model-parallel-size", value=4), ("$TP", "line 1", "line 2", "write 4 on line 3")),
        (SHARED, put("nproc-per-node", value=8), ("$GPUS", "line 2", "$((TP * 4))")),
        ("python a.py --lr ${LR:-$(cat lr.txt)}\n", put("lr", value=1), ("${LR:-$(cat lr.txt)}", "line 1")),
        ("LR=2\npython a.py --lr ${LR:-1e-4}\n", put("lr", value=1), ("${LR:-1e-4}", "line 2")),
        ("LR=${LR:-1}\npython a.py --lr $LR --wd $LR\n", put("lr", value="a b"), ("$LR", "line 1")),
        ("python a.py --lr $LR\n", put("lr", value=1), ("$LR", "environment", "line 1")),
        ("LR=1\nif [ $# -gt 1 ]; then LR=2; fi\npython a.py --lr $LR\n", put("lr", value=3), ("$LR", "more than once")),
        ("python a.py --lr $(cat lr.txt)\n", put("lr", value=1), ("$(cat lr.txt)",)),
        ("STAGE=2\n" + WRITES.replace("'EOF'", "EOF").replace('"stage": 2', '"stage": $STAGE'),
            put("train_micro_batch_size_per_gpu", value=2), ("ds_config.json",)),
        ("python a.py --lr 1\npython b.py --lr 2\n", put("seed", value=1), ("--seed 1",)),
        ("python a.py --lr 1\n", Change("run.sh", ("wd",), remove=True), ("--wd", "nowhere")),
    ],
)  # fmt: skip
def test_what_others_use_or_nobody_can_tell_is_left_with_the_place_to_change(text: str, change: Change, said: tuple[str, ...]) -> None:
    found = mended(text, change)
    assert found.text == text
    assert len(found.left) == 1
    assert all(word in found.reasons[0] for word in said), found.reasons


def test_the_line_of_the_finding_says_which_of_two_commands() -> None:
    text = "python a.py --lr 1\npython b.py --lr 2\n"
    assert mended(text, put("lr", value=5), line=2).text == "python a.py --lr 1\npython b.py --lr 5\n"


def test_words_that_two_branches_share_change_for_both() -> None:
    text = 'ARGS="--tp 3"\nif [ $MULTI ]; then\n  srun python a.py $ARGS\nelse\n  python a.py $ARGS\nfi\n'
    assert mended(text, put("tp", value=2)).text == text.replace("--tp 3", "--tp 2")


WORD = st.text("abcdefgh", min_size=2, max_size=6)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(WORD, st.one_of(st.integers(0, 99).map(str), st.just("a b"), st.just("x'y")), min_size=1, max_size=5), st.data())
def test_any_flag_of_any_layout_can_be_set_and_removed(flags: dict[str, str], data: st.DataObject) -> None:
    import shlex

    gap = data.draw(st.sampled_from([" ", " \\\n    ", " \\\n"]))
    equals = data.draw(st.sampled_from([" ", "="]))
    text = "python a.py" + "".join(f"{gap}--{k}{equals}{shlex.quote(v)}" for k, v in flags.items()) + "\nwait\n"
    key = data.draw(st.sampled_from(sorted(flags)))
    told = data.draw(st.sampled_from(["7", "new value", "$(date)", 'a"b']))
    after = syntax.read("run.sh", mended(text, put(key, value=told)).text)
    assert after[1].data == {**flags, key: told}
    assert after[0].detail.commands[0].words[0].line == 1
    gone = syntax.read("run.sh", mended(text, Change("run.sh", (key,), remove=True)).text)
    assert [d.data for d in gone[1:]] in ([{k: v for k, v in flags.items() if k != key}], [])


def test_a_real_finding_of_a_script_is_mended_and_does_not_come_back() -> None:
    one = 'torchrun --nproc-per-node 8 train.py --model_name_or_path m \\\n  --bf16 True \\\n  --evaluation_strategy "no" \\\n  --output_dir out\n'
    text = one + "# once more\n" + one.replace("train.py", "again.py")
    report = check({"run.sh": text})
    proposed = [f for f in report.findings if f.changes]
    assert proposed
    found = mend(read_document("run.sh", text), proposed, read_document)
    assert len(found.applied) == 2
    assert found.text == text.replace("--evaluation_strategy", "--eval_strategy")
    again = {(f.check, f.place.path) for f in check({"run.sh": found.text}).findings}
    assert not again & {(f.check, f.place.path) for f in found.applied}
