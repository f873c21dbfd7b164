"""The linear maps of a layer, and the Gram matrices of their changes."""

import pytest
import torch
from support import families, reference

from mergekit_slta.layers.maps import LinearMap, MapDeltas, linear_maps

EXPERTS = 3


def random_map(
    out_features: int, in_features: int, *, kind: str = "matrix", experts: int = EXPERTS
) -> tuple[LinearMap, list[dict[str, torch.Tensor]]]:
    """A map, and its tensors in the base model and in each expert."""
    generator = torch.Generator().manual_seed(out_features * in_features)
    shape: tuple[int, ...] = (in_features, out_features) if kind == "transposed" else (out_features, in_features)
    if kind == "mixture":
        shape = (2, *shape)
    bias = "bias" if kind == "bias" else None
    found = LinearMap("map", "map", "weight", bias, kind == "transposed", 1 if kind == "mixture" else None)
    weights = []
    for _ in range(experts + 1):
        tensors = {
            "weight": torch.randn(shape, generator=generator),
            "bias": torch.randn(shape[0], generator=generator),
        }
        weights.append(tensors if bias else {"weight": tensors["weight"]})
    return found, weights


def inputs(tokens: int, width: int) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(tokens))


@pytest.mark.parametrize("kind", ["matrix", "transposed", "mixture", "bias"])
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_a_maps_deltas_are_its_outputs_difference(kind: str, tokens: int) -> None:
    found, weights = random_map(24, 8, kind=kind)
    features = inputs(tokens, 8)
    outputs = []
    for own in weights:
        output = features.double() @ found.matrix(own).double().T
        offset = found.offset(own)
        outputs.append(output if offset is None else output + offset.double())
    deltas = torch.stack([(own - outputs[0]).flatten() for own in outputs[1:]])
    assert torch.allclose(MapDeltas(found, weights).gram(features), deltas @ deltas.T, rtol=1e-5, atol=1e-5)


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
