"""A model without weights: transformers' own modules on the meta device, and how checkpoint names map onto them."""

import copy
from collections.abc import Collection, Iterator

import torch
import transformers
from mergekit.common import get_auto_cls
from transformers.initialization import no_init_weights

from mergekit_slta.errors import SltaError, reading


def meta_model(config: transformers.PretrainedConfig, trust_remote_code: bool = False) -> transformers.PreTrainedModel:
    """Build the model that ``config`` describes on the meta device, in evaluation mode and with tied weights tied.

    It is built from a copy, because transformers changes the configuration.

    Raises:
        SltaError: the configuration names no architecture, or transformers cannot build it.
    """
    if not config.architectures:
        raise SltaError(f"The config of model type '{config.model_type}' names no architecture: add 'architectures'.")
    source = f" from the config.json of {config._name_or_path}" if config._name_or_path else ""
    with (
        reading("transformers", f"cannot build {config.architectures[0]}{source}", "change or complete that file"),
        torch.device("meta"),
        no_init_weights(),
    ):
        model = get_auto_cls(config.architectures[0]).from_config(
            copy.deepcopy(config), trust_remote_code=trust_remote_code, dtype=torch.float32
        )
        model.tie_weights()
    return model.eval()


def language_names(model: transformers.PreTrainedModel) -> frozenset[str]:
    """The names of the tensors of a model's language tower and output head, tied ones by all their names."""
    if model.config.get_text_config() is model.config:
        return frozenset(model.state_dict())
    parts = (model.get_decoder(), model.get_output_embeddings())
    paths = [name for name, module in model.named_modules() if any(module is part for part in parts)]
    return frozenset(name for name in model.state_dict() if any(name.startswith(f"{path}.") for path in paths))


# The beginnings of the names of a language tower's tensors, in checkpoints of multimodal models by several releases of
# transformers and of the language model alone. The longer ones come first.
_TOWERS = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")


def spellings(name: str, base_model_prefix: str) -> Iterator[str]:
    """The names that a tensor may have in checkpoints of one model, its own first.

    There it may lack or carry the base model's prefix, and that of a multimodal model around the language model.
    """
    prefix = base_model_prefix + "."
    inside = next(name.removeprefix(tower) for tower in _TOWERS if name.startswith(tower))
    yield from dict.fromkeys((name, prefix + name, name.removeprefix(prefix), *(tower + inside for tower in _TOWERS)))


def model_tensor_name(name: str, names: Collection[str], base_model_prefix: str) -> str | None:
    """Find a tensor among ``names`` by any of its ``spellings``; None if it is missing."""
    return next((spelling for spelling in spellings(name, base_model_prefix) if spelling in names), None)
