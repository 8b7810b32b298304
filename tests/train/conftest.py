"""`ranks(size)`: the session's gloo ranks of that world size (see workers.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from workers import Workers

# The gate has a quarter of an hour on two cores: what other cases of the same battery cover as well runs with ``-m slow``.
NOT_IN_THE_GATE = (
    *(
        f"test_a_trainer_goes_on_in_another_layout_as_if_nothing_had_happened[{name}"
        for name in ("pp4 to hsdp", "tied zero3 to", "zero1 to zero3", "fewer experts", "interleaved to zb-v", "muon", "zero3 to the same")
    ),
    "test_a_module_of_ones_own_trains_resumes",
    "test_three_kills_one_of_them_while_saving",
    "test_run.py::test_another_models_checkpoint",
    "test_no_token_is_dropped[ddp 4, ep 4",
    "test_gpt[zero3 x pp",
    "test_gpt[hsdp 2x2",
    *(f"test_recomputed[core-{kind}" for kind in ("ulysses", "allgather")),
    "test_several_chunks_a_rank[interleaved-1f1b",
    "test_a_mixture_on_two_ranks_is_that_of_one_device[experts over",
    "test_fewer_experts_than_shards_are_cut_within[of a rank",
    "test_fewer_experts_than_shards_are_on_all_ranks_alike[0",
    "test_compiled.py::test_layouts",
    "test_losses.py::test_layouts[ddp",
    "test_losses.py::test_layouts[pp",
    "test_adopt.py::test_every_layout_computes_what_one_device_computes[",
    "test_losses.py::test_layouts[zero3",
    "test_dry.py::test_one_rank_holds_what_the_plan_says[zero3 x sp",
    "test_dry.py::test_the_command",
    "test_autocast[zb-v-fsdp2",
    "test_autocast[interleaved-1f1b-fsdp2",
    "test_export.py::test_a_damaged",
    "test_export.py::test_a_folder",
    *(f"test_no_group_outlives_its_world[{name}" for name in ("tensor", "pipeline", "context")),
    *(f"test_autocast[{kind}" for kind in ("interleaved-1f1b-ddp", "zb-h1", "zb-v-ddp", "dualpipe", "1f1b-ddp")),
    *(
        f"test_every_schedule_on_two_ranks[{name}]"
        for name in ("combined-1f1b", "eager-1f1b", "looped-bfs", "v-half", "v-min", "zb-h2", "interleaved-zb1p")
    ),
    *(
        f"test_estimate_and_pytorch_agree[{name}"
        for name in (
            "FSDP2 zero3, accumulating",
            "FSDP2 zero3, reduced",
            "FSDP2 zero2",
            "FSDP2 zero3, selective",
            "Gemma",
            "HSDP",
            "pipeline GPipe",
            "DDP in",
            "ZeRO-1",
            "OLMo 2",
            "StarCoder 2",
            "SP]",
        )
    ),
    *(
        f"test_gpt[{name}"
        for name in ("zero2", "tp 2", "ddp x sp", "zero3 x tp", "sp x pp", "zero3, accumulation]", "zero3, recompute every", "zero3, eager")
    ),
    *(f"test_16_bits[{name}" for name in ("zero2", "replicate", "pp", "zero1", "ddp, fp16")),
    *(f"test_the_whole_gradient_is_clipped_whatever_splits_it[{name}" for name in ("ddp", "sp", "pp")),
    *(
        f"test_resident_bytes_are_the_plans[{name}"
        for name in ("zero2", "zero3, root", "tp-", "zero3 x tp", "zero3, fp16", "ddp, autocast", "replicate")
    ),
    *(f"test_attention_alone[{kind}-4" for kind in ("ring", "allgather", "ulysses")),
    "test_dry.py::test_one_rank_holds_what_the_plan_says[gpipe",
    "test_micro_batches_between_the_first_and_the_last_are_alike",
    "test_measured_rows_of_the_data_come_out_again",
    "test_nothing_of_pytorch_stays_changed",
    *(f"test_estimate_and_pytorch_agree[{name}" for name in ("FSDP2 with SP", "FSDP2 zero3, uneven")),
    "test_context.py::test_bf16",
    *(f"test_recomputed[full-{kind}" for kind in ("allgather", "ulysses")),
    *(f"test_16_bits[{name}" for name in ("zero3 x sp", "zero3, fp16", "ddp, autocast")),
    "test_the_whole_gradient_is_clipped_whatever_splits_it[zero3 2",
    *(f"test_gpt[{name}" for name in ("zero3, Muon", "replicate 2", "zero3, SGD", "zero3, root kept", "zero3, accumulation, reduced")),
    *(f"test_no_token_is_dropped[{name}" for name in ("zero3 4, ep 4", "zero2 2", "ddp 2")),
    *(f"test_resident_bytes_are_the_plans[{name}" for name in ("hsdp", "zero3 x pp", "zero3, bf16")),
    "test_tensor_parallelism_needs_a_plan_and_forward_must_give_logits",
    "test_every_schedule_on_two_ranks[dualpipe-v",
    "test_recomputed[full-ring",
    "test_a_checkpoint_goes_on_in_its_layout_to_the_bit_and_in_another",
    *(f"test_no_token_is_dropped[{name}" for name in ("zero3 4, ep 2", "recomputed", "ddp 4, ep 2")),
    "test_resident_bytes_are_the_plans[zero3 x sp",
    *(f"test_gpt[{name}" for name in ("zero3, recompute attention", "zero3, recompute selective")),
    "test_estimate_and_pytorch_agree[pipeline 1F1B",
    "test_deepspeed.py::test_a_killed",
)

# Of one process each, so that several run at a time; all others start ranks, which fill the machine.
ALONE = tuple(f"tests/train/test_{name}.py" for name in ("counted", "data", "dry", "export", "probe", "weights"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/train/" in item.nodeid and not item.nodeid.startswith(ALONE):
            item.add_marker(pytest.mark.ranks)
        if any(pattern in item.nodeid for pattern in NOT_IN_THE_GATE):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Workers]]:
    made: dict[int, Workers] = {}
    try:
        yield lambda size: made.setdefault(size, Workers(size))
    finally:
        for workers in made.values():
            workers.stop()
