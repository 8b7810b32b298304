"""The trainer's tokens/s beside those of the shortest hand-written PyTorch loop (`by_hand`): same model, layout, shapes and processes, in one run.

    python benchmarks/bench_train.py [one ddp zero3 tp pp] [--rounds 12] [--steps 4] [--layers 4] [--json]

Each process holds both; rounds of a few steps alternate, so that whatever else the machine does slows both alike. Ours is the whole loop of a run: data,
agreement, metrics and all. Told are the median over rounds of ours / by hand in wall-clock tokens/s, and the same of CPU seconds of rank 0, which a busy
machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

MODEL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
SEQ_LEN, SEQUENCES, MICRO = 256, 8, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"framework": "ddp"},
    "ddp": {"framework": "ddp", "dp": 2},
    "zero3": {"framework": "fsdp2", "sharding": "zero3", "dp": 2, "reshard_root": False},
    "tp": {"framework": "fsdp2", "sharding": "none", "tp": 2},
    "pp": {"framework": "fsdp2", "sharding": "none", "pp": 2, "schedule": "1f1b"},
}
REACH = 0.97


def spec(layout: str, model: dict[str, Any]) -> dict[str, Any]:
    ranks, replicas = (1 if layout == "one" else 2), LAYOUTS[layout].get("dp", 1)
    micro = MICRO if layout == "pp" else SEQUENCES // replicas
    return {
        "model": model,
        "cluster": {"gpu": "H100", "nodes": 1, "gpus_per_node": ranks},
        "training": {"seq_len": SEQ_LEN, "global_batch_size": SEQUENCES, "precision": "fp32"},
        "strategy": {**LAYOUTS[layout], "micro_batch_size": micro},
    }


def side_by_side(folder: str, request: dict[str, Any]) -> dict[str, Any]:
    """What one rank does: our loop, which after every few steps lets the other one run as many."""
    import by_hand
    import torch
    import torch.distributed as dist

    from trainwright.resolve import resolve
    from trainwright.spec.run import validate
    from trainwright.train.checkpoint import Checkpoints
    from trainwright.train.data.batches import batches_of
    from trainwright.train.data.tokens import open_tokens
    from trainwright.train.device import choose
    from trainwright.train.hang import Watch, record_collectives
    from trainwright.train.loop import Loop
    from trainwright.train.mesh import ranks_of
    from trainwright.train.metrics import Metrics
    from trainwright.train.ranks import joined
    from trainwright.train.settings import Settings
    from trainwright.train.step import Trainer
    from trainwright.train.survive import Agreement, Stop

    torch.set_num_threads(1)
    record_collectives()
    layout, steps, rounds = request["layout"], request["steps"], request["rounds"]
    model = {**MODEL, "num_hidden_layers": request["layers"]}
    run, place = resolve(validate(spec(layout, model))), Path(folder)
    with joined(folder, "gloo", 120.0) as (rank, _):
        settings = Settings(steps=steps * (rounds + 1), device="cpu")
        ranks = ranks_of(run.plan, choose(settings))
        tokens = open_tokens(request["tokens"], run.model.vocab)
        replica, replicas = ranks.replica
        loop = Loop(
            Trainer(run, settings, ranks),
            batches_of(tokens, run.job, run.model.vocab, seed=0, rank=replica, size=replicas),
            Checkpoints(place / "checkpoints", {}, group=dist.new_group(backend="gloo")),
            settings,
            Metrics(place, enabled=rank == 0),
            Agreement(dist.new_group(backend="gloo")),
            Stop(place),
            Watch(place / "hang", rank, run.plan.gpus, 300.0, print),
        )
        share = SEQUENCES // replicas
        other = by_hand.loop(layout, model, tokens.values, seq_len=SEQ_LEN, sequences=share, micro_batch=run.plan.micro_batch_size)
        clock = Clock()

        def after(step: int) -> None:
            if (step + 1) % steps:
                return
            clock.stop("ours")
            clock.start()
            for _ in range(steps):
                next(other)
            clock.stop("by hand")
            clock.start()

        clock.start()
        loop.run(around=after)
        return {name: rows[1:] for name, rows in clock.found.items()}  # the first round warms up


class Clock:
    """Seconds of wall clock and of this process between two moments at which all ranks are there: {name: one pair a round}."""

    def __init__(self) -> None:
        self.found: dict[str, list[tuple[float, float]]] = {"ours": [], "by hand": []}

    def start(self) -> None:
        self._wait()
        self.began = time.perf_counter(), time.process_time()

    def stop(self, name: str) -> None:
        self._wait()
        self.found[name].append((time.perf_counter() - self.began[0], time.process_time() - self.began[1]))

    def _wait(self) -> None:
        import torch.distributed as dist

        dist.barrier()


def measure(layout: str, rounds: int, steps: int, layers: int, timeout_s: float = 900.0) -> dict[str, float]:
    """{"tokens_per_s", "by_hand_tokens_per_s", "ratio", "cpu_ratio"} of a layout."""
    import tempfile

    from trainwright.train.data.tokens import prepare
    from trainwright.train.ranks import run_ranks

    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        tokens = str(prepare("embedded", None, MODEL["vocab_size"], Path(folder)))
        request = {"layout": layout, "rounds": rounds, "steps": steps, "layers": layers, "tokens": tokens}
        found = run_ranks("bench_train", request, 1 if layout == "one" else 2, timeout_s)
    pairs = list(zip(found["ours"], found["by hand"]))
    tokens_a_round = steps * SEQUENCES * SEQ_LEN
    return {
        "tokens_per_s": tokens_a_round / statistics.median(o[0] for o, _ in pairs),
        "by_hand_tokens_per_s": tokens_a_round / statistics.median(h[0] for _, h in pairs),
        "ratio": statistics.median(h[0] / o[0] for o, h in pairs),
        "cpu_ratio": statistics.median(h[1] / o[1] for o, h in pairs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layouts", nargs="*", metavar="|".join(LAYOUTS), help="all where none is named")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--layers", type=int, default=MODEL["num_hidden_layers"])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if unknown := set(given.layouts) - set(LAYOUTS):
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(LAYOUTS)}")
    rows = {}
    for layout in given.layouts or LAYOUTS:
        rows[layout] = row = measure(layout, given.rounds, given.steps, given.layers)
        if not given.json:
            print(f"{layout:6} {row['tokens_per_s']:7.0f} tokens/s, by hand {row['by_hand_tokens_per_s']:7.0f}: ", end="")
            print(f"{row['ratio']:.3f} (CPU {row['cpu_ratio']:.3f})", flush=True)
    if given.json:
        print(json.dumps(rows, indent=1))
    return 0 if all(r["ratio"] >= REACH for r in rows.values()) else 1


if __name__ == "__main__":
    if "RANK" in os.environ:
        from trainwright.train.ranks import answer

        sys.exit(answer(side_by_side))
    sys.exit(main())
