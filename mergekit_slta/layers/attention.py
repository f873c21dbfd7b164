"""A model's own attention for a few queries at a time, where torch's does not apply: scores are capped, or have a sink.

The model's code for it, ``eager_attention_forward``, makes the scores of all pairs of tokens several times, and returns
them: 2 GB each for 8 heads and 8,192 tokens. ``few_queries`` of ``decoder.py`` has ``attend`` called instead.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

SCORES = 2**23  # that are in memory at once, of all samples and heads of a batch


def attend(
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
