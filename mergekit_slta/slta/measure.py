"""From a recipe to its statistics: use what has been measured, measure what has not, lose nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from mergekit_slta.data.draw import CalibrationData
from mergekit_slta.data.sources import source_name
from mergekit_slta.engine.partial import Partial, remove
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import share
from mergekit_slta.errors import SltaError
from mergekit_slta.files import cache_folder, digest
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.submodules import LEVELS
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import calibration_problems
from mergekit_slta.slta.calibrate import Grams, calibrate
from mergekit_slta.slta.statistics import (
    CalibrationInfo,
    Fingerprint,
    Info,
    Statistics,
    load,
    published_name,
    save,
    versions,
)


def measured_statistics(
    experiment: Experiment, levels: Sequence[str], path: Path | None = None, *, published: bool = False
) -> Statistics:
    """The statistics of the recipe's experts, in the recipe's order.

    An existing file is matched by content and used; a level that it lacks is measured and added. Without a file
    everything is measured and written to ``path``, or to the cache folder.

    Args:
        experiment: the recipe's models and data.
        levels: the levels that are wanted.
        path: the statistics file.
        published: the file is a copy of a published one, to which nothing is added.

    Raises:
        SltaError: an existing file does not fit the recipe, or something about models or data is wrong.
    """
    if path is not None and _exists(path, experiment.ranks):
        return _Measurement(experiment, path).reuse(levels, published)
    if problems := calibration_problems(experiment.recipe, statistics_exist=False):
        raise SltaError("\n".join(problems))
    data = experiment.load_data(experiment.recipe.experts)
    fingerprint = experiment.fingerprint(data)
    path = path or cache_file(fingerprint, experiment.base.settings, levels)
    measurement = _Measurement(experiment, path)
    if _exists(path, experiment.ranks):
        return measurement.reuse(levels, published)
    return measurement.measure(_info(experiment, levels, data, fingerprint), experiment.experts, data, levels)


def _exists(path: Path, ranks: Ranks) -> bool:
    exists = path.is_file()
    ranks.require_equal(exists, path.parent)
    return exists


@dataclass(frozen=True)
class _Measurement:
    """An experiment with its statistics file, which is there or is to be written."""

    experiment: Experiment
    path: Path

    def reuse(self, levels: Sequence[str], published: bool) -> Statistics:
        """Match the file's content with the recipe, add the levels that it lacks, and take the recipe's experts."""
        found, experts = load(self.path), self.experiment.recipe.experts
        given = [expert for expert in experts if expert.calibration]
        data = self.experiment.load_data(given) if len(given) == len(experts) else None
        order = self._match_models(found, data)
        if data is not None:
            self._match_data(found, order, data)
        missing = [level for level in levels if level not in found.info.levels]
        if missing and published:
            raise SltaError(
                f"The published statistics lack the level {', '.join(missing)} (they hold "
                f"{', '.join(found.info.levels)}): use one that they hold, or measure into a file of your own."
            )
        if missing:
            found = self._add_levels(found, order, data, missing)
        elif not published and Partial.levels(partial_folder(self.path)) <= set(found.info.levels):
            self._finish()  # what a process that was killed after writing the file has left
        return found.select(order)

    def _match_models(self, found: Statistics, data: Sequence[CalibrationData] | None) -> list[int]:
        """The index in the file of each of the recipe's experts; of equal ones, that with the same data."""
        base, cache_dir = self.experiment.base, self.experiment.cache_dir
        if base.fingerprint(cache_dir) != found.info.fingerprint.base:
            raise SltaError(
                f"The base model {base} is not the one that {self.path} was measured on ('{found.info.base_model}', "
                "other content): use that base model or other statistics."
            )
        unused = dict(enumerate(found.info.fingerprint.experts))
        order = []
        for number, expert in enumerate(self.experiment.experts):
            content = expert.fingerprint(cache_dir)
            equal = [index for index, known in unused.items() if known == content]
            if not equal:
                raise SltaError(
                    f"The expert {expert} is none of the models that {self.path} was measured on "
                    f"({', '.join(found.info.models)}; other content): use those or measure anew into another file."
                )
            same_data = [i for i in equal if data and found.info.calibration[i].sha256 == data[number].sha256]
            order.append((same_data or equal)[0])
            del unused[order[-1]]
        return order

    def _match_data(self, found: Statistics, order: Sequence[int], data: Sequence[CalibrationData]) -> None:
        recipe, info = self.experiment.recipe, found.info
        for name in ("samples", "max_tokens", "seed"):
            if getattr(recipe.settings, name) != getattr(info, name):
                raise SltaError(
                    f"The recipe has {name} {getattr(recipe.settings, name)}, but {self.path} was measured with "
                    f"{getattr(info, name)}: set it so, or measure into another file."
                )
        for expert, index, samples in zip(recipe.experts, order, data, strict=True):
            if samples.sha256 != info.calibration[index].sha256:
                raise SltaError(
                    f"The calibration data '{expert.calibration}' of {expert} gives other tokens than "
                    f"'{info.calibration[index].source}', on which {self.path} was measured: use that data, leave "
                    "'calibration' out to use the file as it is, or measure into another file."
                )

    def _add_levels(
        self, found: Statistics, order: Sequence[int], data: Sequence[CalibrationData] | None, levels: Sequence[str]
    ) -> Statistics:
        if data is None or len(order) != len(found.info.models):
            raise SltaError(
                f"{self.path} lacks the level {', '.join(levels)}, which can be added only by a recipe with all of the "
                f"file's experts ({', '.join(found.info.models)}) and their calibration data."
            )
        position = [order.index(index) for index in range(len(order))]
        experts, data = [self.experiment.experts[i] for i in position], [data[i] for i in position]
        known = [level for level in LEVELS if level in found.info.levels or level in levels]
        info = found.info.model_copy(update={"levels": tuple(known)})
        return self.measure(info, experts, data, levels, known=found.grams)

    def measure(
        self,
        info: Info,
        experts: Sequence[Checkpoint],
        data: Sequence[CalibrationData],
        levels: Sequence[str],
        known: Grams | None = None,
    ) -> Statistics:
        """Measure levels, and write the statistics file with them and with what is known."""
        content = info.fingerprint.model_dump(mode="json")
        content |= {"levels": list(levels), "config": self.experiment.base.settings}
        partial = Partial(partial_folder(self.path), content)
        partial.enter(self.experiment.ranks)
        try:
            grams = self._calibrate(experts, data, levels, partial)
            statistics = _assemble({**(known or {}), **grams}, data, info)
            if self.experiment.ranks.first:
                save(statistics, self.path)
            self._finish()
        finally:
            partial.release()
        return statistics

    def _calibrate(
        self, experts: Sequence[Checkpoint], data: Sequence[CalibrationData], levels: Sequence[str], partial: Partial
    ) -> Grams:
        experiment, ranks = self.experiment, self.experiment.ranks
        decoder = Decoder(experiment.base.config, experiment.trust_remote_code, experiment.device)
        tasks = [samples.token_ids for samples in data]
        batch_tokens = experiment.recipe.settings.batch_tokens
        with tqdm(
            total=share(decoder, tasks, batch_tokens, ranks) * len(decoder),
            desc=f"Calibrating {', '.join(levels)}",
            unit="sample",
            unit_scale=1 / len(decoder),
            leave=False,
            disable=experiment.quiet or not ranks.first,
        ) as bar:
            return calibrate(
                decoder,
                [experiment.base, *experts],
                tasks,
                levels,
                batch_tokens=batch_tokens,
                partial=partial,
                ranks=ranks,
                progress=bar.update,
            )

    def _finish(self) -> None:
        self.experiment.ranks.wait()
        remove(partial_folder(self.path))


