"""What a framework does that no equation can know, one file each: what it keeps in which type, buffers, frees, overlaps.

Each file exposes ``FRAMEWORK = Framework(...)``. `MemoryRules` and `TimeRules` hold documented behavior only; the equations that read them
are in `trainwright.cost`.
"""

from __future__ import annotations

from ..registry import Registry

FRAMEWORKS = Registry("trainwright.frameworks", "FRAMEWORK", "framework")
