"""Environment variables that a plan relies on, each with its reason."""

from __future__ import annotations

from ..resolve import Run
from .base import Options, Setting, Target


def settings(run: Run, target: Target, options: Options) -> list[Setting]:
    """Those of every run, then those of the engine, in order; a later one of the same name wins."""
    found = [*_allocator(run), *_threads(run), *_collectives(run), *_vendor(run)]
    return list({s.name: s for s in [*found, *target.settings(run)]}.values())


def _allocator(run: Run) -> list[Setting]:
    if run.cluster.gpu.vendor.lower() != "nvidia" or run.plan.structure.cuda_graphs:
        return []
    return [
        Setting(
            "PYTORCH_ALLOC_CONF",
            "expandable_segments:True",
            "the plan counts live bytes: segments that grow keep what the caching allocator reserves close to that (torch before 2.9: PYTORCH_CUDA_ALLOC_CONF)",
        )
    ]


def _threads(run: Run) -> list[Setting]:
    if run.plan.structure.offload in ("optimizer-cpu", "params-cpu", "optimizer-nvme", "params-nvme"):
        return [
            Setting(
                "OMP_NUM_THREADS", "8", "the optimizer steps on the CPU; torchrun's default of one thread would make it the slowest part"
            )
        ]
    return [Setting("OMP_NUM_THREADS", "1", "one process a GPU: threads of the data loader and of the host code do not contend")]


def _collectives(run: Run) -> list[Setting]:
    if run.cluster.gpus == 1:
        return []
    found = [Setting("NCCL_DEBUG", "WARN", "a link or peer that fails is named in the log")]
    if run.cluster.nodes > 1:
        found.append(
            Setting(
                "TORCH_FR_BUFFER_SIZE",
                "2000",
                "PyTorch's flight recorder keeps the last collectives: when a node hangs, the dump says which rank never came (older torch: "
                "TORCH_NCCL_TRACE_BUFFER_SIZE)",
            )
        )
    return found


def _vendor(run: Run) -> list[Setting]:
    if run.cluster.gpu.vendor.lower() == "amd":
        return [Setting("HIP_FORCE_DEV_KERNARG", "1", "kernel arguments in device memory: 2 to 3 us less a launch (AMD's tuning guide)")]
    return []


def one_connection(run: Run) -> list[Setting]:
    """Megatron's order of communication and products on GPUs before Blackwell."""
    plan = run.plan
    if run.cluster.gpu.vendor.lower() == "nvidia" and (plan.tp > 1 or plan.cp > 1) and float(run.cluster.gpu.arch) < 10:
        return [
            Setting(
                "CUDA_DEVICE_MAX_CONNECTIONS",
                "1",
                "one hardware queue: a collective is launched before the product that hides it (Megatron-Core demands it below Blackwell)",
            )
        ]
    return []
