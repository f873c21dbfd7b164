"""The merge methods as mergekit runs them, and their registration."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from mergekit import merge_methods
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.merge_methods import InputContract, MergeMethodSpec, TensorGroup
from mergekit.merge_methods.base import BasePolicy, ParameterScope
from mergekit.options import MergeOptions

from mergekit_slta.errors import SltaError
from mergekit_slta.featcal.layer import MERGED
from mergekit_slta.featcal.merge import ANCHOR, ERRORS
from mergekit_slta.featcal.scratch import SolvedModel, solve_model
from mergekit_slta.layers.blend import weighted_sum
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.methods.actmat import ActmatMethod
from mergekit_slta.methods.base import CheckedMethod
from mergekit_slta.methods.sftm import SftmMethod
from mergekit_slta.models.headers import listed
from mergekit_slta.models.merged_adapters import current_loader, merge_adapter
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import (
    EDGES_AVERAGED,
    CalibrationSettings,
    Expert,
    ExpertSettings,
    FeatcalSettings,
    Recipe,
    SltaSettings,
    from_config,
    parameter_specs,
)
from mergekit_slta.slta.measure import measured_statistics
from mergekit_slta.slta.solution import Solution
from mergekit_slta.slta.statistics import PUBLISHED_PREFIX, published_name, resolve_statistics
from mergekit_slta.slta.weights import TensorWeights

if TYPE_CHECKING:
    from mergekit_slta.reports.page import Page

LOG = logging.getLogger(__name__)

NOT_A_FOLDER = (
    "'{method}' measures whole models, so it runs in mergekit-yaml on model folders or Hub ids; "
    "mergekit-pytorch and tensor-level calls name checkpoint files or tensors only."
)


@dataclass
class _Merge:
    """One merge in progress: what was known when it was planned, and what its calibration gave."""

    references: tuple[ModelReference, ...]
    base: ModelReference
    trust_remote_code: bool
    cache_dir: str | None
    quiet: bool
    experts: tuple[Expert, ...] = ()  # by the whole recipe, where it is known
    parameters: dict[str, Any] | None = None
    result: Any = None
    failure: Exception | None = None

    def experiment(self, settings: CalibrationSettings, device: str) -> Experiment:
        """The merge's models and data.

        Raises:
            SltaError: the first tensor is an optional one that an expert lacks, and nothing else tells its parameters.
        """
        given = self.parameters or {}
        seen = [Expert(model, source, given["template"][model]) for model, source in given["calibration"].items()]
        known = {expert.reference: expert for expert in (*self.experts, *seen)}
        if unknown := [str(model) for model in self.references if model not in known]:
            raise SltaError(
                f"mergekit begins with a tensor that {listed(unknown)} lacks, so that the parameters are not known: "
                "merge with 'mergekit-slta merge', which reads the whole recipe."
            )
        experts = tuple(known[model] for model in self.references)
        return Experiment(
            Recipe(self.base, experts, settings),
            device=device,
            trust_remote_code=self.trust_remote_code,
            cache_dir=self.cache_dir,
            quiet=self.quiet,
        )


class CalibratedMethod(CheckedMethod):
    """A merge method that looks at whole models and their tasks' data before it merges the first tensor.

    mergekit plans a merge on its main thread and executes it tensor by tensor, perhaps on several threads. What a
    method computes from the whole, its result, is computed once, when the first tensor is asked for, and whoever asks
    meanwhile waits for it.
    """

    spec: MergeMethodSpec
    settings: type[CalibrationSettings]

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._merge: _Merge | None = None
        self._options: MergeOptions | None = None
        self._experts: tuple[Expert, ...] = ()

    def compute(self, experiment: Experiment, settings: Any) -> Any:
        """What every tensor of the merge is made from."""
        raise NotImplementedError

    def merge_tensor(self, group: TensorGroup, merge: _Merge) -> torch.Tensor:
        """Merge one tensor, when the result is there."""
        raise NotImplementedError

    def begin(self, config: MergeConfiguration, options: MergeOptions) -> None:
        """Note the options too, and see the whole recipe."""
        self._options = options
        super().begin(config, options)
        self._experts = from_config(config).experts

    def forget(self) -> None:
        """Another merge begins."""
        self._merge = None

    def written(self) -> None:
        """mergekit has written the whole output."""

    def validate_inputs(
        self, input_ids: Sequence[Hashable], base_id: Hashable | None = None, *, group_name: str | None = None
    ) -> None:
        """Check the inputs' structure; at the first slice, forget the previous merge and note the loader's settings."""
        if group_name is None or not all(isinstance(model, ModelReference) for model in input_ids):
            raise SltaError(NOT_A_FOLDER.format(method=self.spec.name))
        super().validate_inputs(input_ids, base_id, group_name=group_name)
        if group_name.endswith(".slices[0]"):
            self._merge = self._planned(input_ids, base_id)
        elif ".slices[" in group_name:
            raise SltaError(f"'{self.spec.name}' merges whole models, not slices: list the experts under 'models'.")

    def _planned(self, input_ids: Sequence[Any], base: Any) -> _Merge:
        loaders = LoaderCache()
        options, self._options = self._options, None
        experts, self._experts = self._experts, ()
        return _Merge(
            references=tuple(model for model in input_ids if model != base),
            base=base,
            trust_remote_code=loaders.trust_remote_code,
            cache_dir=loaders.hf_cache_dir,
            quiet=options.quiet if options else False,
            experts=experts,
        )

    def merge(self, group: TensorGroup, **parameters: Any) -> torch.Tensor:
        """Merge one tensor; the first one waits for the result."""
        merge, base = self._merge, group.base
        if merge is None or base is None or group.metadata.name is None:
            raise SltaError(NOT_A_FOLDER.format(method=self.spec.name))
        with self._lock:
            self._refuse_changing(merge, parameters)
            if merge.failure is not None:
                raise merge.failure
            if merge.result is None:
                try:
                    merge.result = self._compute(merge, parameters, str(base.tensor.device))
                except Exception as error:
                    merge.failure = error
                    raise
        return self.merge_tensor(group, merge)

    def _compute(self, merge: _Merge, parameters: dict[str, Any], device: str) -> Any:
        settings = self.settings.model_validate({name: parameters[name] for name in self.settings.model_fields})
        return self.compute(merge.experiment(settings, device), settings)

    def _refuse_changing(self, merge: _Merge, parameters: dict[str, Any]) -> None:
        """Every tensor must be merged under the same parameters; optional tensors may lack some experts."""
        known = merge.parameters
        if known is None:
            merge.parameters = dict(parameters)
            return
        for parameter in self.spec.parameters:
            new, old = parameters[parameter.name], known[parameter.name]
            if parameter.scope == ParameterScope.SHARED:
                changed = new != old
            else:
                changed = any(new[expert] != old.get(expert, new[expert]) for expert in new)
                known[parameter.name] = {**old, **new}
            if changed:
                raise SltaError(
                    f"'{parameter.name}' changes between tensors: '{self.spec.name}' needs one value for the whole "
                    "merge, not a list or a filter."
                )


def _spec(name: str, pretty_name: str, paper: str, settings: type[CalibrationSettings]) -> MergeMethodSpec:
    return MergeMethodSpec(
        name=name,
        parameters=parameter_specs(settings, ExpertSettings),
        contract=InputContract(base=BasePolicy.REQUIRED, min_non_base=1),
        pretty_name=pretty_name,
        reference_url=paper,
    )


class SltaMethod(CalibratedMethod):
    """Submodule Linearity for Task Arithmetic (arXiv 2504.10902): merging weights in closed form per submodule."""

    settings = SltaSettings
    spec = _spec("slta", "SLTA", "https://arxiv.org/abs/2504.10902", SltaSettings)

    def compute(self, experiment: Experiment, settings: SltaSettings) -> TensorWeights:
        """The merging weights of every tensor."""
        return solve_weights(experiment, settings)

    def merge_tensor(self, group: TensorGroup, merge: _Merge) -> torch.Tensor:
        """The base model's tensor plus the weighted task vectors."""
        alpha = merge.result[group.metadata.name]
        position = {reference: index for index, reference in enumerate(merge.references)}
        experts = [(entry.tensor, alpha[position[entry.id]]) for entry in group.non_base]
        return weighted_sum(group.base.tensor, experts)


