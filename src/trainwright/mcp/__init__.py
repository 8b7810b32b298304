"""The planner for assistants: plan, estimate, memory, check and explain over the Model Context Protocol, on standard input and output.

    python -m trainwright.mcp            # or: trainwright mcp

Needs the extra ``mcp``. A tool is a function of `TOOLS` with plain arguments; the protocol's description of it is its docstring and the JSON schema of its
arguments. What is wrong with the input is the tool's answer: one line that names the place and the nearest right value, as on the command line. No tool
writes, none runs what it reads, and none opens a file of the machine. Each call is computed in a process of its own, which is ended when its time is up.
"""

from __future__ import annotations

from .serve import main, server
from .tools import TOOLS, check, estimate, explain, memory, plan

__all__ = ["TOOLS", "check", "estimate", "explain", "main", "memory", "plan", "server"]
