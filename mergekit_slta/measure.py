"""From a recipe to its statistics: use what has been measured, measure what has not, lose nothing."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from mergekit.common import ModelReference
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mergekit_slta.calibrate import Grams, calibrate
from mergekit_slta.checkpoint import Checkpoint
from mergekit_slta.data import CalibrationData, load_calibration
from mergekit_slta.decoder import Decoder
from mergekit_slta.errors import SltaError, first_line
from mergekit_slta.ranks import Ranks
from mergekit_slta.recipe import Expert, Recipe, calibration_problems
from mergekit_slta.resume import Partial
from mergekit_slta.sources import is_dataset, source_name
from mergekit_slta.statistics import (
    CalibrationInfo,
    Fingerprint,
    Info,
    Statistics,
    load,
    published_name,
    save,
    settings_fingerprint,
    tokens_fingerprint,
    versions,
)
from mergekit_slta.streams import share
from mergekit_slta.submodules import LEVELS


class Experiment:
    """A recipe's models and data, opened; what is costly is done once and only when it is needed.

    Args:
        recipe: the recipe.
        device: where the layers run.
        trust_remote_code, cache_dir: mergekit's options ``--trust-remote-code`` and ``--transformers-cache``.
        quiet: no progress bar.
        ranks: the processes that share the work.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        device: str = "cpu",
        trust_remote_code: bool = False,
        cache_dir: str | None = None,
        quiet: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self.recipe = recipe
        self.device = device
        self.trust_remote_code = trust_remote_code
        self.cache_dir = cache_dir
        self.quiet = quiet
        self.ranks = ranks or Ranks()
        self._drawn: dict[tuple[Expert, int, int, int], CalibrationData] = {}
        self._tokenizers: dict[ModelReference, PreTrainedTokenizerBase] = {}
        self.base = Checkpoint(recipe.base, trust_remote_code)
        self.experts = [Checkpoint(expert.reference, trust_remote_code) for expert in recipe.experts]
        self._merge_adapters()

    def _merge_adapters(self) -> None:
        """Have the first rank alone merge the adapters that mergekit has not merged yet."""
        adapted = [expert for expert in (self.base, *self.experts) if expert.reference.lora is not None]
        if not adapted or self.ranks.count == 1:
            return
        if self.ranks.first:
            for checkpoint in adapted:
                checkpoint.open()
        self.ranks.wait()

    def statistics(self, levels: Sequence[str], path: Path | None = None, *, published: bool = False) -> Statistics:
        """The statistics of the recipe's experts, in the recipe's order.

        An existing file is matched by content and used; a level that it lacks is measured and added. Without a file
        everything is measured and written to ``path``, or to the cache folder.

        Args:
            levels: the levels that are wanted.
            path: the statistics file.
            published: the file is a copy of a published one, to which nothing is added.

        Raises:
            SltaError: an existing file does not fit the recipe, or something about models or data is wrong.
        """
        if path is not None and self._exists(path):
            return self._reuse(load(path), levels, path, published)
        if problems := calibration_problems(self.recipe, statistics_exist=False):
            raise SltaError("\n".join(problems))
        data = self.load_data(self.recipe.experts)
        fingerprint = self.fingerprint(data)
        path = path or cache_file(fingerprint, self.base.settings, levels)
        if self._exists(path):
            return self._reuse(load(path), levels, path, published)
        return self._measure(self._info(levels, data, fingerprint), self.experts, data, levels, path)

    def _exists(self, path: Path) -> bool:
        exists = path.is_file()
        self.ranks.require_equal(exists, path.parent)
        return exists

    def _reuse(self, found: Statistics, levels: Sequence[str], path: Path, published: bool) -> Statistics:
        """Match a file's content with the recipe, add the levels that it lacks, and take the recipe's experts."""
        given = [expert for expert in self.recipe.experts if expert.calibration]
        data = self.load_data(given) if len(given) == len(self.recipe.experts) else None
        order = self._match_models(found, path, data)
        if data is not None:
            self._match_data(found, order, data, path)
        missing = [level for level in levels if level not in found.info.levels]
        if missing and published:
            raise SltaError(
                f"The published statistics lack the level {', '.join(missing)} (they hold "
                f"{', '.join(found.info.levels)}): use one that they hold, or measure into a file of your own."
            )
        if missing:
            found = self._add_levels(found, order, data, missing, path)
        elif not published and Partial.levels(partial_folder(path)) <= set(found.info.levels):
            self._finish(path)  # what a process that was killed after writing the file has left
        return found.select(order)

    def _match_models(self, found: Statistics, path: Path, data: Sequence[CalibrationData] | None) -> list[int]:
        """The index in the file of each of the recipe's experts; of equal ones, that with the same data."""
        if self.base.fingerprint(self.cache_dir) != found.info.fingerprint.base:
            raise SltaError(
                f"The base model {self.base} is not the one that {path} was measured on ('{found.info.base_model}', "
                "other content): use that base model or other statistics."
            )
        unused = dict(enumerate(found.info.fingerprint.experts))
        order = []
        for number, expert in enumerate(self.experts):
            content = expert.fingerprint(self.cache_dir)
            equal = [index for index, known in unused.items() if known == content]
            if not equal:
                raise SltaError(
                    f"The expert {expert} is none of the models that {path} was measured on "
                    f"({', '.join(found.info.models)}; other content): use those or measure anew into another file."
                )
            same_data = [i for i in equal if data and found.info.calibration[i].sha256 == data[number].sha256]
            order.append((same_data or equal)[0])
            del unused[order[-1]]
        return order

    def _match_data(self, found: Statistics, order: Sequence[int], data: Sequence[CalibrationData], path: Path) -> None:
        settings, info = self.recipe.settings, found.info
        for name in ("samples", "max_tokens", "seed"):
            if getattr(settings, name) != getattr(info, name):
                raise SltaError(
                    f"The recipe has {name} {getattr(settings, name)}, but {path} was measured with "
                    f"{getattr(info, name)}: set it so, or measure into another file."
                )
        for expert, index, samples in zip(self.recipe.experts, order, data, strict=True):
            if samples.sha256 != info.calibration[index].sha256:
                raise SltaError(
                    f"The calibration data '{expert.calibration}' of {expert} gives other tokens than "
                    f"'{info.calibration[index].source}', on which {path} was measured: use that data, leave "
                    "'calibration' out to use the file as it is, or measure into another file."
                )

    def _add_levels(
        self,
        found: Statistics,
        order: Sequence[int],
        data: Sequence[CalibrationData] | None,
        levels: Sequence[str],
        path: Path,
    ) -> Statistics:
        if data is None or len(order) != len(found.info.models):
            raise SltaError(
                f"{path} lacks the level {', '.join(levels)}, which can be added only by a recipe with all of the "
                f"file's experts ({', '.join(found.info.models)}) and their calibration data."
            )
        position = [order.index(index) for index in range(len(order))]
        experts, data = [self.experts[i] for i in position], [data[i] for i in position]
        known = [level for level in LEVELS if level in found.info.levels or level in levels]
        info = found.info.model_copy(update={"levels": tuple(known)})
        return self._measure(info, experts, data, levels, path, known=found.grams)

    def _measure(
        self,
        info: Info,
        experts: Sequence[Checkpoint],
        data: Sequence[CalibrationData],
        levels: Sequence[str],
        path: Path,
        known: Grams | None = None,
    ) -> Statistics:
        """Measure levels, and write the statistics file with them and with what is known."""
        content = info.fingerprint.model_dump(mode="json") | {"levels": list(levels), "config": self.base.settings}
        partial = Partial(partial_folder(path), content)
        partial.enter(self.ranks)
        try:
            grams = self._calibrate(experts, data, levels, partial)
            statistics = _assemble({**(known or {}), **grams}, data, info)
            if self.ranks.first:
                save(statistics, path)
            self._finish(path)
        finally:
            partial.release()
        return statistics

    def _calibrate(
        self, experts: Sequence[Checkpoint], data: Sequence[CalibrationData], levels: Sequence[str], partial: Partial
    ) -> Grams:
        decoder = Decoder(self.base.config, self.trust_remote_code, self.device)
        tasks = [samples.token_ids for samples in data]
        batch_tokens = self.recipe.settings.batch_tokens
        with tqdm(
            total=share(decoder, tasks, batch_tokens, self.ranks) * len(decoder),
            desc=f"Calibrating {', '.join(levels)}",
            unit="sample",
            unit_scale=1 / len(decoder),
            leave=False,
            disable=self.quiet or not self.ranks.first,
        ) as bar:
            return calibrate(
                decoder,
                [self.base, *experts],
                tasks,
                levels,
                batch_tokens=batch_tokens,
                partial=partial,
                ranks=self.ranks,
                progress=bar.update,
            )

    def _finish(self, path: Path) -> None:
        self.ranks.wait()
        shutil.rmtree(partial_folder(path), ignore_errors=True)

    def check_edges(self, decoder: Decoder, experts: bool) -> None:
        """Read the tensors outside the decoder layers, the base model's and perhaps the experts', for their values.

        Raises:
            SltaError: a tensor is missing, or holds NaN or Inf.
        """
        for model in [self.base, *self.experts] if experts else [self.base]:
            for name in decoder.edge_tensors():
                model.read({name: name}, decoder.base_model_prefix)

    def load_data(self, experts: Sequence[Expert]) -> list[CalibrationData]:
        """The calibration samples of experts that have a source."""
        data = [self._samples(expert) for expert in experts]
        if problems := repeated_data(zip(experts, data, strict=True)):
            raise SltaError("\n".join(problems))
        return data

    def _samples(self, expert: Expert) -> CalibrationData:
        """One expert's samples, drawn once."""
        settings = self.recipe.settings
        how = (expert, settings.samples, settings.max_tokens, settings.seed)
        if how not in self._drawn:
            if self.quiet and is_dataset(expert.calibration):
                import datasets  # slow to import, and most recipes name files

                datasets.disable_progress_bars()
            self._drawn[how] = load_calibration(
                expert.calibration,
                template=expert.template,
                tokenizer=self.tokenizer(self.recipe.base),
                expert_tokenizer=functools.partial(self.tokenizer, expert.reference),
                samples=settings.samples,
                max_tokens=settings.max_tokens,
                seed=settings.seed,
            )
        return self._drawn[how]

    def tokenizer(self, reference: ModelReference) -> PreTrainedTokenizerBase:
        """The tokenizer of the model itself, loaded once."""
        if reference not in self._tokenizers:
            self._tokenizers[reference] = load_tokenizer(reference, self.trust_remote_code, self.cache_dir)
        return self._tokenizers[reference]

    def fingerprint(self, data: Sequence[CalibrationData]) -> Fingerprint:
        """What the models, the samples and how they were drawn are, by content."""
        settings = self.recipe.settings
        return Fingerprint(
            base=self.base.fingerprint(self.cache_dir),
            experts=tuple(expert.fingerprint(self.cache_dir) for expert in self.experts),
            tokens=tokens_fingerprint([samples.sha256 for samples in data]),
            settings=settings_fingerprint(settings.samples, settings.max_tokens, settings.seed),
        )

    def _info(self, levels: Sequence[str], data: Sequence[CalibrationData], fingerprint: Fingerprint) -> Info:
        recipe, config = self.recipe, self.base.config
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
            dtype=self.base.dtype,
            versions=versions(),
            fingerprint=fingerprint,
        )


