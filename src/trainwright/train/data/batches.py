"""Each rank's share of each step, in an order that depends on the seed alone: not on the number of ranks, nor on where a run was interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...errors import SpecError, TrainwrightError
from ...spec.job import TrainingJob
from .samples import Samples, samples_of
from .shuffle import shuffled
from .tokens import Tokens


@dataclass(frozen=True)
class Batch:
    """int64 tensors [sequences of this replica, seq_len]; `labels` are -100 where nothing is to be predicted; `documents` None: attention sees all before."""

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor | None = None

    def to(self, device: torch.device | str, pin: bool = False) -> Batch:
        """The batch on `device`; `pin` copies through page-locked memory without waiting."""

        def move(t: torch.Tensor) -> torch.Tensor:
            return (t.pin_memory() if pin else t).to(device, non_blocking=pin)

        return Batch(move(self.tokens), move(self.labels), move(self.positions), None if self.documents is None else move(self.documents))


class Batches(Iterator[Batch]):
    """The steps of a run for replica `rank` of `size` (the ranks of one replica read the same). Endless: after each pass the order is drawn anew.

    Step k takes the places [k x batch, (k + 1) x batch) of the order, replica r the r-th share of them, so that `state` is one number for all ranks.
    """

    def __init__(
        self, samples: Samples, job: TrainingJob, *, seed: int, digest: str, vocabulary: int, rank: int = 0, size: int = 1
    ) -> None:
        if job.global_batch_size % size:
            raise SpecError(f"{job.global_batch_size} sequences do not divide over {size} replicas", "training.global_batch_size", [size])
        self.samples, self.seed, self.digest, self.vocabulary = samples, seed, digest, vocabulary
        self.batch, self.share, self.rank = job.global_batch_size, job.global_batch_size // size, rank
        self.consumed = 0

    def places(self) -> np.ndarray:
        """The samples (indices) of this replica's next step."""
        places = self.consumed + self.rank * self.share + np.arange(self.share)
        epochs, within = np.divmod(places, len(self.samples))
        found = np.empty_like(places)
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            found[mine] = shuffled(within[mine], len(self.samples), self.seed, int(epoch))
        return found

    def __next__(self) -> Batch:
        rows = [self.samples.get(int(i)) for i in self.places()]
        self.consumed += self.batch
        tokens, labels, positions, documents = (_stack([row[k] for row in rows]) for k in range(4))
        if tokens is None or labels is None or positions is None:
            raise TrainwrightError("a sample without tokens, labels and positions")
        if int(tokens.max()) >= self.vocabulary or int(tokens.min()) < 0:
            raise TrainwrightError(
                f"the data holds token {int(tokens.max()):,}, the model's vocabulary ends at {self.vocabulary - 1:,}: damaged?"
            )
        return Batch(tokens, labels, positions, documents)

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.consumed / len(self.samples)

    def state(self) -> dict[str, Any]:
        """The same on every rank, whatever their number."""
        return {"consumed": self.consumed, "seed": self.seed, "samples": len(self.samples), "digest": self.digest}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on after the last sample that was used. Raises `SpecError` where the data are not those of the state."""
        here = self.state()
        for key, what in (("digest", "text, tokenizer"), ("samples", "number of samples, sequence length or packing"), ("seed", "seed")):
            if state.get(key) != here[key]:
                raise SpecError(f"the checkpoint was made with another {what} ({state.get(key)}, here {here[key]})", "data")
        self.consumed = int(state["consumed"])


def _stack(rows: list[np.ndarray | None]) -> torch.Tensor | None:
    given = [r for r in rows if r is not None]
    return torch.from_numpy(np.stack(given)) if given else None


def batches_of(tokens: Tokens, job: TrainingJob, vocabulary: int, *, seed: int, rank: int = 0, size: int = 1) -> Batches:
    samples = samples_of(tokens, job.seq_len, job.packing)
    return Batches(samples, job, seed=seed, digest=tokens.digest, vocabulary=vocabulary, rank=rank, size=size)
