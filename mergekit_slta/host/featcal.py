"""The merge method ``featcal``: every linear map by least squares on the experts' features (arXiv 2605.13030)."""

from __future__ import annotations

from pathlib import Path

import torch
from mergekit.merge_methods import TensorGroup

from mergekit_slta.engine.partial import Partial
from mergekit_slta.featcal.solved import SolvedModel, solve_model
from mergekit_slta.host.method import Merge, method_spec, write_report
from mergekit_slta.layers.blend import weighted_sum
from mergekit_slta.recipe.recipe import published_name
from mergekit_slta.recipe.settings import FeatcalSettings
from mergekit_slta.tables import as_percentage, short_names


class FeatcalMerge(Merge):
    """Solve each layer's linear maps so that their outputs are nearest to the experts'; after RegMean++ and FeatCal."""

    spec = method_spec(FeatcalSettings, "FeatCal", "2605.13030")
    _solved: SolvedModel | None = None

    def prepare(self, out: Path, partial: Partial) -> None:
        """Solve the merged model's tensors into the folder of finished layers."""
        experiment = self.opened
        settings = experiment.recipe.settings_of(FeatcalSettings)
        solved = solve_model(experiment, settings, partial)
        (errors, ridges), recipe = solved.measured(), experiment.recipe
        names = [*short_names([published_name(own.reference) for own in recipe.experts]), "the base model"]
        last = zip(names, errors[-1].tolist(), strict=False)
        self.kept = "Distance of the merge's features from each model's own after the last layer, on its prompts (0% "
        self.kept += "is the model itself, lower is better): "
        self.kept += ", ".join(f"{name} {as_percentage(error)}" for name, error in last) + "."
        if settings.report and experiment.ranks.first:
            from mergekit_slta.reports.featcal import drift_page  # imports matplotlib, which takes a second

            models = [published_name(task.reference) for task in experiment.recipe.tasks]
            self.page = write_report(settings.report, "featcal.html", drift_page(errors, ridges, models, settings))
        self._solved = solved

    def tensor(self, group: TensorGroup, **parameters: object) -> torch.Tensor:
        """Return the solved tensor; outside the layers, the base model's or the experts' average."""
        experiment = self.opened
        assert self._solved is not None and group.base is not None and group.metadata.name
        base, name = group.base.tensor, group.metadata.name
        tensor = self._solved.tensor(name)
        if tensor is not None:
            return tensor.to(base.device, base.dtype)
        if not self._solved.is_language(name):
            return base
        equal = torch.tensor(1 / (len(group.non_base) + experiment.recipe.keep_weight))
        return weighted_sum(base, [(entry.tensor, equal) for entry in group.non_base])
