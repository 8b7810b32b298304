"""The server: the protocol's side of the tools, and the processes that compute their answers."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, get_type_hints

from ..errors import SpecError
from .tools import MAX_CHARACTERS, TOOLS, Answer
from .worker import DEEPEST, depth, named

LIMIT_S, START_S = 120.0, 120.0
MOST_WORKERS = 4
MOST_ANSWER = 64 << 20  # bytes of one answer
INSTRUCTIONS = (
    "Trainwright plans the distributed training of language models: memory to the byte, step time, cost. Call plan where the layout is open, estimate or "
    "memory where it is given, check for configuration files and launch scripts (give their text), explain for an out-of-memory message. Bytes are whole "
    "numbers, times are seconds, money is US dollars, null is a number that does not exist. Say of each number that it was computed."
)


class Refused(Exception):
    """Why a call has no answer, in one line."""


class Workers:
    """Processes that compute answers, started when they are needed, at most `MOST_WORKERS`; one whose call takes longer than `limit_s` is ended."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        import anyio

        self.limit_s = limit_s
        self.places = anyio.Semaphore(MOST_WORKERS)
        self.idle: list[Any] = []

    async def call(self, tool: str, arguments: Answer) -> Answer:
        """The tool's answer. Raises `Refused`."""
        import anyio

        request = _request(tool, arguments)
        async with self.places:
            worker, done = self.idle.pop() if self.idle else await self._start(), False
            try:
                with anyio.fail_after(self.limit_s):
                    await worker.stdin.send(request)
                    said = json.loads(await worker.answers.receive_until(b"\n", MOST_ANSWER))
                done = True
            except TimeoutError:
                raise Refused(
                    f"{tool} took longer than {self.limit_s:g} s and was ended: ask for less (fix more of the strategy, fewer GPUs)"
                ) from None
            except (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.IncompleteRead, anyio.EndOfStream):
                raise Refused(f"{tool} ended without an answer: this machine's memory may be too small for it") from None
            except anyio.DelimiterNotFound:
                raise Refused(f"the answer of {tool} is larger than {MOST_ANSWER >> 20} MiB: ask for less") from None
            finally:
                if done:
                    self.idle.append(worker)
                else:
                    end(worker)
        if "error" in said:
            raise Refused(str(said["error"]))
        found: Answer = said["answer"]
        return found

    async def _start(self) -> Any:
        import anyio
        from anyio.streams.buffered import BufferedByteReceiveStream

        words = [sys.executable, "-c", "from trainwright.mcp.worker import main; main()"]
        worker: Any = await anyio.open_process(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None)
        worker.answers = BufferedByteReceiveStream(worker.stdout)
        try:
            with anyio.fail_after(START_S):
                await worker.answers.receive_until(b"\n", 1000)
        except BaseException as error:
            end(worker)
            if isinstance(error, Exception):
                raise Refused("the process that computes does not start") from None
            raise
        return worker

    def close(self) -> None:
        """Ends every process that waits for a call."""
        while self.idle:
            end(self.idle.pop())


def end(worker: Any) -> None:
    with suppress(ProcessLookupError):
        worker.kill()


def _request(tool: str, arguments: Answer) -> bytes:
    if depth(arguments) > DEEPEST:
        raise Refused(f"the arguments are nested more than {DEEPEST} deep")
    text = json.dumps({"tool": tool, "arguments": arguments})
    if len(text) > MAX_CHARACTERS + 10_000:
        raise Refused(f"the arguments are longer than {MAX_CHARACTERS:,} characters")
    return text.encode() + b"\n"


def untyped(tool: Callable[..., Answer]) -> inspect.Signature:
    """The tool's signature with the JSON schema of each parameter and no type: what is wrong with a value is said by us, in one line."""
    from pydantic import TypeAdapter, WithJsonSchema

    hints, signature = get_type_hints(tool, include_extras=True), inspect.signature(tool)
    shown = [
        p.replace(annotation=Annotated[Any, WithJsonSchema(TypeAdapter(hints[n]).json_schema())]) for n, p in signature.parameters.items()
    ]
    return signature.replace(parameters=shown, return_annotation=Answer)


def server(limit_s: float = LIMIT_S) -> Any:
    """The server with every tool of `TOOLS`, each call at most `limit_s` seconds. Raises `SpecError` without the extra."""
    try:
        from mcp.server.mcpserver import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError:
        raise SpecError("the server needs the mcp package: pip install 'trainwright[mcp]'", "mcp") from None
    from .. import __version__

    workers = Workers(limit_s)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        try:
            yield
        finally:
            workers.close()

    class Named(MCPServer):
        """The names of arguments are looked at here: the package says what is missing in several lines, and drops what no tool has."""

        async def call_tool(self, name: str, arguments: Answer, *more: Any, **options: Any) -> Any:
            try:
                for tool in (t for t in TOOLS if t.__name__ == name):
                    named(tool, arguments)
            except SpecError as error:
                raise ToolError(str(error)) from None
            return await super().call_tool(name, arguments, *more, **options)

    made = Named("trainwright", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING", lifespan=lifespan)

    def answering(tool: Callable[..., Answer]) -> Callable[..., Any]:
        async def call(**arguments: Any) -> Answer:
            try:
                return await workers.call(tool.__name__, {k: v for k, v in arguments.items() if v is not None})
            except Refused as error:
                raise ToolError(str(error)) from None

        call.__name__, call.__doc__ = tool.__name__, tool.__doc__
        call.__signature__ = untyped(tool)  # type: ignore[attr-defined]
        return call

    for tool in TOOLS:
        made.tool(structured_output=True)(answering(tool))
    return made


def main(limit_s: float = LIMIT_S) -> None:
    server(limit_s).run("stdio")
