"""The weights of calibration tokens: answers count more than what they answer.

A merged model is used for what it answers, and the tokens of a prompt are often many and alike: a system prompt is the
same in every sample. So the answers' tokens get a weight by which they make up a given share of their samples' weight;
tokens of samples whose answer is not known, and all others, have the weight 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mergekit_slta.data.draw import CalibrationData

# The share of the answers' tokens in the weight of the samples whose answers are known.
ANSWER_SHARE = 0.85


def token_weights(data: Sequence[CalibrationData]) -> list[torch.Tensor]:
    """The weights [S] of the tokens of every sample of every task, in their order.

    A token whose output is the answer's next token belongs to the answer: it begins with the last token before it.
    """
    return [weights for task in data for weights in _task_weights(task)]


def _task_weights(data: CalibrationData) -> list[torch.Tensor]:
    weights = [torch.ones(len(row)) for row in data.token_ids]
    found = [
        (row, slice(answer[0] - 1, answer[1])) for row, answer in zip(weights, data.answers, strict=True) if answer
    ]
    answers, whole = (sum(len(row[part]) for row, part in found), sum(len(row) for row, _ in found))
    if whole:
        weight = max(1.0, ANSWER_SHARE / (1 - ANSWER_SHARE) * (whole - answers) / answers)
        for row, part in found:
            row[part] = weight
    return weights
