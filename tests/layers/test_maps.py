"""The linear maps of a layer."""

import pytest
from support import families, reference

from mergekit_slta.layers.maps import linear_maps


@pytest.mark.parametrize("architecture", families.ARCHITECTURES)
def test_the_maps_of_a_layer_are_those_of_the_reference(architecture: str) -> None:
    model = families.random_model(families.config_of(architecture))
    for layer in model.get_submodule(reference.SPLITS[architecture].layers):
        maps = linear_maps(layer)
        assert {found.module for found in maps} == set(reference.linear_maps(layer))
        state = layer.state_dict()
        for found in maps:
            assert found.matrix(state).ndim == 2
            offset = found.offset(state)
            assert offset is None or offset.shape == found.matrix(state).shape[:1]
        owned = {name for found in maps for name in (found.weight, found.bias) if name}
        # What is left belongs to norms, convolutions and state space parameters.
        assert not [name for name in set(state) - owned if name.endswith(("proj.weight", "proj.bias"))]