class FeatcalMethod(CalibratedMethod):
    """Every linear map by least squares on the features of the experts (after RegMean++ and FeatCal)."""

    settings = FeatcalSettings
    spec = _spec("featcal", "FeatCal", "https://arxiv.org/abs/2605.13030", FeatcalSettings)

    def compute(self, experiment: Experiment, settings: FeatcalSettings) -> SolvedModel:
        """The merged model's tensors, in the scratch folder."""
        solved = solve_model(experiment, settings)
        if settings.report:
            try:
                _report(settings.report, lambda: _drift_page(solved, experiment, settings))
            except SltaError:
                solved.release()
                raise
        return solved

    def merge_tensor(self, group: TensorGroup, merge: _Merge) -> torch.Tensor:
        """The solved tensor, or the anchor's."""
        base = group.base.tensor
        tensor = merge.result.tensor(group.metadata.name)
        if tensor is not None:
            return tensor.to(base.device, base.dtype)
        if merge.result.anchor not in EDGES_AVERAGED:
            return base
        equal = torch.tensor(1 / len(group.non_base))
        return weighted_sum(base, [(entry.tensor, equal) for entry in group.non_base])

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


def solve_weights(experiment: Experiment, settings: SltaSettings) -> TensorWeights:
    """Measure what is not measured yet, and solve for the merging weights of every tensor."""
    decoder = Decoder(experiment.base.config, experiment.trust_remote_code)
    experiment.check_edges(decoder, experts=settings.edges == "mean" or settings.level == "model")
    path = resolve_statistics(settings.statistics, experiment.cache_dir) if settings.statistics else None
    published = settings.statistics.startswith(PUBLISHED_PREFIX)
    statistics = measured_statistics(experiment, [settings.level], path, published=published)
    solution = statistics.solve(settings.level, balance=settings.balance, ridge=settings.ridge)
    for note in solution.notes():
        LOG.warning("%s", note)
    if settings.report:
        _report(settings.report, lambda: _report_page(solution))
    return TensorWeights(decoder, settings.level, solution.submodules, settings.edges)


