"""``trainwright simulate STUDY``: one command for every study of the registry, its options the study's own parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from ..simulate.report import Report
    from ..simulate.studies import Study

HELP = """Execute a strategy on real arrays in a virtual world of ranks and compare it with one device.

Every byte that a rank sends is counted and held against the formula.

Example: trainwright simulate fsdp --ranks 4 --zero 3
"""


def show(report: Report, json_: bool) -> None:
    """A report as tables and sentences, or as JSON."""
    from .output import console, print_json, print_rows

    if json_:
        print_json(finite(report.to_dict()))
        return
    screen = console()
    screen.print(report.title, style="bold", markup=False)
    for table in report.tables:
        if table.title:
            screen.print(f"\n{table.title}", style="italic", markup=False)
        print_rows(table.rows, "table")
    for line in report.notes:
        screen.print(f"- {line}", markup=False)
    for line in report.corrections:
        screen.print(f"! {line}", style="yellow", markup=False)


def finite(value: Any) -> Any:
    """Numbers that JSON has no word for become null."""
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value


def _command(study: Study) -> Callable[..., None]:
    """A typer command with the parameters of the study's function."""
    hints = get_type_hints(study.run, include_extras=True)
    parameters = []
    for name, parameter in inspect.signature(study.run).parameters.items():
        kind, words = hints[name].__origin__, hints[name].__metadata__[0]
        flag = "--model" if name == "model_name" else "--" + name.replace("_", "-")
        flags = [f"{flag}/--no-{flag[2:]}"] if kind is bool else [flag]
        option = Annotated[kind, typer.Option(*flags, help=words)]  # type: ignore[valid-type]
        parameters.append(parameter.replace(annotation=option))
    json_ = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
    parameters.append(inspect.Parameter("json_", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=json_))

    def command(**options: Any) -> None:
        as_json = options.pop("json_")
        show(study.run(**options), as_json)

    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    )
    command.__doc__ = f"{inspect.getdoc(study.run)}\n\nExample: {study.example}"
    return command


class _Studies(typer.core.TyperGroup):
    """The studies, read only when one is asked for: `trainwright --help` does not import NumPy."""

    def _load(self) -> None:
        if getattr(self, "loaded", False):
            return
        from ..simulate.studies import STUDIES

        app = typer.Typer(rich_markup_mode=None)
        app.callback()(lambda: None)
        for study in STUDIES.values():
            app.command(study.name, help=_command(study).__doc__)(_command(study))
            for alias in study.aliases:
                app.command(alias, hidden=True, help=_command(study).__doc__)(_command(study))
        self.commands.update(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
        self.loaded = True

    def list_commands(self, ctx: Any) -> list[str]:
        self._load()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        self._load()
        return super().get_command(ctx, cmd_name)


def register(app: typer.Typer) -> None:
    group = typer.Typer(cls=_Studies, help=HELP, no_args_is_help=True, rich_markup_mode=None)
    group.callback()(lambda: None)
    app.add_typer(group, name="simulate")
