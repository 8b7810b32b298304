"""How fast this machine is right now: a fixed piece of work, the same when it is calibrated and beside every step that is timed later.

A shared machine's cores run at another speed from one second to the next (a third more or less was seen), and other programs take some of their time. So
what is measured is related to the pulse beside it, and told for the fastest one; what is predicted of a step is told for the pulse beside the step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .kernels import attend

SEQUENCES, LENGTH, WIDTH, HEADS = 1, 128, 256, 4
BEATS = 40


class Pulse:
    """A training step of one small decoder layer: products, attention, passes over memory, an optimizer, and the host's calls in between."""

    def __init__(self) -> None:
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.products = nn.ModuleList(nn.Linear(a * WIDTH, b * WIDTH) for a, b in ((1, 3), (1, 1), (1, 4), (4, 1)))
        weights = [*self.norms.parameters(), *self.products.parameters()]
        self.optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=True)
        self.x = torch.randn(SEQUENCES, LENGTH, WIDTH)

    def beat(self) -> None:
        """The work, once."""
        joined, out, up, down = self.products
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in joined(self.norms[0](self.x)).chunk(3, -1))
        x = self.x + out(attend(q, k, v, "flash").transpose(1, 2).flatten(2))
        x = x + down(F.gelu(up(self.norms[1](x))))
        x.square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def beats(self) -> None:
        """The work for about as long as a step takes, so that it meets as much of what else the machine does."""
        for _ in range(BEATS):
            self.beat()

    def seconds(self, now: Callable[[], float]) -> float:
        """Of a beat, on the clock `now`."""
        start = now()
        self.beat()
        return now() - start
