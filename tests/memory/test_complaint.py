"""Out-of-memory messages of two generations of PyTorch, and what they give away beside the request."""

from __future__ import annotations

import pytest

from trainwright.cost.complaint import Complaint, conclusions, first_complaint, read_complaint

GIB = 2**30
NEW = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.25 GiB is free. "
    "Process 12 has 78.75 GiB memory in use. Of the allocated memory 72.50 GiB is allocated by PyTorch, and 3.75 GiB is reserved by PyTorch but unallocated."
)
BESIDE = (
    "CUDA out of memory. Tried to allocate 5.00 GiB. GPU 0 has a total capacty of 80.00 GiB of which 0 bytes is free. Process 7 has 8.00 GiB memory in use. "
    "Including non-PyTorch memory, this process has 65.25 GiB memory in use. Of the allocated memory 64.00 GiB is allocated by PyTorch, and 0 bytes is "
    "reserved by PyTorch but unallocated."
)
OLD = (
    "CUDA out of memory. Tried to allocate 12.50 GiB (GPU 1; 24.00 GiB total capacity; 12.00 GiB already allocated; 10.50 GiB free; 12.25 GiB reserved in "
    "total by PyTorch)"
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (NEW, (1.5, 80, 1.25, 72.5, 3.75, 0)),  # the one process of a container is the run itself
        (BESIDE, (5, 80, 0, 64, 0, 8)),
        (OLD, (12.5, 24, 10.5, 12, 0.25, 0)),
        ("Tried to allocate 2.00 GiB", (2, None, None, None, None, 0)),
    ],
)
def test_every_number_of_a_message_is_read(text: str, says: tuple[float | None, ...]) -> None:
    assert read_complaint(text) == Complaint(*(None if gib is None else int(gib * GIB) for gib in says))  # type: ignore[arg-type]


def test_a_log_is_read_at_its_first_complaint() -> None:
    log = f"step 3 loss 2.1, 12 GiB\n[rank1]: {NEW}\n[rank0]: {BESIDE}\n"
    assert first_complaint(log) == f"[rank1]: {NEW}"


def test_a_hostile_line_is_read_in_no_time() -> None:
    """Numbers with a hundred thousand commas: what is looked at has a bound."""
    assert len(first_complaint("Tried to allocate " + "1," * 200_000)) < 5_000


def concluded(text: str, peak: float = 90, device: float = 95, capacity: float = 80, host: int | None = None) -> str:
    phases = {"load": 10 * GIB, "forward": 60 * GIB, "backward": int(peak * GIB)}
    needs = {"capacity_bytes": int(capacity * GIB), "peak_bytes": int(peak * GIB), "device_bytes": int(device * GIB), "phases": phases}
    needs |= {"breakdown": {}, "host_bytes_per_node": 150 * GIB, "host_phases": {"load": 150 * GIB, "train": 30 * GIB}}
    return " ".join(conclusions(read_complaint(text), needs, host))


def test_freed_blocks_that_would_have_done_are_fragments() -> None:
    assert "3.8 GiB lay in freed blocks, 1.2 GiB were free: enough together" in concluded(NEW)
    assert "2.5 GiB too little" in concluded(NEW.replace("1.50 GiB.", "7.50 GiB."))  # 7.5 - 1.25 - 3.75


def test_a_plan_that_needs_more_than_the_card_foretold_it() -> None:
    said = concluded(NEW)
    assert "would hold 74.0 GiB in tensors, which backward reaches" in said
    assert "does not fit on this card: 15.0 GiB are missing" in said


def test_a_run_that_holds_more_than_its_plan_is_another_run() -> None:
    assert "24.0 GiB more than the plan's peak of 50.0 GiB" in concluded(NEW, peak=50, device=55)


def test_others_on_the_card_and_another_card_are_named() -> None:
    assert concluded(BESIDE).startswith("Other processes hold 8.0 GiB")
    assert concluded(OLD).startswith("The card of the message has 24.0 GiB, the plan's has 80.0 GiB")


def test_memory_that_was_free_is_wondered_at() -> None:
    assert "20.0 GiB were free: the limit was not the card's" in concluded(NEW.replace("which 1.25", "which 20.00"))


@pytest.mark.parametrize(
    "text",
    [
        "failed (exitcode: -9) local_rank: 0 (pid: 4171) of binary: python",
        "torch.distributed.elastic.multiprocessing.errors: Signal 9 (SIGKILL) received by PID 4171",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7. Some of the step tasks have been OOM Killed.",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4831838208 bytes.",
    ],
)
def test_a_killed_process_is_about_the_memory_of_a_node(text: str) -> None:
    assert concluded(text).endswith(
        "The plan takes a node load 150 GiB, train 30.0 GiB. How much a node has is not said (cluster.host_memory_gb)."
    )
    assert concluded(text, host=100 * GIB).endswith("A node has 100 GiB: 50.0 GiB are missing.")
    assert "enough for the plan" in concluded(text, host=200 * GIB)


def test_a_kill_has_no_size() -> None:
    assert read_complaint("exitcode: -9").request is None
    assert read_complaint("you tried to allocate 4831838208 bytes. DefaultCPUAllocator").request == 4831838208
