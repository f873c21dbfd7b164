"""Whether a statistics file fits a recipe: one answer for the check, which reads no weights, and for the run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from mergekit_slta.data.draw import CalibrationData
from mergekit_slta.recipe.recipe import Expert, Reading, Recipe
from mergekit_slta.slta.statistics import BaseContent, Content, Info, versions


@dataclass(frozen=True)
class Match:
    """How a file fits a recipe.

    Attributes:
        order: the index in the file of each of the recipe's experts; None for one that is not known or not there.
        problems: why it does not fit, one sentence each.
    """

    order: list[int | None]
    problems: list[str]


def match(
    info: Info,
    path: Path,
    recipe: Recipe | Reading,
    base: BaseContent | None,
    experts: Sequence[Content | None],
    data: Sequence[CalibrationData | None],
) -> Match:
    """Compare a file with a recipe: models by content, in any order; data and settings if the recipe gives data.

    Args:
        info: what the file says of itself.
        path: where it is.
        recipe: the recipe.
        base: the base model's content; None if only a download would tell.
        experts: the experts' in the recipe's order, likewise.
        data: their samples; None for one whose samples are not drawn.
    """
    problems = [] if base is None else _base_problems(info, path, recipe, base)
    _, *measured = info.fingerprint.contents
    unused = dict(enumerate(measured))
    order: list[int | None] = []
    for expert, content, samples in zip(recipe.experts, experts, data, strict=True):
        equal = [index for index, known in unused.items() if content is not None and known.fits(content)]
        same_data = [i for i in equal if samples is not None and info.calibration[i].sha256 == samples.sha256]
        order.append(next(iter(same_data or equal), None))
        if equal:
            del unused[(same_data or equal)[0]]
        elif content is not None:
            problems.append(
                f"The expert {expert} is none of the models that {path} was measured on "
                f"({', '.join(info.models)}; other content): use those or measure anew into another file."
            )
    if all(expert.calibration for expert in recipe.experts):
        # Other settings draw other samples: only under the same ones do samples tell something about the data.
        problems += _setting_problems(info, path, recipe) or _data_problems(info, path, recipe.experts, order, data)
    return Match(order, problems)


def _base_problems(info: Info, path: Path, recipe: Recipe | Reading, base: BaseContent) -> list[str]:
    known = info.fingerprint.base
    if not info.fingerprint.contents[0].fits(base):
        return [
            f"The base model {recipe.base} is not the one that {path} was measured on ('{info.base_model}', "
            "other content): use that base model or other statistics."
        ]
    if not isinstance(known, BaseContent):
        return []
    # Another version of transformers may know other entries.
    same_version = info.versions.get("transformers") == versions()["transformers"]
    names = known.config.keys() | base.config.keys() if same_version else known.config.keys() & base.config.keys()
    changed = sorted(name for name in names if known.config.get(name) != base.config.get(name))
    if not changed:
        return []
    return [
        f"The configuration of the base model {recipe.base} is not the one that {path} was measured with (other "
        f"{', '.join(changed)}): set it back, or measure into another file."
    ]


def _setting_problems(info: Info, path: Path, recipe: Recipe | Reading) -> list[str]:
    return [
        f"The recipe has {name} {getattr(recipe.settings, name)}, but {path} was measured with {getattr(info, name)}: "
        "set it so, or measure into another file."
        for name in ("samples", "max_tokens", "seed")
        if getattr(recipe.settings, name) != getattr(info, name)
    ]


def _data_problems(
    info: Info,
    path: Path,
    experts: Sequence[Expert],
    order: Sequence[int | None],
    data: Sequence[CalibrationData | None],
) -> list[str]:
    return [
        f"The calibration data '{expert.calibration}' of {expert} gives other tokens than "
        f"'{info.calibration[index].source}', on which {path} was measured: use that data, leave 'calibration' out to "
        "use the file as it is, or measure into another file."
        for expert, index, samples in zip(experts, order, data, strict=True)
        if index is not None and samples is not None and samples.sha256 != info.calibration[index].sha256
    ]


def level_problems(
    info: Info, path: Path, recipe: Recipe | Reading, levels: Collection[str], published: bool
) -> list[str]:
    """Levels that the file lacks and that the recipe cannot add to it."""
    missing = [level for level in levels if level not in info.levels]
    if not missing:
        return []
    if published:
        return [
            f"The published statistics lack the level {', '.join(missing)} (they hold {', '.join(info.levels)}): use "
            "one that they hold, or measure into a file of your own."
        ]
    if len(recipe.experts) == len(info.models) and all(expert.calibration for expert in recipe.experts):
        return []
    return [
        f"{path} lacks the level {', '.join(missing)}, which can be added only by a recipe with all of the file's "
        f"experts ({', '.join(info.models)}) and their calibration data."
    ]
