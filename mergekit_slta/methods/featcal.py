"""The merge method ``featcal``: every linear map by least squares on the experts' features (arXiv 2605.13030)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from mergekit.merge_methods import TensorGroup

from mergekit_slta.errors import SltaError
from mergekit_slta.featcal.layer import MERGED
from mergekit_slta.featcal.merge import ANCHOR, ERRORS
from mergekit_slta.featcal.scratch import SolvedModel, solve_model
from mergekit_slta.layers.blend import weighted_sum
from mergekit_slta.methods.base import CalibratedMethod, Merge, method_spec, write_report
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import published_name
from mergekit_slta.recipe.settings import FeatcalSettings

if TYPE_CHECKING:
    from mergekit_slta.reports.page import Page


class FeatcalMethod(CalibratedMethod):
    """Layer by layer, the maps whose outputs are nearest to the experts' own; after RegMean++ and FeatCal."""

    settings = FeatcalSettings
    spec = method_spec(FeatcalSettings, "FeatCal", "2605.13030")

    def compute(self, experiment: Experiment) -> SolvedModel:
        """The merged model's tensors, in the scratch folder."""
        settings = experiment.recipe.settings_of(FeatcalSettings)
        solved = solve_model(experiment, settings)
        if settings.report:
            try:
                write_report(settings.report, lambda: _drift_page(solved, experiment, settings))
            except SltaError:
                solved.release()
                raise
        return solved

    def merge_tensor(self, group: TensorGroup, merge: Merge) -> torch.Tensor:
        """The solved tensor, or the anchor's."""
        base = group.base.tensor
        tensor = merge.result.tensor(group.metadata.name)
        if tensor is not None:
            return tensor.to(base.device, base.dtype)
        assert merge.experiment is not None
        if not merge.experiment.recipe.settings_of(FeatcalSettings).averages_edges:
            return base
        equal = torch.tensor(1 / len(group.non_base))
        return weighted_sum(base, [(entry.tensor, equal) for entry in group.non_base])

    def share(self, experiment: Experiment) -> None:
        """Solve with all processes."""
        solve_model(experiment, experiment.recipe.settings_of(FeatcalSettings)).release()

    def forget(self) -> None:
        """Another merge begins; what this one has solved stays for whoever starts it again."""
        if self._merge is not None and self._merge.result is not None:
            self._merge.result.release()
        super().forget()

    def written(self) -> None:
        """The scratch folder has served its purpose."""
        if self._merge is not None and self._merge.result is not None:
            self._merge.result.remove()
            self._merge = None


def _drift_page(solved: SolvedModel, experiment: Experiment, settings: FeatcalSettings) -> Page:
    from mergekit_slta.reports.featcal import drift_page

    errors = solved.errors()
    models = [published_name(expert.reference) for expert in experiment.recipe.experts]
    return drift_page(errors[ERRORS[MERGED]], errors[ERRORS[ANCHOR]], models, settings, solved.routing())
