"""The merge methods as mergekit runs them, and their registration."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mergekit import merge_methods
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.merge_methods import GroupMergeMethod, InputContract, MergeMethodSpec, TensorGroup
from mergekit.merge_methods.base import BasePolicy, ParameterScope
from mergekit.options import MergeOptions

from mergekit_slta.decoder import Decoder
from mergekit_slta.errors import SltaError
from mergekit_slta.measure import Experiment
from mergekit_slta.preflight import refuse_problems
from mergekit_slta.recipe import Expert, ExpertSettings, Recipe, SltaSettings, parameter_specs
from mergekit_slta.sftm import SftmMethod
from mergekit_slta.statistics import PUBLISHED_PREFIX, Statistics, resolve_statistics
from mergekit_slta.submodules import TensorWeights

LOG = logging.getLogger(__name__)

NOT_A_FOLDER = (
    "'{method}' measures whole models, so it runs in mergekit-yaml on model folders or Hub ids; "
    "mergekit-pytorch and tensor-level calls name checkpoint files or tensors only."
)


@dataclass
class _Merge:
    """One merge in progress: what was known when it was planned, and what calibration gave."""

    references: tuple[ModelReference, ...]
    base: ModelReference
    trust_remote_code: bool
    cache_dir: str | None
    quiet: bool
    parameters: dict[str, Any] | None = None
    weights: TensorWeights | None = None
    failure: Exception | None = None


class SltaMethod(GroupMergeMethod):
    """Submodule Linearity for Task Arithmetic (arXiv 2504.10902): merging weights in closed form per submodule.

    mergekit plans a merge on its main thread and executes it tensor by tensor, perhaps on several threads. Calibration
    runs once, when the first tensor is asked for, and whoever asks meanwhile waits for it.
    """

    spec = MergeMethodSpec(
        name="slta",
        parameters=parameter_specs(SltaSettings, ExpertSettings),
        contract=InputContract(base=BasePolicy.REQUIRED, min_non_base=1),
        pretty_name="SLTA",
        reference_url="https://arxiv.org/abs/2504.10902",
    )

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._merge: _Merge | None = None
        self._options: MergeOptions | None = None

    def begin(self, config: MergeConfiguration, options: MergeOptions) -> None:
        """See the whole recipe before anything is planned.

        Raises:
            SltaError: everything that is wrong with it.
        """
        self._options = options
        refuse_problems(config, options, self.spec)

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
        return _Merge(
            references=tuple(model for model in input_ids if model != base),
            base=base,
            trust_remote_code=loaders.trust_remote_code,
            cache_dir=loaders.hf_cache_dir,
            quiet=options.quiet if options else False,
        )

    def merge_group(self, group: TensorGroup, /, **parameters: Any) -> torch.Tensor:
        """Merge one tensor: the base model's plus the weighted task vectors."""
        merge, base = self._merge, group.base
        if merge is None or base is None or group.metadata.name is None:
            raise SltaError(NOT_A_FOLDER.format(method=self.spec.name))
        alpha = self._weights(merge, parameters, str(base.tensor.device))[group.metadata.name]
        position = {reference: index for index, reference in enumerate(merge.references)}
        experts = [(entry.tensor, alpha[position[entry.id]]) for entry in group.non_base]
        return weighted_sum(base.tensor, experts)

    def _weights(self, merge: _Merge, parameters: dict[str, Any], device: str) -> TensorWeights:
        with self._lock:
            self._refuse_changing(merge, parameters)
            if merge.failure is not None:
                raise merge.failure
            if merge.weights is None:
                try:
                    merge.weights = solve_weights(merge, parameters, device)
                except Exception as error:
                    merge.failure = error
                    raise
            return merge.weights

    def _refuse_changing(self, merge: _Merge, parameters: dict[str, Any]) -> None:
        """Every tensor must be merged under the same parameters; optional tensors may lack some experts."""
        known = merge.parameters
        if known is None:
            merge.parameters = parameters
            return
        for parameter in self.spec.parameters:
            new, old = parameters[parameter.name], known[parameter.name]
            if parameter.scope == ParameterScope.SHARED:
                changed = new != old
            else:
                changed = any(new[expert] != old.get(expert, new[expert]) for expert in new)
            if changed:
                raise SltaError(
                    f"'{parameter.name}' changes between tensors: '{self.spec.name}' needs one value for the whole "
                    "merge, not a list or a filter."
                )


