"""The server as an assistant meets it: a real client over standard input and output."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the extra mcp is not installed")

import trainwright as tw
from trainwright import mcp as planner

RUN = {"model": "llama-3.1-8b", "cluster": "8xH100", "strategy": {"framework": "fsdp2", "sharding": "zero3", "recompute": "full"}}


def ask(*calls: tuple[str, dict[str, Any]]) -> list[Any]:
    """The answers of a fresh server, in one session."""
    from mcp.client.stdio import stdio_client

    from mcp import ClientSession, StdioServerParameters

    async def session() -> list[Any]:
        place = StdioServerParameters(command=sys.executable, args=["-m", "trainwright.mcp"], env=dict(os.environ))
        async with stdio_client(place) as (read, write), ClientSession(read, write) as client:
            await client.initialize()
            listed = {t.name: t for t in (await client.list_tools()).tools}
            return [listed, *[await client.call_tool(name, arguments) for name, arguments in calls]]

    return asyncio.run(asyncio.wait_for(session(), 60))


def test_an_assistant_plans_estimates_and_explains() -> None:
    listed, planned, estimated, remembered, explained, wrong = ask(
        ("plan", {"model": "llama-3.1-8b", "on": "8xH100", "top": 2}),
        ("estimate", {"run": RUN}),
        ("memory", {"model": "7B", "on": "8xA100-80GB", "strategy": {"sharding": "zero3"}}),
        ("explain", {"message": "Tried to allocate 3.91 GiB", "run": RUN}),
        ("estimate", {"run": {**RUN, "strategy": {"shading": "zero3"}}}),
    )
    assert set(listed) == {t.__name__ for t in planner.TOOLS}
    assert all(t.description and t.input_schema["properties"] for t in listed.values())
    assert len(planned.structured_content["plans"]) == 2
    assert estimated.structured_content == tw.estimate(RUN).to_dict()
    assert remembered.structured_content["memory"]["peak_bytes"] > 0
    assert explained.structured_content["suspects"][0]["what"]
    assert wrong.is_error
    assert "sharding" in wrong.content[0].text
    assert "Traceback" not in wrong.content[0].text


def test_bounds() -> None:
    with pytest.raises(tw.SpecError, match="files"):
        planner.check({str(i): "" for i in range(65)})
    with pytest.raises(tw.SpecError, match="top"):
        planner.plan("7B", "8xH100", top=1000)


def test_every_tool_says_what_it_takes() -> None:
    for tool in planner.TOOLS:
        assert tool.__doc__
        names = tool.__code__.co_varnames[: tool.__code__.co_argcount]
        text = tool.__doc__ + (planner.plan.__doc__ or "")
        assert all(name in text for name in names), tool.__name__
