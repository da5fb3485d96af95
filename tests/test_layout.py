"""Layers over stages: every layer once, in order, the ends lighter, and back again."""

import jax.numpy as jnp
import numpy as np
import pytest

from pipejax.layout import spread
from pipejax.schedules.schedule import looping


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_every_layer_lives_once_and_in_order(devices, chunks):
    for num_layers in range(1, 3 * devices * chunks + 2):
        layout = spread(num_layers=num_layers, placement=looping(devices, chunks))
        in_model_order = [
            layer
            for stage in range(devices * chunks)
            for layer in layout.layer[stage % devices, stage // devices].tolist()
            if layer >= 0
        ]
        assert in_model_order == list(range(num_layers))
        assert layout.counts.max() - layout.counts.min() <= 1


def test_ends_are_lighter():
    assert spread(num_layers=38, placement=looping(8, 5)).counts.tolist() == [0] + [1] * 38 + [0]
    assert spread(num_layers=7, placement=looping(4, 1)).counts.tolist() == [2, 2, 2, 1]


@pytest.mark.parametrize("num_layers", [1, 5, 8, 11])
def test_layers_go_there_and_back(num_layers):
    layout = spread(num_layers=num_layers, placement=looping(4, 2))
    layers = jnp.arange(1, num_layers + 1, dtype=jnp.float32)[:, None] * jnp.ones((1, 3))
    placed = layout.from_layers(layers)
    assert placed.shape == (4, 2, layout.layers_per_chunk, 3)
    np.testing.assert_array_equal(np.asarray(layout.to_layers(placed)), np.asarray(layers))
    assert not np.asarray(placed)[layout.layer < 0].any()
    assert np.count_nonzero(np.asarray(placed)[..., 0]) == num_layers


def test_no_layer_is_refused():
    with pytest.raises(ValueError, match="one layer or more"):
        spread(num_layers=0, placement=looping(2, 1))
