"""Prompts that are answered together get the answers that they get alone, in every model type that transformers has."""

from typing import Any

import pytest
import torch
import transformers
from support import families
from support.architecture_scan import KINDS, NO_DECODERS, is_decoder, small_configs
from support.slow import slow_but

from mergekit_slta.asking.ask import _produced
from mergekit_slta.models.layout import meta_model

TYPES = {name: kind for kind, names in KINDS.items() for name in names if name not in NO_DECODERS}
# Types whose layers carry or pool over tokens, and plain ones.
QUICK = ("rwkv", "deepseek_v4", "recurrent_gemma", "mamba", "lfm2", "llama", "gpt2", "bloom")
LENGTHS = (2, 3, 5, 9, 14, 21, 30)
MOST = 6  # tokens of an answer
LARGEST = 20_000_000  # parameters


def small_model(name: str) -> Any:
    """A model of a type with random weights; the test is skipped where it cannot be built or answers nothing."""
    if not is_decoder(name, TYPES[name]):
        pytest.skip("no decoder-only language model")
    classes = KINDS[TYPES[name]][name]
    reason = "no small configuration"
    for config in small_configs(name, classes if isinstance(classes, str) else classes[0]):
        try:
            if sum(parameter.numel() for parameter in meta_model(config).parameters()) > LARGEST:
                continue
            model = families.random_model(config)
            model.generation_config = transformers.GenerationConfig(eos_token_id=[1], pad_token_id=0)
            model.generate(torch.tensor([[3, 4, 5]]), do_sample=False, max_new_tokens=2)
        except Exception as error:  # whatever the type's own code raises
            reason = str(error)
        else:
            return model
    pytest.skip(reason[:200])


@pytest.mark.parametrize("name", slow_but(QUICK, sorted(TYPES)))
def test_answers_do_not_depend_on_the_prompts_beside_them(name: str) -> None:
    model = small_model(name)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, 30, (length,), generator=generator).tolist() for length in LENGTHS]
    alone = [_produced(model, [row], MOST)[0] for row in rows]
    assert len({tuple(words) for words, _ in alone}) > 1
    assert _produced(model, rows, MOST) == alone
