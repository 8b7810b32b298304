"""Examples are not timed: a shared machine is slow now and then, and a slow example is no wrong one."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
