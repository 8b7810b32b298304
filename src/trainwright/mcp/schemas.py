"""JSON schemas of what the tools take: the run spec's own, with every reference written out, since a tool's arguments have no place for definitions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema

from ..spec.run import RunSpec, StrategySection

DROPPED = ("title", "default")  # what a field is when it is left out, the tool's text says


def inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema without ``$ref``, titles and defaults. The run spec's definitions never contain themselves."""
    if isinstance(schema, list):
        return [inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    found = {}
    for key, value in schema.items():
        if key == "properties":
            found[key] = {name: inlined(field, definitions) for name, field in value.items()}
        elif key not in (*DROPPED, "$defs"):
            found[key] = inlined(value, definitions)
    return found


def of(form: Any) -> dict[str, Any]:
    """The JSON schema of a section of the run spec."""
    schema = form.model_json_schema()
    found: dict[str, Any] = inlined(schema, schema.get("$defs", {}))
    return found


def _model() -> dict[str, Any]:
    text = "A catalogue id such as llama-3.1-70b, a size such as 7B, or the keys of a config.json; no path: this server opens no file."
    return {"description": text, "anyOf": [{"type": "string", "maxLength": 200}, {"type": "object"}]}


def _run() -> dict[str, Any]:
    schema = of(RunSpec)
    gpus = {"type": "string", "pattern": r"^\s*\d+\s*[x×]", "description": "64xH100, 8xA100-40GB"}
    schema["properties"] |= {"model": _model(), "cluster": {"anyOf": [gpus, schema["properties"]["cluster"]]}}
    return schema


Model = Annotated[str | dict[str, Any], WithJsonSchema(_model())]
RunDocument = Annotated[dict[str, Any], WithJsonSchema(_run())]
Strategy = Annotated[dict[str, Any], WithJsonSchema(of(StrategySection))]
