"""Write a merge as a recipe that mergekit runs without this plugin: task_arithmetic with weights for each expert.

In such a recipe a weight may depend on a tensor's name, through filters (substrings, the first match counts), and on
its depth, through gradients: a list of L numbers over L layers gives layer i the i-th number. mergekit treats tensors
outside the layers like those of layer 0, so filters must separate them.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import transformers
import yaml
from mergekit.common import ModelReference
from mergekit.config import ConfigYamlDumper, MergeConfiguration, evaluate_setting

from mergekit_slta import __version__
from mergekit_slta.errors import SltaError, reading
from mergekit_slta.files import is_hub_name
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.trace import ENDINGS, trace
from mergekit_slta.models.architecture import known_architecture
from mergekit_slta.models.layout import Layout
from mergekit_slta.slta.solver import SubmoduleSolution
from mergekit_slta.slta.statistics_file import Info
from mergekit_slta.slta.weights import TensorWeights

# Ten digits: two orders of magnitude below float32's rounding, and still readable.
DIGITS = 10
WEIGHT_TOLERANCE = 1e-9
SOLVE_OTHERWISE = "solve at another level, such as 'attn_mlp', or use 'merge_method: slta' with these statistics"
LOST = (
    "mergekit may leave out heads for multi-token prediction, and a mixture's experts where not all layers have them: "
    "then use 'merge_method: slta' with these statistics."
)
MULTIMODAL = ENDINGS[-1]  # how the name of a class ends that may take more than text
TensorAlpha = tuple[float, ...]  # the ``T`` merging weights of a tensor


class PlannedTensor(NamedTuple):
    """A tensor of mergekit's plan."""

    name: str  # which filters match
    layer: int | None  # None outside the decoder layers
    alpha: TensorAlpha


def plain_recipe(
    info: Info,
    level: str,
    submodules: Mapping[str, SubmoduleSolution],
    origin: str,
    paths: Mapping[str, str],
    tokenizer_source: str,
    trust_remote_code: bool,
) -> str:
    """The YAML of a mergekit recipe that reproduces ``merge_method: slta`` without this package.

    ``origin`` says in its header where the weights come from; ``paths`` are what is written for each model, by its name
    in ``info``. See ``Solution.save_recipe``.
    """
    if level == "head_mlp":
        raise SltaError(
            f"A recipe gives a tensor one weight, but at level 'head_mlp' its rows differ: {SOLVE_OTHERWISE}."
        )
    base = paths[info.base_model]
    if level == "model" and not info.architecture.endswith(MULTIMODAL):  # one weight for all: nothing has to be read
        planned, settings = [], [_rounded(float(weight)) for weight in submodules["model"].alpha]
    else:
        config = _read_config(info, base, trust_remote_code)
        decoder = trace(config, trust_remote_code)
        if len(decoder) != info.num_layers:
            raise SltaError(
                f"The model '{base}' has {len(decoder)} layers and the base model of the statistics {info.num_layers}: "
                f"give the folder or Hub id of that with --model {info.base_model}=PATH."
            )
        layout = Layout(decoder.model, [name for name, _ in plan(config, decoder)])
        planned = planned_tensors(config, TensorWeights(decoder, level, submodules, layout))
        settings = weight_settings(planned)
    weights = zip(info.models, settings, strict=True)
    content = {
        "merge_method": "task_arithmetic",
        "base_model": base,
        "models": [{"model": paths[name], "parameters": {"weight": weight}} for name, weight in weights],
        "dtype": "float32",
        "out_dtype": info.dtype,
        **({"tokenizer_source": tokenizer_source} if tokenizer_source else {}),
    }
    _verify(content, planned)
    body = yaml.dump(content, Dumper=ConfigYamlDumper, sort_keys=False, width=120, allow_unicode=True)
    written = f"Written by mergekit-slta {__version__}. mergekit runs this recipe without that plugin and prompts."
    # A name from somebody else's statistics must not end the comment.
    return "".join(f"# {' '.join(line.split())}\n" for line in (written, origin, LOST)) + body


def planned_tensors(config: transformers.PretrainedConfig, weights: TensorWeights) -> list[PlannedTensor]:
    """Every tensor of mergekit's plan with its merging weights.

    The names are those of mergekit's definition of the architecture, or else transformers' own names.
    """
    planned = []
    layers = weights.decoder.layers_path + "."
    for name, optional in plan(config, weights.decoder):
        piece = weights.layout.pieces.get(name)
        if piece is None and optional:  # a buffer of older checkpoints that the model no longer has
            continue
        if piece is None:
            raise SltaError(
                f"mergekit asks for the tensor {name}, which this {type(weights.decoder.model).__name__} does "
                "not have: it cannot merge such a model."
            )
        inside = piece.targets[0].partition(layers)[2]
        alpha = weights[name]
        if alpha.ndim > 1:
            raise SltaError(
                f"A recipe gives a tensor one weight, but the parts of {name} differ (a mixture's fused experts): "
                f"{SOLVE_OTHERWISE}."
            )
        planned.append(PlannedTensor(name, int(inside.split(".")[0]) if inside else None, tuple(alpha.tolist())))
    return planned