def _report(folder: str, make: Callable[[], Page]) -> None:
    """Write a report; the pictures are drawn by matplotlib, whose second of import other merges are spared."""
    try:
        path = make().write(Path(folder).expanduser(), "report.html")
    except OSError as error:
        raise SltaError(f"The report cannot be written to {folder} ({error}): name another folder.") from error
    LOG.info("Report written to %s", path)


def _report_page(solution: Solution) -> Page:
    from mergekit_slta.reports.merge import report_page

    return report_page(solution)


def _drift_page(solved: SolvedModel, experiment: Experiment, settings: FeatcalSettings) -> Page:
    from mergekit_slta.reports.featcal import drift_page

    errors = solved.errors()
    models = [published_name(expert.reference) for expert in experiment.recipe.experts]
    return drift_page(errors[ERRORS[MERGED]], errors[ERRORS[ANCHOR]], models, settings)


WATCHED = "_watched_by_mergekit_slta"  # the mark of a planner that shows the methods its recipe
METHODS = (SltaMethod(), FeatcalMethod(), ActmatMethod(), SftmMethod())


def register() -> None:
    """Make the merge methods known to mergekit; a second call changes nothing."""
    known = {method.spec.name for method in merge_methods.registered_methods()}
    for method in METHODS:
        if method.spec.name not in known:
            merge_methods.register(method)


def watch_planner() -> None:
    """Register, show the methods the whole recipe, which mergekit does not, and have adapters merged by content.

    A second call changes nothing.
    """
    from mergekit.io.tasks import FinalizeModel
    from mergekit.plan import MergePlanner

    register()
    ModelReference.merged = merge_adapter
    plan = MergePlanner.__init__
    if hasattr(plan, WATCHED):
        return

    @functools.wraps(plan)
    def init(
        self: MergePlanner, config: MergeConfiguration, arch_info: Any, options: MergeOptions, *rest: Any, **more: Any
    ) -> None:
        for model in config.referenced_models() & LoaderCache.loaders.keys():
            current_loader(model)  # an adapter may have changed since mergekit loaded it for an earlier merge
        for method in METHODS:
            if isinstance(method, CalibratedMethod):
                method.forget()
            if method.spec.name == config.merge_method:
                method.begin(config, options)
        plan(self, config, arch_info, options, *rest, **more)

    setattr(init, WATCHED, True)
    MergePlanner.__init__ = init
    finalize = FinalizeModel.execute

    @functools.wraps(finalize)
    def execute(self: FinalizeModel, *arguments: Any, **more: Any) -> None:
        finalize(self, *arguments, **more)
        for method in METHODS:
            if isinstance(method, CalibratedMethod):
                method.written()

    FinalizeModel.execute = execute
