"""Processes that end with the one that started them. Needs no torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def die_with_parent() -> None:
    """Linux kills this process when the one that started it ends, however it ends: no orphan keeps a GPU. Elsewhere: nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
        if os.getppid() == 1:  # it ended before the call
            os._exit(1)
