"""Whatever is wrong: one line on stderr that says what and where, exit status 2, nothing on stdout, nothing half written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainwright.cli.output import write_text

ON = ("--on", "8xH100")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("plna", "7B"), "plan"),
        (("plan", "7B"), "--on"),
        (("plan", "7B", *ON, "--presicion", "bf16"), "--precision"),
        (("plan", "llama-3.1-8c", *ON), "llama-3.1-8b"),
        (("plan", "7X", *ON), "7X"),
        (("plan", "0B", *ON), "0B"),
        (("plan", "-1B", *ON), "-1B|-1"),
        (("plan", "7B", "--on", "8xH1000"), "nearest"),
        (("plan", "7B", "--on", "eightxH100"), "64xH100"),
        (("plan", "7B", "--on", "0xH100"), "0 GPUs"),
        (("plan", "7B", "--on", "-8xH100"), "is not a number of GPUs"),
        (("plan", "7B", "--on", "8x"), "is not a number of GPUs"),
        (("plan", "7B", *ON, "--tp", "0"), "tp"),
        (("plan", "7B", *ON, "--tp", "-4"), "tp"),
        (("plan", "7B", *ON, "--tp", "many"), "--tp"),
        (("plan", "7B", *ON, "--tp", "99999999999999999999"), "tp"),
        (("plan", "7B", *ON, "--seq-len", "0"), "seq_len"),
        (("plan", "7B", *ON, "--tokens", "lots"), "--tokens"),
        (("plan", "7B", *ON, "--tokens", "nan"), "--tokens"),
        (("plan", "7B", *ON, "--max-cost", "cheap"), "--max-cost: 'cheap' is not an amount of dollars"),
        (("plan", "7B", *ON, "--max-cost", "-3"), "'-3' is negative (nearest: 3)"),
        (("plan", "7B", *ON, "--deadline=-3d"), "'-3d' is negative (nearest: 3d)"),
        (("estimate", "7B", *ON, "--set", "strategy.layers_per_stage=3,4"), "'3,4' is not a list (nearest: [3, 4])"),
        (("estimate", "7B", *ON, "--set", "strategy.layers_per_stage=3,x"), "'3,x' is not a list (nearest: [3])"),
        (("estimate", "7B", *ON, "--set", "strategy.micro_batch_size=1e300"), "exceeded maximum size (nearest: 1000000)"),
        (("estimate", "7B", *ON, "--set", "training.lora_targets=q_proj"), 'is not a list (nearest: ["q_proj"])'),
        (("estimate", "7B", *ON, "--lora-rank", "8"), "changes nothing with training.method full (nearest: --method lora"),
        (("estimate", "7B", *ON, "--method", "lora", "--base-quantization", "int8"), "nearest: --method qlora"),
        (("plan", "7B", *ON, "--deadline", "soon"), "--deadline"),
        (("plan", "7B", *ON, "--objective", "fame"), "time"),
        (("plan", "7B", *ON, "--precision", "bf61"), "bf16"),
        (("plan", "7B", *ON, "--framework", "megatorn"), "megatron"),
        (("plan", "7B", *ON, "--schedule", "1bf1"), "1f1b"),
        (("plan", "7B", *ON, "--set", "strategy.tpp=3"), "tp"),
        (("plan", "7B", *ON, "--set", "nonsense"), "KEY=VALUE"),
        (("plan", "7B", *ON, "--set", "micro_batch=2"), "is in no section of the run spec (nearest: strategy.micro_batch_size"),
        (("plan", "7B", *ON, "-o", ""), "--output: is empty"),
        (("schedule", "1f1b", "-o", ""), "--output: is empty"),
        (("check", "x.json", "--fix", "-o", ""), "x.json|--output: is empty"),
        (("convert", "--launch", "x", "--to", "fsdp", "-o", " "), "--output: is empty"),
        (("plan", "7B", *ON, "--json", "--csv"), "cannot both"),
        (("plan", "7B", *ON, "-o", "/nowhere/plan.toml"), "/nowhere"),
        (("estimate", "7B", *ON, "--tp", "3"), "tp 3"),
        (("estimate", "7B", *ON, "--dp", "3"), "dp"),
        (("estimate", "7B", *ON, "--global-batch", "7"), "global_batch"),
        (("estimate", "gpt2", *ON, "--tp", "8"), "heads"),
        (("memory", "7B", *ON, "--zero", "4"), "zero3"),
        (("estimate", "nowhere.toml"), "nowhere.toml"),
        (("simulate", "nonsense"), "tensor-parallel"),
        (("schedule", "1f1b", "--stages", "4", "--microbatches", "0"), "microbatches"),
        (("schedule", "interleaved-zb1p", "--stages", "1000000000", "--microbatches", "4"), "stages: more than"),
        (("explain", "0 bytes", "--model", "gpt2", "--on", "8xH100"), "no size of a tensor"),
        (("explain", "1e400 GiB", "--model", "gpt2", "--on", "8xH100"), "no size of a tensor"),
        (("explain", "1 GiB", "--model", "gpt2"), "--on"),
        (("explain", "1 GiB", "--plan", "nowhere"), "nowhere: cannot be read"),
        (("estimate", "nowhere/config.json", *ON), "nowhere"),
    ],
)
def test_one_line_names_it(refused: Callable[..., str], arguments: tuple[str, ...], says: str) -> None:
    line = refused(*arguments)
    assert any(s in line for s in says.split("|")), line


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\x00\x01\x02\xff",
        b"{}" * 3,
        b'{"model_type": "unheard-of"}',
        b'{"hidden_size": 64}',
        b"[" * 50_000,
        b'{"model_type": 7}',
    ],
)
def test_a_broken_config_is_one_line(refused: Callable[..., str], tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    refused("plan", str(path), *ON)


RUN = b'{"model": "gpt2", "cluster": "8xH100", '


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", RUN + b'"training": {"seq_len": 1' + b"0" * 5000 + b"}}", "too long"),
        ("a.json", RUN + b'"training": {"seq_len": 8, "seq_len": 16}}', "says 'seq_len' twice"),
        ("a.json", b'"x"', "holds no table"),
        ("a.json", b"3", "holds no table"),
        ("a.json", b"// c\n{}", "is no JSON"),
        ("a.json", b"  \n", "is empty"),
        ("a.json", b'{"modle": "gpt2", "cluster": "8xH100"}', "nearest: model"),
        ("a.json", b'{"cluster": "8xH100"}', "model: is missing"),
        ("a.json", RUN + b'"training": null}', "None is not a table"),
        ("a.json", RUN + b'"strategy": "fsdp"}', "'fsdp' is not a table"),
        ("a.json", RUN + b'"training": {"method": "lora", "lora_targets": "q_proj"}}', "is not a list"),
        ("a.json", RUN + b'"strategy": {"options": {"x": {"y": 1}}}}', "strategy.options.x"),
        ("a.json", RUN + b'"strategy": {"options": {"no_sync": [1, 2]}}}', "strategy.options.no_sync"),
        ("a.toml", b'model = "gpt2"\nmodel = "gpt2"', "Cannot overwrite"),
        ("a.toml", b"model = 1" + b"0" * 5000, "too long"),
        ("a.toml", b"[training\nseq_len = 1", "is no TOML"),
    ],
)
def test_a_broken_run_spec_is_one_line(refused: Callable[..., str], tmp_path: Path, name: str, content: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    line = refused("estimate", str(path))
    assert says in line, line


def test_a_huge_file_is_refused_before_it_is_read(refused: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as f:
        f.truncate(200_000_000)
    assert "larger" in refused("plan", str(path), *ON)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc here")
@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "7B", *ON, "-o", "/proc/plan.toml"),
        ("plan", "7B", *ON, "-o", "x" * 250),
        ("schedule", "1f1b", "-o", "/proc/a.svg"),
        ("schedule", "1f1b", "-o", "a.txt"),
        ("schedule", "1f1b", "--versus", "gpipe", "-o", "a.csv"),
        ("calibrate", "runs.csv", "-o", "/proc/profile.toml"),
    ],
)
def test_what_cannot_be_written_is_said_before_the_work(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """Even as root, who has every permission: the file is tried."""
    for work in ("trainwright.api.plan", "trainwright.cli.schedule._replayed", "trainwright.measure.record.read_records"):
        monkeypatch.setattr(work, lambda *_, **__: pytest.fail("it was worked on first"))
    assert arguments[-1] in refused(*arguments)


def test_a_file_that_was_there_is_said_to_be_replaced(run: Callable[..., Any], tmp_path: Path) -> None:
    drawing = tmp_path / "a.svg"
    assert run("schedule", "1f1b", "-o", str(drawing)).err.startswith("wrote ")
    drawing.chmod(0o640)
    assert run("schedule", "1f1b", "-o", str(drawing)).err.startswith("replaced ")
    assert drawing.stat().st_mode & 0o777 == 0o640  # and keeps its permissions


def test_a_folder_in_place_of_a_file_names_the_file_that_it_may_be(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{}")
    assert f"nearest: {tmp_path}/plan.toml" in refused("plan", "7B", *ON, "-o", str(tmp_path))
    assert f"nearest: {tmp_path}/machine.toml" in refused("calibrate", "-o", str(tmp_path))
    assert f"nearest: {tmp_path}/c.json" in refused("check", str(tmp_path / "c.json"), "--fix", "-o", str(tmp_path))


def test_the_model_and_the_cluster_are_keys_as_others_are(run: Callable[..., Any]) -> None:
    found = run("estimate", "7B", "--set", "cluster=16xA100-80GB", "--set", "model=gpt2", "--json")
    assert '"model": "gpt2"' in found.out
    assert '"nodes": 2' in found.out


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission_is_said_before_the_search(refused: Callable[..., str], tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "permission" in refused("plan", "7B", *ON, "-o", str(tmp_path / "plan.toml"))


def test_a_hostile_name_stays_a_name(refused: Callable[..., str]) -> None:
    line = refused("plan", "$(touch /tmp/pwned)\n\x1b[31m", *ON)
    assert "\x1b" not in line
    assert not Path("/tmp/pwned").exists()


def test_an_empty_list_of_actions(refused: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "empty.csv"
    path.write_text("")
    assert "no action in it" in refused("schedule", str(path))


@pytest.mark.parametrize("arguments", [(), ("simulate",)])
def test_a_bare_command_prints_its_help(run: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    ran = run(*arguments)
    assert (ran.status, ran.err) == (0, "")
    assert "Commands:" in ran.out


@pytest.mark.parametrize("arguments", ["", "models", "models --json", "plan --help", "estimate gpt2 --on 8xH100 --json"])
def test_a_reader_that_leaves_is_no_error(arguments: str) -> None:
    """``trainwright ... | head -1`` in a shell: no traceback, no second line of complaint."""
    command = f"{sys.executable} -m trainwright {arguments} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_behind_standard_output() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m trainwright models --json > /dev/full"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1


def test_what_is_no_regular_file_is_written_into(tmp_path: Path) -> None:
    """``-o /dev/stdout``, a pipe, a link: renaming a file over them would take their place."""
    pipe, link, real = tmp_path / "pipe", tmp_path / "link", tmp_path / "real.toml"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "plan")
    assert os.read(reader, 100) == b"plan"
    os.close(reader)
    assert pipe.is_fifo()
    link.symlink_to(real)
    write_text(link, "plan")
    assert link.is_symlink()
    assert real.read_text() == "plan"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "pipe", "real.toml"]
