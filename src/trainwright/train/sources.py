"""What a run starts from, looked at before any rank runs: ``python -m trainwright.train.sources QUESTION ANSWER``, two JSON files.

Initial weights are compared by name and shape with the whole model, on the meta device; a module of one's own is found and imported, not made.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ..errors import TrainwrightError
from ..resolve import Run, resolve
from ..spec.run import validate
from . import adopt, weights
from .decoder import build
from .files import read_json, write_json
from .settings import Settings


def check(run: Run, settings: Settings) -> None:
    """Raises `SpecError`."""
    if settings.model_from:
        maker = adopt.maker_of(settings.model_from)
        adopt.check(run)
        if settings.init:
            adopt.refuse_files(maker)
    elif settings.init:
        with torch.device("meta"):
            part = build(run.model)
        weights.check(run.model, Path(settings.init), part.named_parameters())


def main(question: str, answer: str) -> None:
    document = read_json(Path(question))
    if document is None:
        raise SystemExit(f"{question} is no question")
    found: dict[str, str] = {}
    try:
        check(resolve(validate(dict(document["spec"]))), Settings.from_dict(document["settings"]))
    except TrainwrightError as error:
        found = {"error": str(error)}
    write_json(Path(answer), found)


if __name__ == "__main__":
    main(*sys.argv[1:])
