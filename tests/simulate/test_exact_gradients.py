"""The hand-written backward against finite differences: along a random direction of every weight, and element by element for one."""

from __future__ import annotations

import numpy as np
import pytest
from small_models import MODELS

from trainwright.simulate.fsdp import Optimizer
from trainwright.simulate.layout import Layout
from trainwright.simulate.model import initial, parameters, random_batch
from trainwright.simulate.run import train

STILL = Optimizer("sgd", rate=0.0)


def loss_and_gradients(config, weights, batch):
    found = train(config, Layout(flash=False), [batch], weights, optimizer=STILL)
    return found.losses[0], found.gradients


@pytest.mark.parametrize("model", MODELS)
def test_every_weight_along_a_direction(model):
    config = MODELS[model]
    batch = random_batch(config, 2, 5, padded=True)
    weights = initial(config, seed=3)
    _, gradients = loss_and_gradients(config, weights, batch)
    random = np.random.default_rng(0)
    for p in parameters(config):
        direction = random.standard_normal(p.shape)
        step = 1e-5 / np.linalg.norm(direction)
        up, down = ({**weights, p.name: weights[p.name] + sign * step * direction} for sign in (1, -1))
        slope = (loss_and_gradients(config, up, batch)[0] - loss_and_gradients(config, down, batch)[0]) / (2 * step)
        assert slope == pytest.approx(float((gradients[p.name] * direction).sum()), rel=2e-6, abs=2e-9), p.name


def test_every_element_of_a_projection():
    config = MODELS["dense"]
    batch = random_batch(config, 1, 4)
    weights = initial(config)
    _, gradients = loss_and_gradients(config, weights, batch)
    for index in list(np.ndindex(weights["1.k"].shape))[::7]:
        losses = []
        for sign in (1, -1):
            moved = weights["1.k"].copy()
            moved[index] += sign * 1e-5
            losses.append(loss_and_gradients(config, {**weights, "1.k": moved}, batch)[0])
        assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(gradients["1.k"][index], rel=1e-5, abs=1e-9)


def test_padding_has_no_loss_and_no_gradient():
    config = MODELS["dense"]
    batch = random_batch(config, 3, 6, padded=True)
    weights = initial(config)
    loss, gradients = loss_and_gradients(config, weights, batch)
    longer = type(batch)(np.pad(batch.tokens, ((0, 0), (0, 2))), np.pad(batch.targets, ((0, 0), (0, 2)), constant_values=-1))
    again, more = loss_and_gradients(config, weights, longer)
    assert again == pytest.approx(loss, rel=1e-14)
    assert max(np.abs(gradients[n] - more[n]).max() for n in gradients) < 1e-15