def repeated_data(drawn: Iterable[tuple[Expert, CalibrationData]]) -> list[str]:
    """Experts whose sources give the same tokens as another's, one sentence each."""
    seen: dict[str, Expert] = {}
    return [
        f"'{other.calibration}' of {other} and '{expert.calibration}' of {expert} give the same tokens: "
        "give each expert the data of its own task."
        for expert, samples in drawn
        if (other := seen.setdefault(samples.sha256, expert)) is not expert
    ]


def _assemble(grams: Grams, data: Sequence[CalibrationData], info: Info) -> Statistics:
    task = torch.tensor([index for index, samples in enumerate(data) for _ in samples.token_ids])
    tokens = torch.tensor([len(ids) for samples in data for ids in samples.token_ids])
    return Statistics(grams, task, tokens, info)


def load_tokenizer(
    reference: ModelReference, trust_remote_code: bool, cache_dir: str | None
) -> PreTrainedTokenizerBase:
    """A model's own tokenizer; the folder with a merged adapter has none.

    Raises:
        SltaError: it has none that can be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(
            reference.model.path,
            revision=reference.model.revision,
            trust_remote_code=trust_remote_code,
            cache_dir=cache_dir,
        )
    except Exception as error:  # a tokenizer's own code may raise anything
        raise SltaError(
            f"{reference.model} has no usable tokenizer, which calibration needs: {first_line(error)}."
        ) from error


def partial_folder(path: Path) -> Path:
    """Where the state of an unfinished measurement lives."""
    return path.with_name(path.name + ".partial")


def cache_file(fingerprint: Fingerprint, config: object, levels: Sequence[str]) -> Path:
    """Where statistics go that a recipe names no file for; another configuration computes other features."""
    content = [fingerprint.model_dump(mode="json"), config, sorted(levels)]
    return cache_folder() / f"{digest(content)}.safetensors"


def digest(content: object) -> str:
    """A short name for what JSON can hold, equal for equal content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def cache_folder() -> Path:
    """Where everything goes that a recipe names no place for."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mergekit-slta"
