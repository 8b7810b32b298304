"""One file a check, or a few that look at the same thing. A module with ``CHECK`` (or a tuple of them) is in the registry."""

from __future__ import annotations

from ...registry import Registry

CHECKS = Registry("trainwright.check.checks", "CHECK", "check")
