"""What PyTorch remembers of a world of ranks after its process group is destroyed."""

from __future__ import annotations

import functools
import gc

from torch.distributed.tensor import _redistribute, debug

DTENSOR = "torch.distributed.tensor"


def forget_world() -> None:
    """Empties every cache of DTensor, of which a process that opens one world after another keeps none.

    Their keys and values hold device meshes, meshes hold process groups, and a gloo group is three threads: threads whose peers are gone spin in epoll,
    so that each world made all later ones slower. `_clear_sharding_prop_cache` knows only two of the caches; others are `functools` caches of functions
    made at run time, which no name reaches.
    """
    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    for found in gc.get_objects():
        # The exact type: `isinstance` asks an object for its class, which lazy modules answer with warnings.
        if type(found) is functools._lru_cache_wrapper and str(getattr(found, "__module__", "")).startswith(DTENSOR):
            found.cache_clear()
    gc.collect()
