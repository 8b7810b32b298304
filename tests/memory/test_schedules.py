"""What a schedule says of memory: which rank of a pipeline counts, and that plans of many schedules are priced together as alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ledger_runs import A100, cluster, job

import trainwright as tw
from trainwright.api import load
from trainwright.cost import ledger, tape
from trainwright.cost.ledger.ranks import places
from trainwright.cost.memory import memory, one_window
from trainwright.cost.memory_table import MemoryTable
from trainwright.cost.stages import layers_of_rank, layers_per_stage
from trainwright.cost.table import PlanTable
from trainwright.cost.traffic.columns import _profile
from trainwright.models import build_model
from trainwright.resolve import resolve_task
from trainwright.schedules import SCHEDULES
from trainwright.schedules.replay import ends_in_flight, in_flight, in_flight_of_layers
from trainwright.search.bounds import least_device_bytes
from trainwright.search.rules import Case
from trainwright.search.space import enumerate_plans
from trainwright.spec.model import ModelSpec
from trainwright.spec.plan import ParallelPlan, Structure

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 24, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 1024, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA = {"model_type": "gemma3_text", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 14, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024, "sliding_window": 64, "sliding_window_pattern": 6}  # fmt: skip
ENGINES = {"tape": tape, "ledger": ledger}
OFFLOADS = ("none", "optimizer-cpu", "params-cpu", "activations-cpu")


def priced(model: ModelSpec, plans: list[ParallelPlan]) -> MemoryTable:
    return memory(model, cluster(A100), job(512), PlanTable.from_plans(plans))


@pytest.mark.parametrize("pp", [2, 4, 6])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_no_rank_of_a_pipeline_holds_more_than_those_that_are_counted(name: str, pp: int) -> None:
    """Of every rank, one that counts has as many layers, the same ends and as many micro-batches in flight. With few micro-batches the later ranks of
    V-shaped schedules hold more than the earlier ones."""
    entry, model = SCHEDULES[name], build_model(LLAMA)
    virtual = entry.default_chunks
    counts = layers_per_stage(model.num_layers, pp * virtual, None, False)
    stood = layers_of_rank(counts, pp, entry.placement == "v")
    counted = places(model, Structure(schedule=name), pp, virtual)
    for m in (pp, 2 * pp, 6 * pp):
        held = np.ravel(in_flight(name, pp, np.array([virtual]), np.array([m]), np.arange(pp)))
        for rank in range(pp):
            layers = sum(len(chunk) for chunk in stood[rank]) + (entry.placement == "bidirectional") * len(stood[pp - 1 - rank][0])
            as_much = [p for p in counted if sum(n for _, n in p.layers) >= layers and held[p.rank] >= held[rank]]
            assert as_much, (rank, m, held)


def test_micro_batches_share_the_copies_that_autocast_made() -> None:
    """Measured with torch 2.13 (its own 1F1B, two stages in DDP). The schedule runs in one autocast context, whose copies the first micro-batch made: autograd
    comes to them last, and 16-bit gradients of all weights wait beside the fp32 ones."""
    shape = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 7, "num_attention_heads": 8, "num_key_value_heads": 8}
    found = tw.estimate(
        {
            "model": {**LLAMA, **shape, "vocab_size": 2048, "max_position_embeddings": 4096},
            "cluster": {"gpu": "H100", "nodes": 1, "gpus_per_node": 4},
            "training": {"seq_len": 128, "global_batch_size": 16, "autocast": True},
            "strategy": {"framework": "ddp", "pp": 2, "dp": 2, "schedule": "1f1b", "micro_batch_size": 1, "recompute": "none"},
        }
    ).memory_dict()
    assert abs(found["peak_bytes"] - found["breakdown"]["framework"] - 346_346_996) <= 8192


@pytest.mark.parametrize("engine", ENGINES)
def test_two_directions_share_what_is_in_flight(engine: str) -> None:
    """DualPipe on four ranks has five stages in flight, and a rank two of them: two and a half of what a micro-batch saves, where 1F1B's first rank has four
    of one stage. Counted as whole ranks it would be two and a half times as much."""
    model = build_model(LLAMA | {"hidden_size": 512, "intermediate_size": 2048})

    def activations(name: str) -> float:
        plan = ParallelPlan(
            Structure("fsdp2", None, "zero2", schedule=name, recompute="none"), 1, 2, pp=4, accumulation=16, micro_batch_size=4
        )
        found = ENGINES[engine].memory_rows(model, cluster(A100), job(2048), plan.structure, PlanTable.from_plans([plan]))
        return float(found.breakdown["activations"][0])

    assert 1.1 < activations("dualpipe") / activations("1f1b") < 1.4


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "buffers"), [("1f1b", 1), ("interleaved-1f1b", 3), ("zb-v", 4), ("looped-bfs", 3)])
def test_every_chunk_receives_every_micro_batch_of_a_step(engine: str, name: str, buffers: int) -> None:
    """torch.distributed.pipelining lays out what a stage receives for all micro-batches: activations but for the first stage, gradients but for the last. On
    two ranks with two chunks each that is three times a boundary, on the rank where a V turns, which has no end, four times."""
    model, entry = build_model(LLAMA), SCHEDULES[name]

    def received(m: int) -> float:
        structure = Structure("fsdp2", None, "zero2", schedule=name)
        plan = ParallelPlan(structure, 1, 2, pp=2, virtual_stages=entry.default_chunks, accumulation=m)
        found = ENGINES[engine].memory_rows(model, cluster(A100), job(512), plan.structure, PlanTable.from_plans([plan]))
        return float(found.breakdown["communication_buffers"][0])

    assert received(32) - received(16) == 16 * buffers * 512 * model.hidden * 2


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_plans_of_many_schedules_are_priced_as_alone(sharding: str, offload: str) -> None:
    """Also ZeRO-1, whose states on a rank depend on everything that stands there."""
    framework = "ddp" if sharding == "zero1" else "fsdp2"
    plans = [
        ParallelPlan(Structure(framework, None, sharding, schedule=name, offload=offload), 1, 2, pp=pp, virtual_stages=v, accumulation=m)
        for name, entry in SCHEDULES.items()
        for v in (entry.default_chunks, 3 if entry.chunks == "many" else entry.default_chunks)
        for pp, m in ((2, 4), (4, 8), (4, 4))
    ]
    model = build_model(LLAMA)
    found = priced(model, plans)
    for i in range(0, len(plans), 3):
        alone = priced(model, [plans[i]])
        assert alone.device_bytes[0] == found.device_bytes[i], plans[i]
        assert alone.host_bytes_per_node[0] == found.host_bytes_per_node[i]
        assert alone.pipeline_rank[0] == found.pipeline_rank[i]
        assert i % 24 or sum(t.bytes for t in found.terms(i)) == found.peak_bytes[i]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_how_far_a_query_looks_back_changes_no_size(recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that differ in their windows alone are one kind, which makes the periods of a stage short."""
    model = build_model(GEMMA)
    assert (len(model.counts), len(one_window(model).counts)) == (2, 1)
    plans = [
        ParallelPlan(Structure(framework, recompute=recompute), dp_shard=2, pp=pp, accumulation=4)
        for framework in ("fsdp2", "megatron")
        for pp in (1, 2)
    ]
    found = priced(model, plans)
    monkeypatch.setattr("trainwright.cost.memory.one_window", lambda model: model)
    assert priced(model, plans).device_bytes.tolist() == found.device_bytes.tolist()


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_layers_and_ends_stand_where_the_schedule_places_its_stages(schedule: str) -> None:
    """Memory and traffic ask the schedule's own placement, so a new schedule is placed by its file alone."""
    entry, pp = SCHEDULES[schedule], 4
    chunks = entry.default_chunks
    model, structure = build_model(LLAMA), Structure(schedule=schedule)
    counts = layers_per_stage(model.num_layers, pp * chunks)
    place = entry.table(pp, 8, chunks).placement
    held = [place.stages_of(rank) for rank in range(pp)]
    layers = [sum(counts[stage] for stage in stages) for stages in held]
    ends = [(0 in stages, pp * chunks - 1 in stages) for stages in held]
    profiles = _profile(model, structure, pp, chunks)
    assert [sum(p[name] for name in model.blocks) for p in profiles] == layers
    assert [(bool(p["embedding"]), bool(p["head"])) for p in profiles] == ends
    for found in places(model, structure, pp, chunks):
        assert (sum(n for _, n in found.layers), (found.embedding, found.head)) == (layers[found.rank], ends[found.rank])


