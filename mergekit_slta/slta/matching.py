"""Compare a statistics file with a recipe, for the checks, which read no weights, and for the run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from mergekit_slta.data.draw import CalibrationData
from mergekit_slta.recipe.recipe import Reading, Recipe
from mergekit_slta.slta.statistics import BaseContent, Content, Info, versions


@dataclass(frozen=True)
class Match:
    """How a file fits a recipe.

    Attributes:
        order: for each of the recipe's experts its index in the file; None if it is missing there or its content is
            unknown.
        problems: why the file does not fit, one sentence each.
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
    """Compare a file with a recipe: models by content, in any order; data and settings if the recipe names data.

    Args:
        info: the file's metadata.
        path: the file's path.
        recipe: the recipe.
        base: the base model's content; None if only a download would show it.
        experts: the experts' contents in the recipe's order; None likewise.
        data: the experts' samples; None for samples that are not drawn.
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
                f"The expert {expert} is not one of the models that {path} was measured on "
                f"({', '.join(info.models)}; other content): use those, or measure into another file."
            )
    if all(expert.calibration for expert in recipe.experts):
        settings = [
            f"The recipe has {name} {getattr(recipe.settings, name)}, but {path} was measured with "
            f"{getattr(info, name)}: set that value, or measure into another file."
            for name in ("samples", "max_tokens", "seed")
            if getattr(recipe.settings, name) != getattr(info, name)
        ]
        # Other settings draw other samples, so the data can be compared only if the settings are equal.
        problems += settings or [
            f"The calibration data '{expert.calibration}' of {expert} gives other tokens than "
            f"'{info.calibration[index].source}', on which {path} was measured: use that data, leave 'calibration' "
            "out to use the file as it is, or measure into another file."
            for expert, index, samples in zip(recipe.experts, order, data, strict=True)
            if index is not None and samples is not None and samples.sha256 != info.calibration[index].sha256
        ]
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
    # Another version of transformers may add or drop entries.
    same_version = info.versions.get("transformers") == versions()["transformers"]
    names = known.config.keys() | base.config.keys() if same_version else known.config.keys() & base.config.keys()
    changed = sorted(name for name in names if known.config.get(name) != base.config.get(name))
    if not changed:
        return []
    return [
        f"The configuration of the base model {recipe.base} is not the one that {path} was measured with (other "
        f"{', '.join(changed)}): change it back, or measure into another file."
    ]


def level_problems(
    info: Info, path: Path, recipe: Recipe | Reading, levels: Collection[str], published: bool
) -> list[str]:
    """Why the recipe cannot use or add levels that the file lacks."""
    missing = [level for level in levels if level not in info.levels]
    if not missing:
        return []
    if published:
        return [
            f"The published statistics lack the level {', '.join(missing)} (they hold {', '.join(info.levels)}): use "
            "a level that they hold, or measure into your own file."
        ]
    if len(recipe.experts) == len(info.models) and all(expert.calibration for expert in recipe.experts):
        return []
    return [
        f"{path} lacks the level {', '.join(missing)}, which can be added only by a recipe with all of the file's "
        f"experts ({', '.join(info.models)}) and their calibration data."
    ]
