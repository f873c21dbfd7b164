"""A recipe's feature merge: its start ``solve_model``, which calls ``merge.py``, and its end ``SolvedModel.tensor``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import torch
from safetensors import safe_open

from mergekit_slta.data.sources import CalibrationData
from mergekit_slta.engine.loop import pass_layers
from mergekit_slta.engine.partial import Partial
from mergekit_slta.featcal.anchor import ActmatAnchor
from mergekit_slta.featcal.merge import LAYER_ERRORS, FeatureMerge
from mergekit_slta.files import digest
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.maps import LinearMap
from mergekit_slta.layers.trace import on_device, tail_problem
from mergekit_slta.models.layout import Layout
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.settings import FeatcalSettings

LOG = logging.getLogger(__name__)

# Of a token that belongs to an answer; all others have 1. A merged model is used for what it answers, while the tokens
# of prompts are often many and alike: a system prompt is the same in every sample.
ANSWER_WEIGHT = 8.0


def solve_model(experiment: Experiment, settings: FeatcalSettings, partial: Partial) -> SolvedModel:
    """Solve a recipe's feature merge into a folder that this process holds; go on after the layers that lie there."""
    decoder, ranks = on_device(experiment.decoder, experiment.device), experiment.ranks
    data = experiment.load_data(experiment.recipe.tasks)
    weights, head = token_weights(data), head_to_solve(experiment)
    identity = experiment.identity(
        data,
        weights=digest([row.tolist() for row in weights]),
        keep_weight=experiment.recipe.keep_weight,
        ridge=settings.ridge,
        head=head is not None,
    )
    partial.begin(identity, ranks, replace=True, quiet=experiment.quiet)
    complete = partial.finished(len(decoder)) == {*range(len(decoder)), None}  # with the output head's file
    ranks.require_equal(complete, partial.folder)
    if not complete:
        with ranks.one_refusal():
            experiment.check_edges(experts=True)
        models, token_ids = experiment.checkpoints, [samples.token_ids for samples in data]
        anchor = ActmatAnchor(models, decoder, [task.weight for task in experiment.recipe.tasks])
        ridge = None if settings.ridge == "auto" else settings.ridge
        merge = FeatureMerge(decoder, models, token_ids, ranks, anchor, weights, ridge, head=head, partial=partial)
        of_head = pass_layers(merge, "Solving", partial=partial, quiet=experiment.quiet)
        if ranks.first:
            partial.write(None, of_head)
        ranks.wait()
    return SolvedModel(decoder, partial, experiment.layout)


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


def head_to_solve(experiment: Experiment) -> LinearMap | None:
    """The output head, by the model's names; None if it is tied, or if it cannot be solved, which is said."""
    head = experiment.decoder.head
    if head is None:
        return None
    why = "the logits need more than the last layer's output" if tail_problem(experiment.decoder) else ""
    if experiment.recipe.tokenizer_source is not None and _changes_rows(experiment):
        why = "mergekit reorders its rows for the recipe's 'tokenizer'"
    if why:
        LOG.warning("The output head stays the experts' mean, because %s.", why)
    return None if why else head


def _changes_rows(experiment: Experiment) -> bool:
    """Whether mergekit changes the rows of the models' embeddings."""
    recipe, made = experiment.recipe, experiment.recipe.config.tokenizer
    if recipe.tokenizer_source != "base" or (made and (made.tokens or made.pad_to_multiple_of)):
        return True
    return len(experiment.tokenizer(recipe.base)) != experiment.model(recipe.base).vocabulary


class SolvedModel:
    """The tensors of a finished feature merge, from its folder, as ``layout`` says that the base model stores them."""

    def __init__(self, decoder: Decoder, partial: Partial, layout: Layout) -> None:
        self.decoder, self.layout, self._partial = decoder, layout, partial
        layers = ((layer, decoder.layer_tensors[layer]) for layer in range(len(decoder)))
        self._layers = {name: layer for layer, names in layers for name in names.values()}
        # The names in mergekit's plan of the language model's tensors, if the model runs them.
        language = decoder.language_tensors
        self.language = {stored for stored, piece in layout.pieces.items() if language.issuperset(piece.targets)}

    def tensor(self, stored: str) -> torch.Tensor | None:
        """A float32 tensor by its name in mergekit's plan; None for the anchor's tensors outside the layers."""
        piece = self.layout.pieces.get(stored)
        if piece is None:
            return None
        with contextlib.ExitStack() as opened:
            first = self.decoder.first_names
            names = [first.get(target, target) for target in piece.targets]
            files = {
                target: opened.enter_context(safe_open(self._partial.file(self._layers.get(target)), "pt"))
                for target in names
            }
            if any(target not in files[target].keys() for target in names):  # noqa: SIM118
                return None

            def solved(target: str, mixture_expert: int | None) -> torch.Tensor:
                target = first.get(target, target)
                if mixture_expert is None:
                    return files[target].get_tensor(target)
                return files[target].get_slice(target)[mixture_expert]

            return self.layout.restore(stored, solved)  # as solved, if the checkpoint stores it as the model has it

    def errors(self) -> torch.Tensor:
        """The errors [layers, tasks] of the merged model's layer outputs.

        An error is the mean over the task's tokens of |h - h_t| / |h_t|, where h_t is the task's own model's.
        """
        errors = []
        for layer in range(len(self.decoder)):
            with safe_open(self._partial.file(layer), "pt") as tensors:
                errors.append(tensors.get_tensor(LAYER_ERRORS))
        return torch.stack(errors)
