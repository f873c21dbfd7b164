"""A model without weights: transformers' own modules on the meta device, and how checkpoint names map onto them."""

from collections.abc import Collection

import torch
import transformers
from mergekit.common import get_auto_cls
from transformers.initialization import no_init_weights

from mergekit_slta.errors import SltaError


def meta_model(config: transformers.PretrainedConfig, trust_remote_code: bool = False) -> transformers.PreTrainedModel:
    """Build the model that ``config`` describes on the meta device, in evaluation mode and with tied weights tied.

    Raises:
        SltaError: the configuration names no architecture, or transformers cannot build it.
    """
    if not config.architectures:
        raise SltaError(f"The config of model type '{config.model_type}' names no architecture: add 'architectures'.")
    try:
        with torch.device("meta"), no_init_weights():
            model = get_auto_cls(config.architectures[0]).from_config(
                config, trust_remote_code=trust_remote_code, dtype=torch.float32
            )
    except Exception as error:
        raise SltaError(f"transformers cannot build {config.architectures[0]}: {error}") from error
    model.tie_weights()
    return model.eval()


def model_tensor_name(name: str, names: Collection[str], base_model_prefix: str) -> str | None:
    """Find the model's own name for a checkpoint's tensor, which may lack or carry the base model's prefix.

    Returns ``None`` where neither spelling is among ``names``.
    """
    prefix = base_model_prefix + "."
    for candidate in (name, prefix + name, name.removeprefix(prefix)):
        if candidate in names:
            return candidate
    return None
