"""Plan -> files -> plan is the identity on what a target can say; what it cannot say has a nearest plan that it can."""

from __future__ import annotations

import copy
import json
import os

import pytest
from hypothesis import HealthCheck, assume, given, settings

from trainwright.api import load
from trainwright.emit import TARGETS, Options, settled
from trainwright.emit.base import dig, put
from trainwright.emit.fields import left, says
from trainwright.emit.nearest import mended, refused
from trainwright.emit.yaml import load as load_yaml
from trainwright.errors import SpecError
from trainwright.resolve import resolve
from trainwright.search.constraints import check_plan

from .cases import BY_HAND, documents, flat, legal, run_of, same

NEEDS_YAML = ("accelerate", "kubernetes", "skypilot")
FRAMEWORK = {"torchtitan": "fsdp2", "megatron": "megatron", "deepspeed": "deepspeed", "fsdp": "fsdp2"}
QUICK = settings(max_examples=int(os.environ.get("TRAINWRIGHT_EXAMPLES", "10")), deadline=None, suppress_health_check=list(HealthCheck))


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


def test_the_toml_of_older_torchtitans():
    target, options = TARGETS["torchtitan"], Options(torchtitan_version="0.2.2")

    @QUICK
    @given(documents("fsdp2"))
    def check(document):
        run = legal(document)
        assume(run is not None)
        run = mended(run, target)
        try:
            files = target.write(run, options)
        except SpecError as error:
            assert error.where in ("training.loss", "strategy.sequence_parallel", "strategy.cuda_graphs")
            return
        found = target.read(files)
        for field in says(target, run):
            assert same(field, dig(found, field), run), field

    check()


@pytest.mark.parametrize("name", ["deepspeed", "trainer", "fsdp", "accelerate", "kubernetes", "skypilot"])
def test_readers_take_what_people_write(name):
    """Every value in turn replaced by "auto", null, a list: never a crash, and what is left is still read."""
    target, run = TARGETS[name], run_of(BY_HAND[name])
    files = target.write(settled(run, target), Options())
    for file in [f for f in files if f.endswith((".json", ".yaml")) and f not in ("config.json", "configmap.yaml")]:
        if any(f.endswith(".yaml") for f in files):  # the reader opens them all
            pytest.importorskip("yaml")
        document = json.loads(files[file]) if file.endswith(".json") else load_yaml(files[file])
        for path in list(paths(document)):
            for value in ("auto", None, [], -1, {}):
                changed = copy.deepcopy(document)
                *outer, last = path
                inner = changed
                for key in outer:
                    inner = inner[key]
                inner[last] = value
                found = target.read({**files, file: json.dumps(changed)})
                assert found is None or isinstance(found, dict)


def paths(document, before=()):
    for key, value in document.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from paths(value, (*before, key))


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
