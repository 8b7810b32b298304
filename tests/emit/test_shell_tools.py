"""Emitted scripts before the tools that people would judge them with: shellcheck, and a real Slurm controller's ``sbatch --test-only``.

Both come from the distribution's packages (shellcheck; slurmctld, slurm-client, munge); where they are absent the tests say so and skip.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainwright.emit import TARGETS, emit
from trainwright.emit.nearest import refuse
from trainwright.errors import SpecError

from .cases import BY_HAND, documents, legal, run_of

NODES = 64
shellcheck = pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck (Debian: apt-get install shellcheck)")


def scripts(name: str, document: dict) -> dict[str, str]:
    return {f: text for f, text in emit(run_of(document), name).items() if text.startswith("#!") and "python" not in text.splitlines()[0]}


def approved(files: dict[str, str], folder: Path) -> None:
    for file, text in files.items():
        (folder / file).write_text(text)
    # SC2317: a function that only a trap calls; SC2016: quotes that keep a variable for the shell of each rank. Both are meant.
    found = subprocess.run(["shellcheck", "-x", "-e", "SC2317,SC2016", *files], cwd=folder, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stdout


@shellcheck
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_shellcheck_has_nothing_to_say(name: str, tmp_path: Path) -> None:
    files = scripts(name, BY_HAND[name])
    if files:
        approved(files, tmp_path)


@shellcheck
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much])
@given(document=documents(), name=st.sampled_from(sorted(TARGETS)))
def test_nor_about_any_plan(document: dict, name: str, tmp_path: Path) -> None:
    run = legal(document)
    if run is None:
        return
    try:
        refuse(run, TARGETS[name])
    except SpecError:
        return
    files = {f: t for f, t in emit(run, name).items() if t.startswith("#!") and "python" not in t.splitlines()[0]}
    if files:
        approved(files, tmp_path)


CONFIG = """ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/pgid
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=1
SuspendTime=60
SuspendProgram=/bin/true
ResumeProgram=/bin/true
NodeName=n[1-{nodes}] CPUs=96 RealMemory=2000000 Gres=gpu:8 State=CLOUD
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which sbatch reaches a controller of 64 nodes x 8 GPUs that exist on paper."""
    missing = [p for p in ("slurmctld", "sbatch", "munged") if shutil.which(p, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing or os.getuid() != 0:
        pytest.skip(f"no {', '.join(missing) or 'root'} (Debian: apt-get install slurmctld slurm-client munge)")
    folder = tmp_path_factory.mktemp("slurm")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    (folder / "state").mkdir()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    (folder / "gres.conf").write_text(f"NodeName=n[1-{NODES}] Name=gpu Count=8\n")
    conf = folder / "slurm.conf"
    conf.write_text(CONFIG.format(host=socket.gethostname(), port=port, folder=folder, nodes=NODES))
    sbin = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin", "SLURM_CONF": str(conf)}
    with (folder / "out").open("w") as out:
        munged = subprocess.Popen(
            ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid",
             f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed"], env=sbin, stdout=out, stderr=out)  # fmt: skip
        slurm = subprocess.Popen(["slurmctld", "-D", "-f", str(conf)], env=sbin, stdout=out, stderr=out)
    try:
        for _ in range(100):
            if subprocess.run(["sinfo", "-h"], env=sbin, capture_output=True, timeout=20).returncode == 0:
                break
            time.sleep(0.2)
        else:
            pytest.skip(f"the controller did not start: {(folder / 'out').read_text()[-400:]}")
        yield sbin
    finally:
        for process in (slurm, munged):
            process.terminate()
            process.wait(20)


def submitted(files: dict[str, str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    for file, text in files.items():
        (folder / file).write_text(text)
    job = next(f for f in files if "#SBATCH" in files[f])
    return subprocess.run(["sbatch", "--test-only", job], cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("framework", ["megatron", "fsdp2", "deepspeed"])
def test_slurm_would_start_the_job(framework: str, controller: dict[str, str], tmp_path: Path) -> None:
    for gpus in (8, 64, 512):
        run = run_of({"cluster": f"{gpus}xH100", "training": {"global_batch_size": 512}, "strategy": {"framework": framework}})
        found = submitted(emit(run, "slurm"), tmp_path, controller)
        assert found.returncode == 0, found.stderr
        assert "to start at" in found.stderr


def test_slurm_refuses_more_nodes_than_there_are(controller: dict[str, str], tmp_path: Path) -> None:
    run = run_of({"cluster": "1024xH100", "training": {"global_batch_size": 1024}, "strategy": {"framework": "fsdp2"}})
    assert submitted(emit(run, "slurm"), tmp_path, controller).returncode != 0
