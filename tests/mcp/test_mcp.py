"""The server as an assistant meets it: a real client over standard input and output."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="the extra mcp is not installed")

import trainwright as tw
from trainwright import mcp as planner
from trainwright.mcp.worker import answer, depth, finite

RUN = {"model": "llama-3.1-8b", "cluster": "8xH100", "strategy": {"framework": "fsdp2", "sharding": "zero3", "recompute": "full"}}


def ask(*calls: tuple[str, dict[str, Any]], program: str = "from trainwright.mcp import main; main()") -> list[Any]:
    """The answers of a fresh server, in one session."""
    from mcp.client.stdio import stdio_client

    from mcp import ClientSession, StdioServerParameters

    async def session() -> list[Any]:
        place = StdioServerParameters(command=sys.executable, args=["-c", program], env=dict(os.environ))
        async with stdio_client(place) as (read, write), ClientSession(read, write) as client:
            await client.initialize()
            listed = {t.name: t for t in (await client.list_tools()).tools}
            return [listed, *[await client.call_tool(name, arguments) for name, arguments in calls]]

    return asyncio.run(asyncio.wait_for(session(), 300))


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


def test_schemas_say_what_run_and_strategy_hold() -> None:
    (listed,) = ask()
    run = listed["estimate"].input_schema["properties"]["run"]
    assert set(run["required"]) == {"model", "cluster"}
    assert run["properties"]["strategy"]["properties"]["sharding"]["anyOf"][0]["enum"] == ["none", "zero1", "zero2", "zero3"]
    assert run["properties"]["training"]["additionalProperties"] is False
    fixed = next(f for f in listed["plan"].input_schema["properties"]["strategy"]["anyOf"] if f.get("type") == "object")
    assert fixed["properties"]["tp"]["anyOf"][0]["minimum"] == 1
    assert "$ref" not in json.dumps({name: tool.input_schema for name, tool in listed.items()})


def test_no_file_of_this_machine_is_read(tmp_path: Path) -> None:
    """Not as a model, not as the model of a run, not because a file that is checked names one."""
    secret = tmp_path / "config.json"
    secret.write_text(json.dumps({"model_type": "llama", "hidden_size": 4242}))
    path = str(secret)
    asked = [
        ("memory", {"model": path, "on": "8xH100"}),
        ("plan", {"model": "../" + tmp_path.name, "on": "8xH100"}),
        ("estimate", {"run": {**RUN, "model": path}}),
        ("explain", {"message": "Tried to allocate 3.91 GiB", "run": {**RUN, "model": str(tmp_path)}}),
        ("check", {"files": {"args.yaml": "bf16: true\n"}, "model": path}),
        ("estimate", {"run": path}),
        ("check", {"files": {"args.yaml": f"model_name_or_path: {path}\nper_device_train_batch_size: 1\nbf16: true\n"}}),
    ]
    _, *refused, read = ask(*asked)
    assert all(r.is_error and len(r.content[0].text.splitlines()) == 1 for r in refused)
    assert all("no file is opened here" in r.content[0].text for r in refused[:5])
    assert not read.is_error
    assert "4242" not in "".join(c.text for r in (*refused, read) for c in r.content)


def test_input_is_bounded_and_wrong_input_is_one_line() -> None:
    deep: Any = {}
    for _ in range(80):
        deep = {"a": deep}
    _, *answers = ask(
        ("estimate", {"run": {**RUN, "options": deep}}),
        ("estimate", {"run": {**RUN, "model": "x" * 2_100_000}}),
        ("check", {"files": {"a.yaml": "a: " + "[" * 90_000}}),
        ("memory", {"model": "llama-3.1-8b", "on": "8xH100", "seq_len": 10**30}),
        ("plan", {"model": "llama-3.1-8b", "on": "8xH100", "top": 10**9}),
        ("estimate", {"run": {**RUN, "cluster": 8}}),
        ("memory", {"model": "llama-3.1-8b", "on": "8xH100", "seq_len": "long"}),
        ("memory", {"model": "llama-3.1-8b"}),
        ("memory", {"model": "llama-3.1-8b", "on": "8xH100", "sequence_len": 4096}),
    )
    for text in (a.content[0].text for a in answers if a.is_error):
        assert "Traceback" not in text
        assert "a fault of this program" not in text
        assert len(text.splitlines()) == 1
    assert [a.is_error for a in answers] == [True, True, False, True, True, True, True, True, True]
    assert "deep" in answers[0].content[0].text
    assert "2,000,000" in answers[1].content[0].text
    assert "seq_len: 'long'" in answers[6].content[0].text
    assert "memory: on: is missing" in answers[7].content[0].text
    assert "unknown argument 'sequence_len' (nearest: seq_len)" in answers[8].content[0].text


def test_a_search_that_does_not_end_is_ended_and_the_next_call_is_answered() -> None:
    """By the clock of the call, not of the start; the session and the other calls go on."""
    from trainwright.mcp.serve import Refused, Workers

    async def session() -> None:
        workers = Workers(limit_s=0.05)
        with pytest.raises(Refused, match=r"plan took longer than 0\.05 s and was ended: ask for less"):
            await workers.call("plan", {"model": "llama-3.1-405b", "on": "16384xH100"})
        assert workers.idle == []
        workers.limit_s = 120
        found = await workers.call("check", {"files": {"a.json": '{"zero_optimization": {"stage": 5}}'}})
        assert found["findings"]
        (worker,) = workers.idle
        await workers.call("check", {"files": {}})
        assert workers.idle == [worker], "a process that answered answers again"
        workers.close()
        assert await worker.wait() != 0

    asyncio.run(asyncio.wait_for(session(), 300))


def test_a_server_with_a_short_limit_says_so_in_one_line() -> None:
    _, late = ask(("plan", {"model": "llama-3.1-405b", "on": "16384xH100"}), program="from trainwright.mcp import main; main(0.05)")
    assert late.is_error
    assert "0.05 s" in late.content[0].text


def test_numbers_that_json_does_not_have_are_null() -> None:
    nan, inf = float("nan"), float("inf")
    assert finite({"a": [1.5, nan, {"b": inf}], "c": (-inf, "x", None, True)}) == {
        "a": [1.5, None, {"b": None}],
        "c": [None, "x", None, True],
    }


def test_a_fault_of_a_tool_is_one_line() -> None:
    assert "on: is missing" in answer(json.dumps({"tool": "memory", "arguments": {"model": "7B"}}))["error"]
    assert "nearest: run" in answer(json.dumps({"tool": "estimate", "arguments": {"ruin": 1}}))["error"]
    assert answer("no json")["error"].startswith("a fault of this program")
    assert "\n" not in answer(json.dumps({"tool": "estimate", "arguments": {"ruin": 1}}))["error"]
    assert depth([[[1]], {"a": {}}]) == 4


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