def test_chunks_of_unlike_size_are_in_flight_as_their_list_says() -> None:
    """Rank 1 of two, whose chunks have two layers and none: F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 holds three micro-batches of the first, which is all of its
    layers three times; of two chunks alike it would hold three of four halves."""
    assert in_flight_of_layers("interleaved-1f1b", 2, [4, 4], [0, 1], (1, 2, 1, 0)) == pytest.approx([2.5, 3.0])
    assert in_flight_of_layers("interleaved-1f1b", 2, [4, 4], [0, 1], (1, 1, 1, 1)) == pytest.approx([2.5, 1.5])


@pytest.mark.parametrize("name", [n for n, s in SCHEDULES.items() if s.default_chunks > 1 and s.placement != "bidirectional"])
def test_no_rank_with_chunks_of_unlike_size_holds_more_than_those_that_are_counted(name: str) -> None:
    """In layers times micro-batches, for every number of layers that four ranks can be given."""
    pp, chunks, structure = 4, SCHEDULES[name].default_chunks, Structure("fsdp2", schedule=name)
    for layers in range(pp * chunks - 2, 4 * pp * chunks):
        counts = tuple(layers_per_stage(layers, pp * chunks))
        on_rank = np.array([sum(map(len, r)) for r in layers_of_rank(counts, pp, SCHEDULES[name].placement == "v")])
        most = in_flight_of_layers(name, chunks, np.full(pp, 8), np.arange(pp), counts) * on_rank
        counted = [p.rank for p in places(build_model(LLAMA | {"num_hidden_layers": layers}), structure, pp, chunks)]
        assert most[counted].max() == most.max(), counts


