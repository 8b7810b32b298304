"""Pipeline schedules, one file each: every rank's ordered list of actions. See `trainwright.schedules.actions`."""

from __future__ import annotations

from ..registry import Registry

SCHEDULES = Registry("trainwright.schedules", "SCHEDULE", "pipeline schedule")
