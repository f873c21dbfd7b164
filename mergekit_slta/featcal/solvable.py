"""Whether a feature merge can be solved, known before it begins."""

from __future__ import annotations

from mergekit_slta.errors import SltaError, refuse
from mergekit_slta.featcal.groups import groups_by_layer
from mergekit_slta.layers.ends import output_head
from mergekit_slta.models.headers import other_vocabularies
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.settings import FeatcalSettings


def require_solvable(experiment: Experiment) -> None:
    """Refuse a feature merge of layers, of an output head or of vocabularies that cannot be solved.

    Raises:
        SltaError: the layers cannot be run one at a time; the logits need more than the last layer's output;
            vocabularies differ in size; or mergekit changes the rows of a head that is to be solved.
    """
    decoder, settings = experiment.decoder, experiment.recipe.settings_of(FeatcalSettings)
    groups_by_layer(decoder)
    solves_head = settings.head and output_head(decoder) is not None
    if solves_head and (problem := decoder.tail_problem):
        raise SltaError(problem)
    aligned = experiment.recipe.tokenizer_source is not None
    if solves_head or settings.averages_edges:
        fix = "set 'anchor: base'" if settings.averages_edges else "set 'head: false'"
        refuse(f"The {other}: {fix}." for other in other_vocabularies(experiment.pairs))
    if solves_head and aligned and _changes_rows(experiment):
        raise SltaError(
            "mergekit changes the rows of the output head to those of the recipe's 'tokenizer': set 'head: false', or "
            "leave 'tokenizer' and 'tokenizer_source' out."
        )


def _changes_rows(experiment: Experiment) -> bool:
    """Whether mergekit changes the rows of the models' embeddings."""
    recipe, made = experiment.recipe, experiment.recipe.config.tokenizer
    if recipe.tokenizer_source != "base" or (made and (made.tokens or made.pad_to_multiple_of)):
        return True
    return len(experiment.tokenizer(recipe.base)) != experiment.model(recipe.base).vocabulary