# layers on each of four stages of two ranks, and the peak that PyTorch 2.13's own schedule has (`verify --memory`, fp32, four micro-batches)
@pytest.mark.parametrize(
    ("schedule", "layers", "peak", "off"),
    [
        ("interleaved-1f1b", [1, 1, 1, 1], 3_525_892, 0.002),
        ("looped-bfs", [1, 1, 1, 1], 4_373_872, 0.01),
        ("interleaved-1f1b", None, 3_786_536, 0.01),
    ],
)
def test_a_rank_receives_into_buffers_of_each_of_its_chunks(schedule: str, layers: list[int] | None, peak: int, off: float) -> None:
    """For every micro-batch of the step, from both sides: PyTorch's stages know nothing of each other."""
    shape = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    training = {"seq_len": 64, "global_batch_size": 4, "precision": "fp32", "master_weights": "none", "gradient_dtype": "fp32"}
    strategy = {"framework": "fsdp2", "sharding": "none", "pp": 2, "schedule": schedule, "micro_batch_size": 1, "layers_per_stage": layers}
    found = tw.estimate({"model": LLAMA | shape | {"vocab_size": 65}, "cluster": "2xH100", "training": training, "strategy": strategy})
    held = found.to_dict()["memory"]["breakdown"]
    assert sum(held.values()) - held["framework"] == pytest.approx(peak, rel=off)


@pytest.mark.parametrize("compiled", [False, True], ids=["tape", "ledger"])
@pytest.mark.parametrize("framework", ["fsdp2", "ddp"])
@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
def test_a_tied_table_stands_twice_where_both_ends_are_stages_of_one_rank(schedule: str, framework: str, compiled: bool) -> None:
    """PyTorch's stages are modules of their own: the fullest rank owns what that of an untied model owns."""
    held = []
    for tied in (True, False):
        model = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
        model |= {"intermediate_size": 128, "vocab_size": 4096, "max_position_embeddings": 64, "tie_word_embeddings": tied}
        strategy = {"framework": framework, "pp": 2, "dp": 1, "schedule": schedule, "virtual_stages": 2, "compile": compiled}
        cluster = {"gpu": "H100", "nodes": 1, "gpus_per_node": 2}
        spec = {"model": model, "cluster": cluster, "training": {"seq_len": 64, "global_batch_size": 8}, "strategy": strategy}
        held.append(tw.estimate(spec).to_dict()["memory"]["states"])
    assert held[0] == held[1]


