"""What each stored tensor is to a model, against transformers' own conversion of a whole state dict."""

from __future__ import annotations

import pytest
import torch
from support.architecture_scan import small_configs
from transformers.core_model_loading import revert_weight_conversion

from mergekit_slta.models.layout import Layout, meta_model

State = dict[str, torch.Tensor]

# One matrix that the model has in two or four; three in one; rows in another order; names that transformers renames
# twice; a mixture's experts one by one, in all layers and in some.
TYPES = {
    "hrm_text": "HrmTextForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "inkling2_text": "Inkling2ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
}


def made(name: str) -> tuple[Layout, State, State]:
    """A layout, the model's tensors, and the stored ones as transformers saves them."""
    model = meta_model(next(small_configs(name, TYPES[name])))
    generator, values = torch.Generator().manual_seed(0), dict[int, torch.Tensor]()
    state = {
        key: values.setdefault(id(own), torch.randn(own.shape, generator=generator))
        for key, own in model.state_dict(keep_vars=True).items()
    }
    stored = revert_weight_conversion(model, dict(state))
    return Layout(model, stored), state, stored


@pytest.mark.parametrize("name", TYPES)
def test_tensors_are_read_from_the_stored_ones_and_made_into_them(name: str) -> None:
    layout, state, stored = made(name)
    assert layout.missing() == [] and layout.outside == [] and layout.pieces.keys() == stored.keys()
    for key, tensor in state.items():
        assert torch.equal(layout.read(key, stored.__getitem__), tensor), key
    for key in layout.pieces:
        again = layout.restore(key, lambda target, part: state[target] if part is None else state[target][part])
        assert torch.equal(again, stored[key]), key


def test_what_is_missing_is_known_by_the_models_names() -> None:
    layout, _, stored = made("mixtral")
    name = "model.layers.1.mlp.experts.down_proj"
    lost = next(key for key, own in layout.pieces.items() if own.targets == (name,) and own.expert == 3)
    broken = Layout(layout.model, [key for key in stored if key != lost])
    assert name not in broken and broken.missing() == [name]
    assert {own.targets for own in map(layout.pieces.get, broken.lacks(layout)) if own} == {(name,)}
    assert layout.lacks(broken) == []
