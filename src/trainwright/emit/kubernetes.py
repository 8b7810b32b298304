"""Kubernetes: a Kubeflow ``TrainJob`` on the ``torch-distributed`` runtime, the engine's files in a ConfigMap."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from ..resolve import Run
from . import engines
from .base import Files, Options, Target, said, table, whole
from .environment import settings
from .yaml import dump, load

JOB, MAP = "trainjob.yaml", "configmap.yaml"
WHERE = "/plan"
RESOURCES = {
    "NVIDIA": "nvidia.com/gpu",
    "AMD": "amd.com/gpu",
    "Intel": "habana.ai/gaudi",
    "Google": "google.com/tpu",
    "AWS": "aws.amazon.com/neuroncore",
}


def object_name(text: str) -> str:
    """A name that Kubernetes accepts: lower case, digits and dashes, at most 50 characters."""
    return re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")[:50].strip("-") or "trainwright"


def escaped(word: str) -> str:
    """``$(NAME)`` in arguments is replaced by Kubernetes; a doubled dollar is not."""
    return word.replace("$(", "$$(")


def job(run: Run, options: Options) -> dict[str, Any]:
    engine = engines.engine_of(run)
    program = engine.program(run, options)  # type: ignore[misc]
    name = object_name(options.name)
    gpus = run.cluster.gpus_per_node
    resource = {RESOURCES.get(run.cluster.gpu.vendor, "nvidia.com/gpu"): gpus}
    volumes = [{"name": "plan", "configMap": {"name": f"{name}-plan"}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "plan", "mountPath": WHERE, "readOnly": True}, {"name": "shm", "mountPath": "/dev/shm"}]
    pod = {"volumes": volumes, "containers": [{"name": "node", "volumeMounts": mounts}]}
    patch = {"template": {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": "torch-distributed"},
            "trainer": {
                "image": options.image,
                "numNodes": run.cluster.nodes,
                "numProcPerNode": gpus,
                # The files are copied out of the read-only map; nothing that anybody typed is in this line: the program's words follow as arguments.
                "command": ["bash", "-c", f'cp -rL {WHERE}/. . && exec torchrun "$@"', "torchrun"],
                "args": [escaped(a) for a in program.arguments],
                "env": [{"name": s.name, "value": s.value} for s in settings(run, engine, options)],
                "resourcesPerNode": {"requests": resource, "limits": resource},
            },
            "runtimePatches": [{"manager": "trainwright.dev/plan", "trainingRuntimeSpec": patch}],
        },
    }


def write(run: Run, options: Options) -> Files:
    held = engines.files(run, options)
    name = object_name(options.name)
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-plan"}, "data": held}
    return {JOB: dump(job(run, options)), MAP: dump(config)}


def read(files: Mapping[str, str]) -> dict[str, Any] | None:
    """A TrainJob, with the engine's files of the ConfigMap beside it."""
    if JOB not in files:
        return None
    document = load(files[JOB], JOB)
    if not isinstance(document, dict) or document.get("kind") != "TrainJob":
        return None
    trainer = table(table(document.get("spec")).get("trainer"))
    nodes, gpus = whole(trainer.get("numNodes"), 1), whole(trainer.get("numProcPerNode"))
    held = table(table(load(files[MAP], MAP)).get("data")) if MAP in files else {}
    given = trainer.get("args")
    words = shlex.join(str(w).replace("$$(", "$(") for w in (given if isinstance(given, list) else []))
    found = engines.read_launched(held, words, nodes, gpus) or {}
    return found | said({"cluster.nodes": nodes, "cluster.gpus_per_node": gpus})


TARGET = Target(
    name="kubernetes",
    title="Kubernetes (Kubeflow TrainJob)",
    aliases=("k8s", "kubeflow", "trainjob"),
    write=write,
    read=read,
    limits=(),
    says=("cluster.nodes", "cluster.gpus_per_node"),
    leaves=(),
    install=lambda run, options: "Kubeflow Trainer 2 in the cluster, and an image with: " + engines.engine_of(run).install(run, options),
    command=lambda run, options: f"`kubectl apply -f {MAP} -f {JOB}`",
    engine=engines.engine_of,
    source="kubeflow/trainer 8c0f5059 pkg/apis/trainer/v1alpha1/trainjob_types.go, examples/yaml/02-runtime-patches.yaml",
)
