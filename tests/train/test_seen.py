"""What a run shows beside its losses: a trace with the predicted timeline, TensorBoard's files, a note where something else was chosen than asked."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
from test_run import PLAN, ended, losses, train

from trainwright.report.run_trace import MEASURED

BOARD = importlib.util.find_spec("tensorboard") is not None


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of fused SGD under FSDP2 on two ranks, with everything that can be watched."""
    where = tmp_path_factory.mktemp("seen")
    (where / "plan.toml").write_text(PLAN.replace('precision = "fp32"', 'precision = "fp32"\noptimizer = "sgd_momentum"'))
    more = ["--profile", *(["--tensorboard"] if BOARD else [])]
    status, _, err = ended(train(where, "plan.toml", "-o", "run", "--steps", "3", *more))
    assert status == 0, err
    assert "trace for ui.perfetto.dev: run/traces/trace.json" in err
    assert "warning: PyTorch's fused SGD takes no sharded weights: foreach runs instead" in err.replace("\n", " ")
    return where / "run"


def test_one_trace_holds_the_predicted_step_and_both_ranks_measured_ones(seen: Path) -> None:
    document = json.loads((seen / "traces" / "trace.json").read_text())
    names = {e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "predicted, every rank", MEASURED: "measured rank 0", MEASURED + 1: "measured rank 1"}
    predicted = [e for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == 0]
    assert sum(e["dur"] for e in predicted) == pytest.approx(document["metadata"]["predicted_step_s"] * 1e6, rel=1e-6)
    for rank in range(2):
        kinds = {e["name"] for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == MEASURED + rank}
        assert {"aten::mm", "aten::_scaled_dot_product_flash_attention_for_cpu"} <= kinds
        assert any("all_gather" in k or "allgather" in k for k in kinds), "the collectives of FSDP2 are not in the trace"


@pytest.mark.skipif(not BOARD, reason="TensorBoard is not installed")
@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_the_losses_of_metrics_jsonl(seen: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(seen / "tensorboard"))
    board.Reload()
    assert {e.step: e.value for e in board.Scalars("loss")} == pytest.approx(losses(seen), rel=1e-6)
    assert {"gradient_norm", "rate", "tokens_per_s", "mfu"} <= set(board.Tags()["scalars"])
