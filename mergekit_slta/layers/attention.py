"""A model's own attention for a few queries at a time, where torch's does not apply: scores are capped, or have a sink.

The model's code for it, ``eager_attention_forward``, makes the scores of all pairs of tokens several times, and returns
them: 2 GB each for 8 heads and 8,192 tokens.
"""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import torch
import transformers
from transformers.masking_utils import eager_mask

FEW_QUERIES = "few_queries"  # its name in a configuration
SCORES = 2**23  # that are in memory at once, of all samples and heads of a batch
# What sparse attention leaves out, some code takes out of the mask where the name is this one only.
BY_NAME = re.compile(r"_attn_implementation\b.*\"eager\"")


def use_few_queries(model: transformers.PreTrainedModel) -> None:
    """Let a model attend in this way, if it would have all scores in memory, and if its code asks for no name."""
    towers = {type(part).__module__ for part in model.modules() if isinstance(part, transformers.PreTrainedModel)}
    is_eager = model.config.get_text_config()._attn_implementation == "eager" and model._can_set_attn_implementation()
    if is_eager and not any(BY_NAME.search(inspect.getsource(sys.modules[tower])) for tower in towers):
        transformers.AttentionInterface.register(FEW_QUERIES, _attend)
        transformers.AttentionMaskInterface.register(FEW_QUERIES, eager_mask)
        model.set_attn_implementation(FEW_QUERIES)


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **settings: Any
) -> tuple[torch.Tensor, None]:
    """The features [B, S, heads, D] of the queries [B, heads, S, D], and no scores."""
    eager = inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"]  # also one that is inherited
    step = max(1, SCORES // (query.shape[:2].numel() * key.shape[2]))
    if any(isinstance(given, torch.Tensor) and given.ndim > 2 for given in settings.values()):
        step = query.shape[2]  # perhaps a bias of all pairs
    features = []
    for start in range(0, query.shape[2], step):
        mask = attention_mask if attention_mask is None else attention_mask[..., start : start + step, :]
        features.append(eager(module, query[:, :, start : start + step], key, value, mask, **settings)[0])
    return torch.cat(features, 1), None
