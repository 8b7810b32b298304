"""Shell scripts: what they would start is known without running anything. Bash itself is the oracle wherever it can be asked safely."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.check.syntax import read
from trainwright.check.syntax.shell_run import follow
from trainwright.check.syntax.shell_values import compute
from trainwright.check.syntax.source import Lines


def commands(text, **given_variables):
    script = follow(text, Lines(text).at, given=given_variables)
    return [[str(w) for w in c.words] for c in script.commands]


def only(text, **variables):
    (found,) = commands(text, **variables)
    return found


# Scripts that call nothing but `show`, which prints its arguments: bash may run them, and must see the same words.
SCRIPTS = [
    "N=4\nshow --n $N ${N} \"$N\" '$N' $((N*8)) $(($N * 8 + 1))",
    'show ${X:-8} ${Y-"a b"} ${Z:=3} $Z ${Z:+set} ${U:+no}',
    'ARGS="--lr 1e-5 \\\n  --bf16 \\\n  "\nshow $ARGS --end',
    'A=(--lr 1e-5\n  --name "two words" # why\n  --bf16)\nshow "${A[@]}" ${#A[@]} ${A[1]}',
    "A=(1 2)\nA+=(3)\nB=x\nB+=y\nshow ${A[@]} $B",
    'SIZE=7B\nif [ "$SIZE" = 7B ]; then H=4096; elif [[ $SIZE == 13B ]]; then H=5120; else H=0; fi\nshow $H',
    "SIZE=13B\ncase $SIZE in\n 7B) H=1;;\n 13B|70B) H=2;;\n *) H=3;;\nesac\nshow $H",
    "for i in 1 2; do show --i $i; done",
    'f() { show --inner $1 "$@"; }\nf a "b c"',
    "P=/data/model.tar.gz\nshow ${P##*/} ${P%.gz} ${P/model/x} ${P:0:5} ${#P} $(basename $P) $(dirname $P)",
    "show a \\\n  b \\\n  c # not d",
    "show \"a \\\"quoted\\\" $((2**10))\" 'single $X' $'x'",
    "N=$((3 * (2 + 1) % 5)); show $N $((7 / 2)) $((-7 / 2)) $((1 << 4))",
    'if [ -z "$UNSET" ]; then T=default; fi\nshow $T',
    '[[ -n "$UNSET" ]] && T=1\n[ 3 -gt 2 ] && show yes || true',
    'X="a   b"\nshow $X "$X" ${X}c',
    "show --a=1 --b='2 3' -- x",
    'CMD="show one two"\n$CMD three\neval "$CMD four"',
    'LAUNCH="show x"\nbash -c "$LAUNCH y"',
    "set -- p q r\nshow $1 $# $@\nshift\nshow $1",
    "`# a comment` show a `# another` b",
    "V='a b'\nshow pre\"$V\"post pre${V}post",
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")
@pytest.mark.parametrize("text", SCRIPTS)
def test_bash_sees_the_same_words(text):
    show = 'show() { printf "%s\\0" "show" "$@"; printf "\\n\\0"; }\nexport -f show\n'
    ran = subprocess.run(
        ["bash", "-c", show + text], capture_output=True, text=True, timeout=20, check=False, env={"PATH": "/usr/bin:/bin"}
    )
    seen: list[list[str]] = [[]]
    for word in ran.stdout.split("\0")[:-1]:
        seen.append([]) if word == "\n" else seen[-1].append(word)
    assert [s for s in seen if s] == [c for c in commands(text) if c[0] == "show"]


@given(st.lists(st.text(max_size=10).filter(lambda t: "\0" not in t and "\r" not in t), min_size=1, max_size=5))
@settings(max_examples=150, deadline=None)
def test_quoted_words_come_back_whole(words):
    assert only("run " + " ".join(shlex.quote(w) for w in words)) == ["run", *words]


@given(st.integers(-999, 999), st.integers(-999, 999), st.sampled_from(["+", "-", "*", "/", "%", "<", ">=", "=="]))
@settings(max_examples=150, deadline=None)
def test_arithmetic_is_that_of_c(a, b, operator):
    expected = {"+": a + b, "-": a - b, "*": a * b, "<": int(a < b), ">=": int(a >= b), "==": int(a == b)}
    if operator in "/%" and b:
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        expected |= {"/": quotient, "%": a - quotient * b}
    assert compute(f"({a}) {operator} ({b})") == expected.get(operator)


def test_what_nobody_set_stays_open_and_is_named():
    text = "torchrun --nproc_per_node $GPUS --nnodes $SLURM_NNODES train.py --output_dir $OUT/x\n"
    script = follow(text, Lines(text).at)
    assert [str(w) for w in script.commands[0].words][2] == "$GPUS"
    assert set(script.undefined) == {"GPUS", "OUT"}, "Slurm's own variables are no fault"


def test_every_branch_of_what_cannot_be_known_is_kept():
    text = 'if [ "$(hostname)" = a ]; then N=4; else N=8; fi\ntorchrun --nproc_per_node $N train.py --lr 1\n'
    assert [c[2] for c in commands(text)] == ["4", "8"]


def test_a_size_table_over_an_argument_gives_every_size():
    text = "case $1 in\n 7b) H=4096;;\n 70b) H=8192;;\nesac\npython train.py --hidden-size $H --lr 1\n"
    assert [c[3] for c in commands(text)] == ["4096", "8192"]


def test_nothing_is_run(tmp_path):
    target = tmp_path / "made"
    read("x.sh", f"touch {target}\nX=$(touch {target})\n`touch {target}`\neval 'touch {target}'\nbash -c 'touch {target}'\n")
    assert not target.exists()


def parts(text, name="run.sh"):
    return {d.part: d for d in read(name, text)}


def test_a_launch_line_is_its_layers():
    text = "srun --nodes 2 torchrun \\\n  --nproc_per_node=8 \\\n  -m pkg.train \\\n  --learning_rate 1e-5 \\\n  --targets q_proj v_proj \\\n  --bf16\n"
    found = parts(text)
    assert found["srun"].data == {"nodes": "2"}
    assert found["torchrun"].data["nproc_per_node"] == "8"
    program = found["pkg.train"]
    assert program.data == {"learning_rate": "1e-5", "targets": ["q_proj", "v_proj"], "bf16": True}
    assert program.lines[("targets",)] == 5
    assert program.name == "run.sh"


def test_dotted_options_and_hydra_overrides_are_nested():
    found = parts("python train.py --training.seq_len 8192 trainer.num_nodes=4 +model.x=1 ++a.b=2\n")["train.py"]
    assert found.data == {"training": {"seq_len": "8192"}, "trainer": {"num_nodes": "4"}, "model": {"x": "1"}, "a": {"b": "2"}}


@pytest.mark.parametrize(
    ("text", "kind", "line"),
    [
        ("torchrun train.py \\\n  --lr 1 \\\n  # --bf16 \\\n  --fp16\n", "lost-arguments", 4),
        ("torchrun train.py \\\n  --lr 1\n  --fp16 True\n", "lost-arguments", 3),
        ("torchrun train.py --lr 1 \\\n  --lr 2\n", "duplicate-key", 2),
        ('A=" --lr 1 \\\n #--bf16 \\\n "\ntorchrun train.py $A\n', "comment-argument", 2),
        ("N=500_000\npython x.py --steps $((N / 2)) --lr 1\n", "arithmetic", 2),
        ("#!/bin/bash\n#SBATCH --nodes=2\nset -e\n#SBATCH --ntasks=4\ntorchrun x.py --lr 1\n", "late-directive", 4),
        ('torchrun x.py --lr "1\n', "unclosed", 1),
        ("if true; then\n torchrun x.py --lr 1\n", "unclosed", 1),
        ("if [[ $MODEL == llama 2 ]]; then X=1; fi\ntorchrun x.py --lr 1\n", "broken", 1),
        ("source /etc/setup.sh\ntorchrun x.py --lr 1\n", "sourced", 1),
    ],
)
def test_traps_have_a_name_and_a_line(text, kind, line):
    problems = [(p.kind, p.line) for d in read("x.sh", text) for p in d.problems]
    assert (kind, line) in problems


def test_the_header_ends_at_the_first_command_and_two_hashes_are_off():
    text = "#!/bin/bash\n#SBATCH -N 4  # nodes\n##SBATCH --ntasks=9\n#SBATCH --gres=gpu:a100:8\nsrun python x.py --lr 1\n#SBATCH --time=1\n"
    whole = read("job.sbatch", text)[0]
    assert whole.data == {"sbatch": {"nodes": "4", "gres": "gpu:a100:8"}}


def test_a_json_that_the_script_writes_is_read_with_its_variables_and_lines():
    text = 'STAGE=2\ncat <<EOT > ds_config.json\n{\n  "train_batch_size": $((4 * 8)),\n  "zero_optimization": {"stage": $STAGE}\n}\nEOT\n'
    found = parts(text)["ds_config.json"]
    assert found.data == {"train_batch_size": 32, "zero_optimization": {"stage": 2}}
    assert found.lines[("zero_optimization", "stage")] == 5
    assert found.parent == "run.sh"


def test_a_quoted_here_document_is_not_expanded():
    found = parts('cat <<\'EOT\' > ds_config.json\n{"train_batch_size": "$X"}\nEOT\n')["ds_config.json"]
    assert found.data == {"train_batch_size": "$X"}


def test_words_that_were_written_on_other_lines_keep_them():
    text = 'GPT_ARGS="\n  --num-layers 24 \\\n  --hidden-size 1024\n"\n\ntorchrun pretrain_gpt.py $GPT_ARGS --micro-batch-size 1\n'
    found = parts(text)["pretrain_gpt.py"]
    assert found.lines[("num-layers",)] == 2
    assert found.lines[("hidden-size",)] == 3
    assert found.lines[("micro-batch-size",)] == 6


def test_slurm_sets_what_its_header_says():
    text = "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --gpus-per-node=8\n"
    text += "W=$((SLURM_NNODES * SLURM_GPUS_ON_NODE))\nsrun accelerate launch --num_processes $W train.py --lr 1\n"
    assert parts(text)["accelerate"].data["num_processes"] == "32"
