"""The library in a notebook: what it answers prints on a line, what it is handed by mistake is named."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import trainwright as tw

RUN = {"model": "gpt2", "cluster": "8xH100", "strategy": {"tp": 1, "pp": 1, "cp": 1, "sharding": "zero3", "recompute": "none"}}


def test_an_answer_prints_on_a_line() -> None:
    found = tw.estimate(RUN)
    assert repr(found).startswith("<Estimate gpt2 on 8 x H100-SXM-80GB: dp 8, zero3, micro-batch 1: ")
    assert repr(found).endswith("verdict fits>")
    assert "\n" not in repr(found)
    assert (
        repr(tw.schedule("1f1b", stages=4, microbatches=8))
        == "<Timeline 1f1b: 4 ranks, 8 micro-batches: makespan 33, bubble 27.3% of all time>"
    )


def test_plans_print_a_line_each() -> None:
    plans = tw.plan(RUN, top=2)
    head, first, *_ = repr(plans).splitlines()
    assert head == f"<{len(plans)} plans of {plans.searched:,} layouts>"
    assert first == f"  1. {plans[0]!r}"
    nothing = tw.plan({"model": "llama-3.1-405b", "cluster": "1xT4"})
    assert repr(nothing).splitlines()[1] == f"  nothing fits; what would: {nothing.suggestion}"


def test_an_answer_travels_between_processes() -> None:
    found = tw.estimate(RUN)
    for twin in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        assert twin.to_dict() == found.to_dict()


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda: tw.check(3), "files"),
        (lambda: tw.check("ds_config.json"), "files"),
        (lambda: tw.check({"ds_config.json": {}}), "ds_config.json"),
        (lambda: tw.check({"ds_config.json": "{}"}, launch=["deepspeed"]), "launch"),
        (lambda: tw.check({"ds_config.json": "{}"}, on=8), "on"),
        (lambda: tw.check({"ds_config.json": "{}"}, ignore=1), "ignore"),
        (lambda: tw.estimate_many(3), "specs"),
        (lambda: tw.schedule(["1f1b"], 4, 8), "name"),
        (lambda: tw.collective_time("all_reduce", 8, "8xH100", 8, algorithm=["ring"]), "algorithm"),
        (lambda: tw.plan(RUN, max_gpus="8"), "max_gpus"),
        (lambda: tw.plan(RUN, catalog_files=3), "catalog_files"),
    ],
)
def test_an_argument_of_another_type_is_named(call: Any, where: str) -> None:
    with pytest.raises(tw.SpecError, match=f"^{where}: .* is not "):
        call()
