"""Identify a recipe's models and samples by content, and compare a statistics file with them.

The checks, which read no weights, and the run compare by the same function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mergekit_slta.data.sources import CalibrationData
from mergekit_slta.errors import SltaError
from mergekit_slta.files import digest
from mergekit_slta.models.fingerprint import hashed_computation
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.slta.statistics_file import (
    BaseContent,
    Fingerprint,
    Info,
    settings_fingerprint,
    tokens_fingerprint,
    versions,
)


def match(
    info: Info,
    path: Path,
    experiment: Experiment,
    base: BaseContent | None,
    experts: Sequence[str | None],
    data: Sequence[CalibrationData | None],
    levels: Sequence[str],
) -> list[int]:
    """Compare a file with a recipe: models by content, in any order; data and settings if the recipe names data.

    Args:
        info, path: the file's metadata, and its path.
        base: the base model's content; None if only a download would show it.
        experts: the experts' fingerprints in the recipe's order; None likewise.
        data: the samples of the recipe's tasks; None for samples that are not drawn.
        levels: the levels that the recipe needs.

    Returns:
        For each of the experts with a fingerprint its index in the file.

    Raises:
        SltaError: everything in which the file does not fit, a sentence each.
    """
    recipe = experiment.recipe
    problems = list(_base_problems(info, path, str(recipe.base), base)) if base else []
    unused, order = dict(enumerate(info.fingerprint.experts)), list[int | None]()
    for expert, content, samples in zip(recipe.experts, experts, data, strict=False):  # the base model's come last
        equal = [index for index, known in unused.items() if known == content]
        # Of copies of one expert, the one that was measured on these samples.
        same_data = [index for index in equal if samples and info.calibration[index].sha256 == samples.sha256]
        order.append(next(iter(same_data or equal), None))
        if equal:
            del unused[(same_data or equal)[0]]
        elif content is not None:
            problems.append(
                f"The expert {expert} is not one of the models that {path} was measured on "
                f"({', '.join(info.models)}; other content): use those, or measure into another file."
            )
    if recipe.keep and info.keep is None:
        problems.append(
            f"{path} was measured without prompts of the base model, which the recipe lists with its own: measure into "
            "another file, or leave the base model out of 'models'."
        )
    if all(task.calibration for task in recipe.tasks):
        settings = [
            f"The recipe has {name} {getattr(recipe.settings, name)}, but {path} was measured with "
            f"{getattr(info, name)}: set that value, or measure into another file."
            for name in ("samples", "max_tokens", "seed")
            if getattr(recipe.settings, name) != getattr(info, name)
        ]
        # Other settings draw other samples, so the data can be compared only if the settings are equal.
        known = [None if index is None else info.calibration[index] for index in order]
        problems += settings or [
            f"The calibration data '{task.calibration}' of {task} gives other tokens than "
            f"'{measured.source}', on which {path} was measured: use that data, leave 'calibration' "
            "out to use the file as it is, or measure into another file."
            for task, measured, samples in zip(recipe.tasks, [*known, info.keep], data, strict=False)
            if measured is not None and samples is not None and samples.sha256 != measured.sha256
        ]
    if missing := [level for level in levels if level not in info.levels]:
        asked = " ".join(f"--level {level}" for level in (*info.levels, *missing))
        problems.append(
            f"{path} lacks the level {', '.join(missing)} (it holds {', '.join(info.levels)}): use a level that it "
            f"holds, or measure another file with 'mergekit-slta calibrate RECIPE -o FILE {asked}'."
        )
    if problems:
        raise SltaError(*problems)
    return [index for index in order if index is not None]


def _base_problems(info: Info, path: Path, name: str, base: BaseContent) -> Iterator[str]:
    known = info.fingerprint.base
    # Another version of transformers may add or drop entries.
    same_version = info.versions.get("transformers") == versions()["transformers"]
    names = known.config.keys() | base.config.keys() if same_version else known.config.keys() & base.config.keys()
    changed = sorted(name for name in names if known.config.get(name) != base.config.get(name))
    if known.tensors != base.tensors:
        yield (
            f"The base model {name} is not the one that {path} was measured on ('{info.base_model}', "
            "other content): use that base model or other statistics."
        )
    elif changed:
        yield (
            f"The configuration of the base model {name} is not the one that {path} was measured with (other "
            f"{', '.join(changed)}): change it back, or measure into another file."
        )


def model_contents(experiment: Experiment) -> tuple[BaseContent, list[str]]:
    """Identify the base model and the experts."""
    config = hashed_computation(experiment.base.config)
    base = BaseContent(tensors=experiment.base.fingerprint(), config=config)
    return base, [expert.fingerprint() for expert in experiment.experts]


def fingerprint(experiment: Experiment, data: Sequence[CalibrationData]) -> Fingerprint:
    """Identify the models, the samples and the settings."""
    settings = experiment.settings
    base, experts = model_contents(experiment)
    return Fingerprint(
        base=base,
        experts=tuple(experts),
        tokens=tokens_fingerprint([samples.sha256 for samples in data]),
        settings=settings_fingerprint(settings.samples, settings.max_tokens, settings.seed),
    )


def local_identity(experiment: Experiment, content: Fingerprint) -> dict[str, Any]:
    """Identify a run on this machine by its models, data and settings, and by the stamps of the models' files."""
    return content.model_dump(mode="json") | {"files": local_stamps(experiment)}


def local_stamps(experiment: Experiment) -> str:
    """A hash of the size, time and inode of every file of the models.

    It also differs after an edit of a few rows, which the content's sample of the bytes does not show. Where processes
    have disks of their own, the first one's count.
    """
    models = [experiment.base, *experiment.experts]
    adapters = [experiment.options.lora_merge_dtype] if any(model.reference.lora for model in models) else []
    files = digest([*(sorted(model.stamps.values()) for model in models), *adapters])
    return f"{int(experiment.ranks.gather(int(files[:12], 16))[0]):x}"
