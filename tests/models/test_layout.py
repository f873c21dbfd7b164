"""What each stored tensor is to a model, against transformers' own conversion of a whole state dict."""

import pytest
import torch
from support.architecture_scan import small_configs
from transformers.core_model_loading import revert_weight_conversion

from mergekit_slta.models.layout import Layout, meta_model

# One matrix that the model has in two or four; three in one; names that transformers renames twice.
TYPES = {
    "hrm_text": "HrmTextForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
}


@pytest.mark.parametrize("name", TYPES)
def test_tensors_are_read_from_the_stored_ones_and_made_into_them(name: str) -> None:
    """Of more mixtures tests/test_every_tensor.py says the same of whole merges."""
    model = meta_model(next(small_configs(name, TYPES[name])))
    generator, values = torch.Generator().manual_seed(0), dict[int, torch.Tensor]()
    state = {
        key: values.setdefault(id(own), torch.randn(own.shape, generator=generator))
        for key, own in model.state_dict(keep_vars=True).items()
    }
    stored = revert_weight_conversion(model, dict(state))
    layout = Layout(model, stored)
    assert all(key in layout for key in state) and layout.outside == [] and layout.pieces.keys() == stored.keys()
    for key, tensor in state.items():
        assert torch.equal(layout.read(key, stored.__getitem__), tensor), key
    for key in layout.pieces:
        again = layout.restore(key, lambda target, part: state[target] if part is None else state[target][part])
        assert torch.equal(again, stored[key]), key
