"""What one rank holds, byte by byte, over a step."""

from __future__ import annotations

from dataclasses import dataclass, field

KINDS = ("parameters", "gathered", "gradients", "optimizer", "activations", "host")


@dataclass
class Ledger:
    """Bytes held now and at most, by kind; the largest sum ever on the device (``host`` is not on it); and a snapshot at every marked moment."""

    held: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    peak: int = 0
    most: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    at_peak: dict[str, int] = field(default_factory=dict)
    moments: list[tuple[str, dict[str, int]]] = field(default_factory=list)

    def hold(self, kind: str, size: int) -> None:
        self.held[kind] += size
        self.most[kind] = max(self.most[kind], self.held[kind])
        if self.device > self.peak:
            self.peak, self.at_peak = self.device, dict(self.held)

    def free(self, kind: str, size: int) -> None:
        self.held[kind] -= size

    @property
    def device(self) -> int:
        return sum(size for kind, size in self.held.items() if kind != "host")

    def mark(self, label: str) -> None:
        self.moments.append((label, dict(self.held)))