def test_both_tables_of_a_tied_model_are_dealt() -> None:
    """ZeroRedundancyOptimizer deals what a rank holds: of a V-shaped pipeline's first rank both tables, on the ledger as on the tape."""
    model = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4}
    model |= {"intermediate_size": 128, "vocab_size": 4096, "max_position_embeddings": 64, "tie_word_embeddings": True}
    found = []
    for compiled in (False, True):
        strategy = {"framework": "ddp", "sharding": "zero1", "pp": 2, "dp": 2, "schedule": "zb-v", "virtual_stages": 2, "compile": compiled}
        training = {"seq_len": 64, "global_batch_size": 16}
        spec = {"model": model, "cluster": "4xH100", "training": training, "strategy": strategy}
        found.append(tw.estimate(spec).to_dict()["memory"]["states"]["optimizer"])
    assert found[1] == pytest.approx(found[0], abs=1024)  # step counters


WIDE = LLAMA | {"vocab_size": 128_256, "num_hidden_layers": 6}  # most of a micro-batch is its logits


@pytest.mark.parametrize("engine", ["tape", "ledger"])
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_logits_of_a_chunk_with_the_head(name: str, engine: str) -> None:
    """They are kept for as many micro-batches as that chunk has in flight, not for as many as its rank: with one stage a rank or with two. The log-softmax
    goes with the input gradient; the gradient of the logits, of half its size, waits for that of the weight."""
    entry, model, work = SCHEDULES[name], build_model(WIDE), job(512)
    layout = {"pp": 2, "accumulation": 8, "micro_batch_size": 1}
    plans = [ParallelPlan(Structure("fsdp2", schedule=s), virtual_stages=SCHEDULES[s].default_chunks, **layout) for s in ("1f1b", name)]
    one, found = (ENGINES[engine].memory_rows(model, cluster(A100), work, p.structure, PlanTable.from_plans([p])) for p in plans)
    ends = ends_in_flight(name, 2, entry.default_chunks, 8)
    logits = 4 * 512 * 128_256
    others = (float(ends.loss) - 1) * logits + float(ends.last - 1) * logits / 2
    assert found.breakdown["logits"][0] - one.breakdown["logits"][0] == pytest.approx(others, rel=0.02, abs=0.1 * logits)
    assert sum(t.bytes for t in found.terms(0)) == found.peak_bytes[0]


def test_no_schedule_needs_less_than_the_bound_on_it() -> None:
    """Where the head's logits are most of what is in flight, which the search's bound counts as the engines do."""
    config = WIDE | {"num_hidden_layers": 16}
    for name in ("zb-v", "interleaved-zb1p", "looped-bfs"):
        strategy = {"framework": "fsdp2", "schedule": name, "recompute": "none", "micro_batch_size": 1}
        training = {"seq_len": 8192, "global_batch_size": 16, "loss": "plain"}
        task = resolve_task(load({"model": config, "cluster": "8xH100", "training": training, "strategy": strategy}))
        case = Case(task.model, task.cluster, task.job)
        table = enumerate_plans(case, task.spec.strategy).table
        table = table.take(np.flatnonzero(table.pp > 1))
        assert len(table), name
        need, least = memory(task.model, task.cluster, task.job, table).device_bytes, least_device_bytes(case, table)
        assert (least <= need).all(), name


def test_a_first_stage_without_anything_to_train_has_no_backward() -> None:
    """A frozen embedding alone on its rank, under adapters: PyTorch's stage skips outputs that need no gradient."""
    said = {
        "model": {**LLAMA, "num_hidden_layers": 5},
        "cluster": {"gpu": "h100", "nodes": 1, "gpus_per_node": 7},
        "training": {"seq_len": 128, "global_batch_size": 8, "method": "lora"},
        "strategy": {"framework": "fsdp2", "pp": 7, "dp": 1, "micro_batch_size": 1, "recompute": "full"},
    }
    found = tw.estimate(said)
    assert 0 < found.peak_bytes < 2**31
