"""Plan -> files -> plan is the identity on what a target can say; what it cannot say has a nearest plan that it can."""

from __future__ import annotations

import copy

import pytest
from hypothesis import HealthCheck, assume, given, settings

from trainwright.api import load
from trainwright.emit import TARGETS, Options, settled
from trainwright.emit.base import dig, put
from trainwright.emit.fields import left, says
from trainwright.emit.nearest import mended, refused
from trainwright.resolve import resolve
from trainwright.search.constraints import check_plan

from .cases import documents, flat, legal, same

NEEDS_YAML = ("accelerate", "kubernetes", "skypilot")
FRAMEWORK = {"torchtitan": "fsdp2", "megatron": "megatron", "deepspeed": "deepspeed", "fsdp": "fsdp2"}
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_plan_to_files_to_plan(name):
    if name in NEEDS_YAML:
        pytest.importorskip("yaml")
    target = TARGETS[name]

    @QUICK
    @given(documents(FRAMEWORK.get(name)))
    def check(document):
        run = legal(document)
        assume(run is not None)
        run = settled(mended(run, target), target)
        files = target.write(run, Options())
        found = target.read(files)
        assert found is not None
        for field in says(target, run):
            assert same(field, dig(found, field), run), (field, dig(found, field), dig(run.filled, field))
        for field, value in flat(found).items():
            assert same(field, value, run), (field, value)
        # A plan made of what was read, and of nothing else where the target says it, is written to the same files.
        again = copy.deepcopy(run.filled)
        for field in set(says(target, run)) - set(left(target, run)):
            if not field.startswith("cluster."):
                put(again, field, dig(found, field))
        second = resolve(load(again))
        assert target.write(second, Options()) == files

    check()


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_the_nearest_plan_is_legal_and_can_be_expressed(name):
    target = TARGETS[name]

    @QUICK
    @given(documents())
    def check(document):
        run = legal(document)
        assume(run is not None and refused(run, target))
        near = mended(run, target)
        assert not refused(near, target)
        check_plan(near.model, near.cluster, near.job, near.plan)
        assert near.cluster.gpus == run.cluster.gpus
        assert target.write(settled(near, target), Options())

    check()