def plan(config: transformers.PretrainedConfig, decoder: Decoder) -> Iterable[tuple[str, bool]]:
    """Every tensor that mergekit plans, and whether it is optional."""
    architecture = known_architecture(config)
    if architecture is None:
        return ((name, False) for name in decoder.model.state_dict())
    return ((weight.name, weight.optional) for weight in architecture.all_weights(config))


def weight_settings(planned: Sequence[PlannedTensor]) -> list[Any]:
    """Each expert's ``weight`` in a mergekit recipe: a number, or filters with numbers and gradients."""
    (outside, _), *_ = Counter(tensor.alpha for tensor in planned if tensor.layer is None).most_common()
    if all(tensor.alpha == outside for tensor in planned):
        return [_rounded(weight) for weight in outside]
    depth = 1 + max(tensor.layer for tensor in planned if tensor.layer is not None)
    settings: list[list[dict[str, Any]]] = [[] for _ in outside]
    for name, by_layer in _filters(planned, outside).items():
        missing = next(iter(by_layer.values()))  # of a layer that has no such tensor
        for expert, setting in enumerate(settings):
            numbers = [_rounded(by_layer.get(layer, missing)[expert]) for layer in range(depth)]
            setting.append({"filter": name, "value": numbers if len(set(numbers)) > 1 else numbers[0]})
    return [[*setting, {"value": _rounded(weight)}] for weight, setting in zip(outside, settings, strict=True)]


def _filters(planned: Sequence[PlannedTensor], outside: TensorAlpha) -> dict[str, dict[int | None, TensorAlpha]]:
    """Filters for all tensors whose weights are not ``outside``, each with its weights [T] by layer.

    A tensor's filter is the first of its ``_candidates`` whose matches all have that layer's weights, so the order of
    such filters does not matter. Where there is none, it is the tensor's full name, which stands before the others,
    longer names first.
    """
    patterns: dict[str, dict[int | None, TensorAlpha]] = {}
    names: dict[str, dict[int | None, TensorAlpha]] = {}

    @functools.cache
    def weights(candidate: str) -> dict[int | None, TensorAlpha]:
        """The weights by layer of what a filter matches; none if they differ inside a layer, or outside the layers."""
        matches = [tensor for tensor in planned if candidate in tensor.name]
        by_layer = {tensor.layer: tensor.alpha for tensor in matches}
        alike = all(tensor.alpha == by_layer[tensor.layer] for tensor in matches)
        return by_layer if alike and None not in by_layer else {}

    for tensor in planned:
        if name := next((name for name in _candidates(tensor) if weights(name)), None):
            patterns[name] = weights(name)
        elif tensor.layer is not None or tensor.alpha != outside:
            names[tensor.name] = {None: tensor.alpha}
    return dict(sorted(names.items(), key=lambda entry: -len(entry[0]))) | patterns


def _candidates(tensor: PlannedTensor) -> list[str]:
    """Names for a filter, from general to special: the layers, the modules around the tensor, the tensor."""
    if tensor.layer is None:
        return []
    before, _, inside = tensor.name.partition(f".{tensor.layer}.")
    parts = inside.split(".")
    return [f"{before}.", *(f".{'.'.join(parts[:count])}." for count in range(1, len(parts))), f".{inside}"]


def _rounded(weight: float) -> float:
    return float(f"{weight:.{DIGITS}g}")


def _verify(content: dict[str, Any], planned: Sequence[PlannedTensor]) -> None:
    """Refuse a recipe from which mergekit would read other weights than the planned ones."""
    recipe = MergeConfiguration.model_validate(content)
    depth = max((tensor.layer or 0 for tensor in planned), default=0)
    for tensor in planned:
        t = 0.0 if tensor.layer is None else tensor.layer / depth if depth else 1.0
        for model, wanted in zip(recipe.models or [], tensor.alpha, strict=True):
            read = evaluate_setting(tensor.name, (model.parameters or {})["weight"], t, validate=float)
            if read is None or abs(read - wanted) > WEIGHT_TOLERANCE * max(1.0, abs(wanted)):
                raise SltaError(f"Filters cannot give {tensor.name} a weight of its own: {SOLVE_OTHERWISE}.")


def _read_config(info: Info, path: str, trust_remote_code: bool) -> transformers.PretrainedConfig:
    name = info.base_model
    fix = f"give its folder or Hub id, models={{'{name}': 'PATH'}} in Python and --model {name}=PATH for the command"
    name = ModelReference.parse(path).model.path
    if not (Path(name).exists() or is_hub_name(name)):
        raise SltaError(f"The base model '{path}' is neither a folder nor of the form ORG/NAME: {fix}.")
    with reading(f"The configuration of the base model '{path}'", fix=fix):
        config = ModelReference.parse(path).config(trust_remote_code=trust_remote_code)
    if (config.architectures or [""])[0] != info.architecture:
        raise SltaError(f"The model '{path}' is not the base model of the statistics, a {info.architecture}: {fix}.")
    return config