def _info(
    experiment: Experiment, levels: Sequence[str], data: Sequence[CalibrationData], fingerprint: Fingerprint
) -> Info:
    recipe, config = experiment.recipe, experiment.base.config
    names = [published_name(reference) for reference in (recipe.base, *(e.reference for e in recipe.experts))]
    if len(set(names)) < len(names):
        raise SltaError(
            f"Two models would get the same name in the statistics ({', '.join(names)}): rename a folder, or "
            "give relative paths."
        )
    return Info(
        format_version=1,
        levels=tuple(level for level in LEVELS if level in levels),
        base_model=names[0],
        models=tuple(names[1:]),
        calibration=tuple(
            CalibrationInfo(source=source_name(samples.source), template=samples.template, sha256=samples.sha256)
            for samples in data
        ),
        samples=recipe.settings.samples,
        max_tokens=recipe.settings.max_tokens,
        seed=recipe.settings.seed,
        inputs="base",
        architecture=(config.architectures or [""])[0],
        num_layers=config.num_hidden_layers,
        dtype=experiment.base.dtype,
        versions=versions(),
        fingerprint=fingerprint,
    )


def _assemble(grams: Grams, data: Sequence[CalibrationData], info: Info) -> Statistics:
    task = torch.tensor([index for index, samples in enumerate(data) for _ in samples.token_ids])
    tokens = torch.tensor([len(ids) for samples in data for ids in samples.token_ids])
    return Statistics(grams, task, tokens, info)


def partial_folder(path: Path) -> Path:
    """Where the state of an unfinished measurement lives."""
    return path.with_name(path.name + ".partial")


def cache_file(fingerprint: Fingerprint, config: object, levels: Sequence[str]) -> Path:
    """Where statistics go that a recipe names no file for; another configuration computes other features."""
    content = [fingerprint.model_dump(mode="json"), config, sorted(levels)]
    return cache_folder() / f"{digest(content)}.safetensors"
