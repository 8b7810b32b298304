"""Where nothing fits, the suggestion is a change that was tried: making it gives a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainwright.search.pricing import resized
from trainwright.search.rank import Ranking, SearchOptions, search
from trainwright.search.rules import Case
from trainwright.spec.run import StrategySection

from .cases import LLAMA_70B, Fake, case, strategy


class Big(Fake):
    """More state than a node holds, even with offload."""

    state = 16e9 * 600


class Wide(Fake):
    """Activations that only full recomputation makes fit."""

    saved = 300e9


def find(found: Case, said: StrategySection, pricing: type[Fake] = Fake, **options: object) -> Ranking:
    return search(found.model, found.cluster, found.job, said, SearchOptions(**options), pricing)  # type: ignore[arg-type]


def apply(found: Case, said: StrategySection, change: dict[str, object]) -> tuple[Case, StrategySection]:
    """The case and strategy with the suggested change made."""
    job, cluster = found.job, found.cluster
    for name, value in change.items():
        section, field = name.split(".")
        if section == "training":
            job = replace(job, **{field: value})
        elif section == "strategy":
            said = said.model_copy(update={field: value})
        else:
            cluster = resized(replace(cluster, gpus_per_node=8), int(value))  # type: ignore[call-overload]
    return Case(found.model, cluster, job), said


NOTHING_FITS = {
    "recompute": (case(gpus=1, batch=4), strategy(recompute="none", micro_batch_size=1, tp=1, offload="none"), Wide, "strategy.recompute"),
    "offload": (case(gpus=1, batch=4), strategy(offload="none"), Fake, "strategy.offload"),
    "sharding": (case(gpus=8, batch=16), strategy(sharding="none", tp=1, pp=1, offload="none"), Fake, "strategy.sharding"),
    "tp": (
        case(LLAMA_70B, gpus=8, batch=16, seq=8192),
        strategy(framework="megatron", tp=1, sharding="none", pp=1, cp=1, offload="none"),
        Fake,
        "strategy.sharding",
    ),
    "micro-batch": (
        case(gpus=2, batch=32),
        strategy(micro_batch_size=16, recompute="none", offload="none", tp=1),
        Fake,
        "strategy.micro_batch_size",
    ),
    "more GPUs": (case(LLAMA_70B, gpus=8, batch=512, seq=8192), strategy(), Big, "cluster.gpus"),
    "batch": (case(gpus=61, batch=512), strategy(), Fake, "training.global_batch_size"),
}


@pytest.mark.parametrize("name", NOTHING_FITS)
def test_a_suggestion_fits(name: str) -> None:
    found, said, pricing, changed = NOTHING_FITS[name]
    empty = find(found, said, pricing)
    assert len(empty) == 0
    assert empty.suggestion is not None
    assert changed in empty.change
    assert all(f"{k.split('.')[-1]} = {v}" in empty.suggestion or k == "cluster.gpus" for k, v in empty.change.items())
    again = find(*apply(found, said, dict(empty.change)), pricing)
    assert len(again) > 0


def test_the_fewest_gpus_are_suggested() -> None:
    found, said, pricing, _ = NOTHING_FITS["more GPUs"]
    gpus = int(find(found, said, pricing).change["cluster.gpus"])  # type: ignore[call-overload]
    assert gpus % 8 == 0
    fewer = Case(found.model, resized(found.cluster, gpus - 8), found.job)
    assert len(find(fewer, said, pricing)) == 0


def test_a_cheap_change_is_preferred_to_more_gpus() -> None:
    found, said, pricing, _ = NOTHING_FITS["recompute"]
    assert "cluster.gpus" not in find(found, said, pricing).change


def test_a_deadline_asks_for_more_gpus_and_a_budget_for_money() -> None:
    found = case(gpus=8, batch=64)
    fastest = find(found, strategy())
    late = find(found, strategy(), deadline_s=1e9 / (512 * 64) * float(fastest.step_s[0]) / 3)
    assert late.change["cluster.gpus"] > 8  # type: ignore[operator]
    poor = find(found, strategy(), max_cost=1.0)
    assert poor.change["max_cost"] > 1  # type: ignore[operator]
    assert "a budget of $" in str(poor.suggestion)
    enough = find(found, strategy(), max_cost=1.001 * float(poor.change["max_cost"]))  # type: ignore[arg-type]
    assert len(enough)


def test_nothing_is_suggested_where_something_fits() -> None:
    assert find(case(gpus=8, batch=16), strategy()).suggestion is None


def test_a_list_of_layers_that_deals_too_many_is_left_out() -> None:
    found = find(case(gpus=2, batch=4), strategy(layers_per_stage=(3, 4), pp=2, offload="none"))
    assert found.suggestion is not None
    assert "without strategy.layers_per_stage" in found.suggestion
