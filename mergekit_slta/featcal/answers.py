"""The weights of calibration tokens: answers count more than what they answer.

A merged model is used for what it answers, while the tokens of prompts are often many and alike: a system prompt is the
same in every sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mergekit_slta.data.draw import CalibrationData

ANSWER_WEIGHT = 8.0  # of a token that belongs to an answer; all others have 1


def token_weights(data: Sequence[CalibrationData]) -> list[torch.Tensor]:
    """The weights [S] of the tokens of every sample of every task, in their order.

    A token belongs to an answer if the next token of the answer is predicted from it, or if it is the answer's last.
    """
    weights = []
    for task in data:
        for row, answer in zip(task.token_ids, task.answers, strict=True):
            weights.append(torch.ones(len(row)))
            if answer:
                weights[-1][answer[0] - 1 : answer[1]] = ANSWER_WEIGHT
    return weights
