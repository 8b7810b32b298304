"""What other layers load from the catalogue, in one place."""

from __future__ import annotations

from .clusters import build_cluster
from .gpus import list_gpus, load_gpu
from .known_models import list_models, load_model, needs_no_file
from .prices import default_price, list_prices
from .runs import list_runs

__all__ = [
    "build_cluster",
    "default_price",
    "list_gpus",
    "list_models",
    "list_prices",
    "list_runs",
    "load_gpu",
    "load_model",
    "needs_no_file",
]
