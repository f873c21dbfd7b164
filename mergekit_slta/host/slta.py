"""The merge method ``slta``: Submodule Linearity for Task Arithmetic (arXiv 2504.10902)."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from mergekit.merge_methods import TensorGroup

from mergekit_slta.engine.partial import Partial
from mergekit_slta.files import STATISTICS_OF_MERGE
from mergekit_slta.host.method import Merge, method_spec, write_report
from mergekit_slta.layers.blend import weighted_sum
from mergekit_slta.recipe.settings import SltaSettings
from mergekit_slta.slta.lookup import solved, statistics_of_merge
from mergekit_slta.slta.weights import TensorWeights
from mergekit_slta.tables import as_percentage, short_names

LOG = logging.getLogger(__name__)


class SltaMerge(Merge):
    """Merging weights in closed form, one for each submodule and expert."""

    spec = method_spec(SltaSettings, "SLTA", "2504.10902")
    _weights: TensorWeights | None = None

    def prepare(self, out: Path, partial: Partial) -> None:
        """Measure the models unless the statistics exist, and solve for the merging weights of every tensor."""
        experiment = self.opened
        settings = experiment.recipe.settings_of(SltaSettings)
        experiment.ranks.together(lambda: experiment.check_edges(experts=settings.level == "model"))
        statistics = statistics_of_merge(experiment, out / STATISTICS_OF_MERGE, partial)
        self.solution, self._weights = solved(experiment, statistics)
        for note in self.solution.notes():
            LOG.warning("%s", note)
        shares = zip(short_names(self.solution.models), self.solution.kept.tolist(), strict=True)
        said = [f"{name} {as_percentage(share)}" for name, share in shares]
        said += [f"the base model on its prompts {as_percentage(self.solution.base_kept)}"] * self.solution.keeps_base
        self.kept = f"Kept of each expert's change of the features: {', '.join(said)}."
        if settings.report and experiment.ranks.first:
            from mergekit_slta.reports.merge import report_page  # imports matplotlib, which takes a second

            self.page = write_report(settings.report, "report.html", report_page(self.solution))
        self._position = {expert.reference: index for index, expert in enumerate(experiment.recipe.experts)}

    def tensor(self, group: TensorGroup, **parameters: object) -> torch.Tensor:
        """The base model's tensor plus the weighted task vectors."""
        assert self.opened and self._weights is not None and group.base is not None and group.metadata.name
        alpha = self._weights[group.metadata.name]
        experts = [(entry.tensor, alpha[self._position[entry.id]]) for entry in group.non_base]
        return weighted_sum(group.base.tensor, experts)
