"""The merge method ``slta``: Submodule Linearity for Task Arithmetic (arXiv 2504.10902)."""

from __future__ import annotations

import torch
from mergekit.merge_methods import TensorGroup

from mergekit_slta.errors import logger
from mergekit_slta.host.base import CalibratedMethod, method_spec, write_report
from mergekit_slta.layers.blend import weighted_sum
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.settings import SltaSettings
from mergekit_slta.slta.measure import measured_statistics
from mergekit_slta.slta.statistics import PUBLISHED_PREFIX
from mergekit_slta.slta.weights import TensorWeights

LOG = logger(__name__)


class SltaMethod(CalibratedMethod):
    """Merging weights in closed form, one for each submodule and expert."""

    settings = SltaSettings
    in_words = (
        "every submodule gets one merging weight for each expert, solved in closed form from a few samples of each "
        "expert's task."
    )
    spec = method_spec(SltaSettings, "SLTA", "2504.10902")

    def compute(self, experiment: Experiment) -> TensorWeights:
        """Measure the models unless the statistics exist, and solve for the merging weights of every tensor."""
        settings = experiment.recipe.settings_of(SltaSettings)
        experiment.check_edges(experts=settings.edges == "mean" or settings.level == "model")
        statistics = measured_statistics(experiment)
        solution = statistics.solve(settings.level, balance=settings.balance, ridge=settings.ridge)
        self.solution = solution
        for note in solution.notes():
            LOG.warning("%s", note)
        if settings.report:
            from mergekit_slta.reports.merge import report_page  # imports matplotlib, which takes a second

            write_report(settings.report, "report.html", report_page(solution))
        decoder = experiment.decoder.to("cpu")
        return TensorWeights(decoder, settings.level, solution.submodules, settings.edges, settings.towers)

    def merge_tensor(self, group: TensorGroup, result: TensorWeights, experiment: Experiment) -> torch.Tensor:
        """The base model's tensor plus the weighted task vectors."""
        alpha = result[group.metadata.name]
        position = {expert.reference: index for index, expert in enumerate(experiment.recipe.experts)}
        experts = [(entry.tensor, alpha[position[entry.id]]) for entry in group.non_base]
        return weighted_sum(group.base.tensor, experts)

    def forget(self) -> None:
        """Another merge begins."""
        super().forget()
        self.solution = None

    def share(self, experiment: Experiment) -> None:
        """Measure with all processes, unless a published file is used."""
        if not experiment.recipe.settings_of(SltaSettings).statistics.startswith(PUBLISHED_PREFIX):
            measured_statistics(experiment)
