"""Solve a recipe's feature merge into a folder of finished layers, from which mergekit reads the tensors."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from tqdm import tqdm

from mergekit_slta.engine.batches import Tasks, share
from mergekit_slta.engine.partial import Partial, run_of
from mergekit_slta.errors import SltaError
from mergekit_slta.featcal.anchor import ActmatAnchor
from mergekit_slta.featcal.answers import token_weights
from mergekit_slta.featcal.merge import ERRORS, feature_merge, layer_shapes, stages, written_in
from mergekit_slta.featcal.solvable import require_solvable
from mergekit_slta.files import digest
from mergekit_slta.layers.blend import Blend
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.ends import output_head
from mergekit_slta.layers.trace import on_device
from mergekit_slta.models.layout import Layout
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import require_calibration
from mergekit_slta.recipe.settings import ActmatSettings, FeatcalSettings
from mergekit_slta.slta.matching import fingerprint, local_identity

LOG = logging.getLogger(__name__)

FORMAT = 15  # changes with the folder's content and with the way that layers are solved


class SolvedModel:
    """The tensors of a finished feature merge.

    Args:
        decoder: the model's decoder.
        partial: the folder with the solved layers.
        layout: how the base model's checkpoint cuts the model into tensors; by default as the model itself.
    """

    def __init__(self, decoder: Decoder, partial: Partial, layout: Layout | None = None) -> None:
        self.decoder = decoder
        self.layout = layout or Layout(decoder.model, decoder.tensor_names)
        self._partial = partial

    def tensor(self, name: str) -> torch.Tensor | None:
        """A float32 tensor by its name in mergekit's plan; None for the anchor's tensors outside the layers."""
        piece = self.layout.pieces.get(name)
        if piece is None:
            return None
        with contextlib.ExitStack() as opened:
            first = self.decoder.first_names
            names = [first.get(target, target) for target in piece.targets]
            files = {own: opened.enter_context(safe_open(self._file(own), "pt")) for own in names}
            if any(own not in files[own].keys() for own in names):  # noqa: SIM118
                return None

            def solved(target: str, expert: int | None) -> torch.Tensor:
                target = first.get(target, target)
                return files[target].get_tensor(target) if expert is None else files[target].get_slice(target)[expert]

            return self.layout.restore(name, solved)

    def _file(self, target: str) -> Path:
        layer = written_in(self.decoder).get(target)
        return self._partial.edges_file if layer is None else self._partial.layer_file(layer)

    def is_language(self, name: str) -> bool:
        """Whether a tensor of mergekit's plan is the language model's, and the model runs it."""
        piece = self.layout.pieces.get(name)
        return piece is not None and self.decoder.language_tensors.issuperset(piece.targets)

    def errors(self) -> dict[str, torch.Tensor]:
        """The errors [layers, tasks] of the merged model's and the anchor's layer outputs on each task.

        An error is the mean over the task's tokens of |h - h_t| / |h_t|, where h_t is the task's own model's. The
        anchor's errors are measured only for a report.
        """
        found: dict[str, list[torch.Tensor]] = {name: [] for name in ERRORS.values()}
        for layer in range(len(self.decoder)):
            with safe_open(self._partial.layer_file(layer), "pt") as tensors:
                for name in set(found) & set(tensors.keys()):
                    found[name].append(tensors.get_tensor(name))
        return {name: torch.stack(errors) for name, errors in found.items() if errors}


def solve_model(experiment: Experiment, settings: FeatcalSettings, partial: Partial) -> SolvedModel:
    """Solve a recipe's feature merge into a folder that this process holds; go on after the layers that lie there.

    Raises:
        SltaError: something about models or data is wrong, or memory does not suffice.
    """
    require_calibration(experiment.recipe)
    require_solvable(experiment)
    decoder = on_device(experiment.decoder, experiment.device)
    data = experiment.load_data(experiment.recipe.tasks)
    tasks = [samples.token_ids for samples in data]
    weights = token_weights(data)
    content = local_identity(experiment, fingerprint(experiment, data))
    asked = settings.model_dump(include={"ridge", "anchor", "head"})
    asked |= {"compare": bool(settings.report), "format": FORMAT}
    asked |= {"keep_weight": experiment.recipe.keep_weight} if experiment.recipe.keep else {}
    asked |= {"anchor_settings": ActmatSettings().model_dump()} if settings.anchor == "actmat" else {}
    content |= asked | {"weights": digest([row.tolist() for row in weights])}
    partial.begin(content, experiment.ranks, replace=True)
    complete = partial.is_complete([layer_shapes(decoder, layer) for layer in range(len(decoder))])
    experiment.ranks.require_equal(complete, partial.folder)
    if not complete:
        _solve(experiment, settings, decoder, tasks, weights, partial)
    return SolvedModel(decoder, partial, experiment.layout)


def _solve(
    experiment: Experiment,
    settings: FeatcalSettings,
    decoder: Decoder,
    tasks: Tasks,
    weights: Sequence[torch.Tensor],
    partial: Partial,
) -> None:
    head = settings.head and output_head(decoder) is not None
    experiment.check_edges(experts=head or settings.averages_edges)
    if settings.head and not head:
        LOG.warning("The output head is tied to the embedding, so 'head' is off and the head stays the anchor's.")
    anchor = _anchor(experiment, settings, decoder)
    total = stages(decoder, settings.head) * share(decoder, tasks, settings.batch_tokens, experiment.ranks)
    with tqdm(total=total, desc="Solving", unit="sample", leave=False, disable=experiment.quiet) as bar:

        def progress(stage: str, samples: int) -> None:
            bar.set_description(f"Solving {stage}", refresh=False)
            bar.update(samples)

        feature_merge(
            decoder,
            anchor,
            experiment.experts,
            tasks,
            partial,
            keep_weight=experiment.recipe.keep_weight,
            weights=weights,
            ridge=None if settings.ridge == "auto" else settings.ridge,
            head=settings.head,
            compare=bool(settings.report),
            batch_tokens=settings.batch_tokens,
            ranks=experiment.ranks,
            progress=progress,
        )


def _anchor(experiment: Experiment, settings: FeatcalSettings, decoder: Decoder) -> Blend:
    models = [experiment.base, *experiment.experts]
    if settings.anchor != "actmat":
        return Blend(models)
    return ActmatAnchor(models, decoder, experiment.recipe.keep_weight)


def resumable_bytes(partial: Path, experts: Sequence[str | None]) -> int:
    """The bytes of the layers in a folder that a merge of these experts, by their fingerprints, can resume."""
    with contextlib.suppress(OSError, SltaError):  # another process may finish it meanwhile
        run = run_of(partial)
        if run is not None and (run.get("format"), run.get("experts")) == (FORMAT, list(experts)):
            return sum(layer.stat().st_size for layer in partial.glob("*.safetensors"))
    return 0
