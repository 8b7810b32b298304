"""Sharding strategies, one file each: what is split over which mesh axis, and which collective runs at which event."""

from __future__ import annotations

from ..registry import Registry

SHARDINGS = Registry("trainwright.sharding", "SHARDING", "sharding strategy")
