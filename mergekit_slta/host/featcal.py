"""The merge method ``featcal``: every linear map by least squares on the experts' features (arXiv 2605.13030)."""

from __future__ import annotations

from pathlib import Path

import torch
from mergekit.merge_methods import TensorGroup

from mergekit_slta.errors import SltaError
from mergekit_slta.featcal.layer import MERGED
from mergekit_slta.featcal.merge import ANCHOR, ERRORS
from mergekit_slta.featcal.scratch import SolvedModel, solve_model
from mergekit_slta.host.base import CalibratedMethod, method_spec, write_report
from mergekit_slta.layers.blend import weighted_sum
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import published_name
from mergekit_slta.recipe.settings import FeatcalSettings


class FeatcalMethod(CalibratedMethod):
    """Solve each layer's linear maps so that their outputs are nearest to the experts'; after RegMean++ and FeatCal."""

    settings = FeatcalSettings
    in_words = (
        "every linear map is solved by least squares, layer by layer, so that its outputs are near those of each "
        "expert on a few samples of the expert's task."
    )
    spec = method_spec(FeatcalSettings, "FeatCal", "2605.13030")

    def compute(self, experiment: Experiment) -> SolvedModel:
        """Solve the merged model's tensors into the scratch folder."""
        settings = experiment.recipe.settings_of(FeatcalSettings)
        solved = solve_model(experiment, settings)
        if settings.report:
            from mergekit_slta.reports.featcal import drift_page  # imports matplotlib, which takes a second

            errors = solved.errors()
            models = [published_name(expert.reference) for expert in experiment.recipe.experts]
            merged, anchor = errors[ERRORS[MERGED]], errors[ERRORS[ANCHOR]]
            page = drift_page(merged, anchor, models, settings, solved.routing())
            try:
                write_report(settings.report, "featcal.html", page)
            except SltaError:
                solved.release()
                raise
        return solved

    def merge_tensor(self, group: TensorGroup, result: SolvedModel, experiment: Experiment) -> torch.Tensor:
        """Return the solved tensor; outside the layers, the base model's or the experts' average."""
        base, name = group.base.tensor, group.metadata.name
        tensor = result.tensor(name)
        if tensor is not None:
            return tensor.to(base.device, base.dtype)
        settings = experiment.recipe.settings_of(FeatcalSettings)
        if not (settings.averages_edges if result.is_language(name) else settings.towers == "mean"):
            return base
        equal = torch.tensor(1 / len(group.non_base))
        return weighted_sum(base, [(entry.tensor, equal) for entry in group.non_base])

    def share(self, experiment: Experiment) -> None:
        """Solve with all processes."""
        solve_model(experiment, experiment.recipe.settings_of(FeatcalSettings)).release()

    def forget(self) -> None:
        """Drop the previous merge; its scratch folder stays, so that the same merge can be resumed."""
        if self._result is not None:
            self._result.release()
        super().forget()

    def written(self, folder: Path, weights: str) -> None:
        """Delete the scratch folder."""
        super().written(folder, weights)
        if self._result is not None:
            self._result.remove()
            self._result = None