def solve_weights(merge: _Merge, parameters: dict[str, Any], device: str) -> TensorWeights:
    """Measure what is not measured yet, and solve for the merging weights of every tensor."""
    settings = SltaSettings.model_validate({name: parameters[name] for name in SltaSettings.model_fields})
    experts = tuple(
        Expert(model, parameters["calibration"][model], parameters["template"][model]) for model in merge.references
    )
    experiment = Experiment(
        Recipe(merge.base, experts, settings),
        device=device,
        trust_remote_code=merge.trust_remote_code,
        cache_dir=merge.cache_dir,
        quiet=merge.quiet,
    )
    decoder = Decoder(experiment.base.config, merge.trust_remote_code)
    experiment.check_edges(decoder, experts=settings.edges == "mean" or settings.level == "model")
    path = resolve_statistics(settings.statistics, merge.cache_dir) if settings.statistics else None
    published = settings.statistics.startswith(PUBLISHED_PREFIX)
    statistics = experiment.statistics([settings.level], path, published=published)
    solutions = statistics.solve(settings.level, balance=settings.balance, ridge=settings.ridge)
    singular = [name for name, solution in solutions.items() if solution.rank < len(experts)]
    if singular:
        LOG.warning(
            "%d of %d submodules have linearly dependent experts (%s ...): their weights are the minimum-norm solution",
            len(singular),
            len(solutions),
            singular[0],
        )
    if settings.report:
        _write_report(statistics, settings)
    alpha = {name: solution.alpha for name, solution in solutions.items()}
    return TensorWeights(decoder, settings.level, alpha, settings.edges)


def _write_report(statistics: Statistics, settings: SltaSettings) -> None:
    from mergekit_slta.report import write_report  # matplotlib takes a second, which other merges are spared

    try:
        path = write_report(
            statistics,
            Path(settings.report),
            levels=[settings.level],
            balance=settings.balance,
            ridge=settings.ridge,
        )
    except OSError as error:
        raise SltaError(f"The report cannot be written to {settings.report} ({error}): name another folder.") from error
    LOG.info("Report written to %s", path)


def weighted_sum(base: torch.Tensor, experts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The base tensor plus the weighted task vectors, accumulated in at least float32 without forming a task vector.

    Args:
        base: the base model's tensor.
        experts: each expert's tensor and its weights, one number or a tensor that broadcasts to it.
    """
    dtype = torch.promote_types(base.dtype, torch.float32)
    experts = [(tensor, weight) for tensor, weight in experts if bool(weight.any())]
    if not experts:
        return base
    weights = [weight.to(base.device, dtype) for _, weight in experts]
    result = base.to(dtype) * (1 - torch.stack(weights).sum(0))
    for (tensor, _), weight in zip(experts, weights, strict=True):
        result.addcmul_(tensor, weight)
    return result.to(base.dtype)


METHODS = (SltaMethod(), SftmMethod())


def register() -> None:
    """Make the merge methods known to mergekit; a second call changes nothing."""
    known = {method.spec.name for method in merge_methods.registered_methods()}
    for method in METHODS:
        if method.spec.name not in known:
            merge_methods.register(method)


def watch_planner() -> None:
    """Register, and show the methods the whole recipe, which mergekit does not; a second call changes nothing."""
    from mergekit.plan import MergePlanner

    register()
    plan = MergePlanner.__init__
    if hasattr(plan, "__wrapped__"):
        return

    @functools.wraps(plan)
    def init(
        self: MergePlanner, config: MergeConfiguration, arch_info: Any, options: MergeOptions, *rest: Any, **more: Any
    ) -> None:
        for method in METHODS:
            if method.spec.name == config.merge_method:
                method.begin(config, options)
        plan(self, config, arch_info, options, *rest, **more)

    MergePlanner.__init__ = init
