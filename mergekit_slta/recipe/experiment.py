"""A recipe with its models and data, each opened when the checks or the run first use it."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from functools import cached_property
from typing import Any, TypedDict

import click
import torch
from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from mergekit.tokenizer.build import TokenizerInfo, build_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mergekit_slta.data.sources import CalibrationData, CalibrationSource, is_dataset, read_records, source_key
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.errors import MachineError, SltaError, all_of, first_line, reading, refuse
from mergekit_slta.files import commit, digest, versions
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.trace import tail_problem, trace
from mergekit_slta.levels import LEVELS
from mergekit_slta.models import hub
from mergekit_slta.models.adapters import tokenizer_folder
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.models.fingerprint import hashed_computation
from mergekit_slta.models.headers import Model, folder_with, open_model
from mergekit_slta.models.layout import Layout
from mergekit_slta.recipe.recipe import EQUAL_DATA, Recipe, RecipeOrFile, Task, loaded, plain
from mergekit_slta.recipe.settings import CalibrationSettings
from mergekit_slta.words import counted, enumerated

TOKENIZER = "tokenizer.json"


class Options(TypedDict, total=False):
    """The options of a run, which every function that opens models takes, with mergekit's meanings."""

    device: str | torch.device  # where to compute: "cpu" (the default), "cuda", or a GPU such as "cuda:1"
    trust_remote_code: bool  # run the Python code that comes with a model (dangerous)
    lora_merge_cache: str | None  # the folder to merge LoRA adapters in; without one, adapters are refused
    transformers_cache: str | None  # the folder for downloaded files; the Hub's own cache by default
    quiet: bool  # no progress bars and no notes


def merge_options(options: Mapping[str, Any], dtype: str | None) -> MergeOptions:
    """mergekit's options, with the type to merge adapters in, unless they name one.

    It is the recipe's ``dtype`` where that is wide: a base model's own bfloat16 rounds half of a small change away.
    Otherwise it is the base model's, as a narrower one would change the weights that the adapter leaves alone.
    """
    wide = dtype if (dtype or "").removeprefix("torch.") in ("float32", "float64") else None
    return MergeOptions(**{**options, "lora_merge_dtype": options.get("lora_merge_dtype") or wide})


class Experiment:
    """The opened models and data of a recipe; ``ranks`` share the work, and the options are mergekit's.

    A TypeError if mergekit has no option of a given name.
    """

    def __init__(self, recipe: Recipe, *, ranks: Ranks | None = None, **options: Any) -> None:
        self.recipe = recipe
        self.ranks = ranks or Ranks()
        if unknown := sorted(options.keys() - MergeOptions.model_fields.keys()):
            raise TypeError(f"mergekit has no option {', '.join(unknown)}.")
        self.options = merge_options(options, recipe.config.dtype)
        self.device = device_of(self.options.device, self.options.multi_gpu)  # where the layers run
        self.quiet = self.options.quiet or not self.ranks.first  # no progress bars: the first process shows them
        self.drawn: dict[tuple[Task, int], CalibrationData] = {}  # by task and number of samples
        # Those that were opened, with their records; whoever has drawn all samples clears it.
        self.sources: dict[tuple[Task, str], CalibrationSource] = {}
        self._models: dict[ModelReference, Model] = {}
        self._tokenizers: dict[ModelReference, PreTrainedTokenizerBase] = {}
        LoaderCache().setup(self.options)

    def same_options(self) -> Iterator[str]:
        """The options that another command needs to find and run the same models."""
        options = self.options
        if options.transformers_cache:
            yield from ("--transformers-cache", options.transformers_cache)
        if options.lora_merge_cache and any(reference.lora for reference in self.recipe.references):
            yield from ("--lora-merge-cache", options.lora_merge_cache)
        if options.device != "cpu":
            yield from ("--device", str(options.device))
        if options.trust_remote_code:
            yield "--trust-remote-code"

    # Models

    def model(self, reference: ModelReference) -> Model:
        """A model's configuration and the headers of its files; see ``open_model``."""
        if reference not in self._models:
            options, known = self.options, self._models.get(ModelReference(model=reference.model))
            parts = [part for part in (reference.model, reference.lora) if part]
            names = {*map(str, (reference, *parts))} - {part.path for part in parts}
            if folder := next(filter(os.path.isdir, names), ""):
                raise SltaError(f"mergekit takes the name of the folder {folder} apart at '+' or '@': rename it.")
            model = known or open_model(reference, options.trust_remote_code, options.transformers_cache)
            self._models[reference] = dataclasses.replace(model, reference=reference)  # known: an adapter's base model
        return self._models[reference]

    @cached_property
    def base(self) -> Checkpoint:
        return Checkpoint(self.model(self.recipe.base))

    @cached_property
    def checkpoints(self) -> list[Checkpoint]:
        """The weights of the base model, then of the experts in the recipe's order."""
        return [self.base, *(Checkpoint(self.model(expert.reference)) for expert in self.recipe.experts)]

    @cached_property
    def decoder(self) -> Decoder:
        """The base model's decoder, without weights, traced on the CPU; an SltaError if it is no decoder-only model."""
        base = self.model(self.recipe.base)
        return trace(base.config, self.options.trust_remote_code, built=base.built)

    @property
    def layout(self) -> Layout:
        """How the base model's checkpoint, its adapter merged, stores the model."""
        return self.base.model.layout(self.model(self.recipe.base).built)

    def open(self) -> None:
        """Have mergekit download all models, and merge adapters; from now on changes of their files are noticed."""
        slow = [str(model) for model in self.recipe.references if model.lora or self.model(model).folder is None]
        if slow and self.ranks.first and not self.quiet:
            click.echo(f"Downloading models and merging adapters: {enumerated(slow)}", err=True)
        # In any other process than the first one transformers saves no weights, which merging adapters takes.
        if self.ranks.count > 1 and any(reference.lora for reference in self.recipe.references):
            with self.ranks.one_refusal():
                _ = self.checkpoints if self.ranks.first else None
        with self.ranks.one_refusal():
            _ = self.checkpoints

    def check_edges(self, experts: bool) -> None:
        """Refuse NaN or Inf in the base model's tensors outside the decoder layers, and in the experts' if asked to."""
        for model in self.checkpoints if experts else [self.base]:
            for name in self.decoder.edge_tensors:
                model.read({name: name}, self.decoder.model)

    def require_levels(self, levels: Sequence[str]) -> None:
        """Refuse what is no level, and ``model`` where vocabularies or the models' tails let nobody compare logits."""
        refuse(f"'{level}' is not one of {', '.join(LEVELS)}." for level in levels if level not in LEVELS)
        if "model" in levels:
            others = self.other_tokens(*self.recipe.references)
            refuse(f"'level: model' compares logits, but the {other}: choose another level." for other in others)
            refuse(filter(None, [tail_problem(self.decoder)]))

    # Data

    def tokenizer(self, reference: ModelReference) -> PreTrainedTokenizerBase:
        """A model's tokenizer; for an adapter its own, or else that of its base model."""
        if reference not in self._tokenizers:
            with reading(reference, "has no usable tokenizer", "get its files, or copy those of a model with its ids"):
                adapter = reference.lora and tokenizer_folder(reference.lora, self.options.transformers_cache)
                if reference.lora and not adapter:
                    return self.tokenizer(ModelReference(model=reference.model))
                made = AutoTokenizer.from_pretrained(
                    str(adapter or reference.model.path),
                    revision=None if adapter else reference.model.revision,
                    trust_remote_code=self.options.trust_remote_code,
                    cache_dir=self.options.transformers_cache,
                    mistral_format=False,  # mistral-common's own class tells no token's place in the text
                )
                if not made.get_vocab().keys() - {*made.all_special_tokens}:
                    raise ValueError("it has no files, so that transformers makes up one without words")
                self._tokenizers[reference] = made
        return self._tokenizers[reference]

    def other_tokens(self, *models: ModelReference, used: Collection[int] = ()) -> list[str]:
        """How models' tokens differ from the base model's, a clause for each: in their number, then in the ids of some.

        Ids are compared where tokenizers are on this machine, or can be downloaded. If ids that are ``used`` are given,
        only they count.
        """

        def ids(model: ModelReference) -> dict[str, int]:
            try:
                folder = folder_with((TOKENIZER,), model.model, self.options.transformers_cache)
            except hub.HUB_ERRORS:
                return {}
            return self.tokenizer(model).get_vocab() if (folder / TOKENIZER).is_file() else {}

        known = self.samples_tokenizer.get_vocab() if used else ids(self.recipe.base)
        known = {token: index for token, index in known.items() if index in used or not used}
        own = self.model(self.recipe.base).vocabulary
        sizes = [
            f"expert {model} has a vocabulary of {size} tokens, the base model {self.recipe.base} one of {own}"
            for model in models
            if not used and (size := self.model(model).vocabulary) != own
        ]
        return sizes + [
            f"tokenizers of {model} and the base model {self.recipe.base} have different ids for "
            f"{counted(len(moved), 'token')} (such as {min(moved)!r})"
            for model, theirs in zip(models, map(ids, models), strict=True)
            if (moved := [token for token, index in known.items() if theirs.get(token, index) != index])
        ]

    @cached_property
    def aligned(self) -> TokenizerInfo | None:
        """What mergekit makes of the recipe's tokenizer, with each model's rows for its ids; None without one."""
        recipe, settings = self.recipe, self.recipe.config.tokenizer
        if recipe.tokenizer_source is None:
            return None
        for reference in recipe.references:
            self.model(reference)  # a misspelt name is refused before mergekit logs it
            self.tokenizer(reference)
        of_models, tokens = (recipe.base, recipe.references), [*((settings and settings.tokens) or ())]
        with reading("The recipe's 'tokenizer'", "cannot be made", "name another"), redirect_stderr(io.StringIO()):
            # Its progress bar cannot be switched off.
            return build_tokenizer(*of_models, recipe.tokenizer_source, self.options.trust_remote_code, tokens)

    @cached_property
    def samples_tokenizer(self) -> PreTrainedTokenizerBase:
        """The merged model's tokenizer if all models that run on the samples have its ids, else the base model's."""
        self.model(self.recipe.base)  # which says what is wrong with the whole folder
        if (aligned := self.aligned) is None:
            return self.tokenizer(self.recipe.base)
        running = self.recipe.references if self.recipe.settings.runs_experts else [self.recipe.base]
        ids = aligned.tokenizer.get_vocab()
        tokens = {index: token for token, index in ids.items()}
        for model in running:
            added, moved = self.tokenizer(model).added_tokens_decoder, False
            for token, index in aligned.original_vocabs.get(model, {}).items():
                # A fine-tune may give a reserved token, which no text holds, another name, and train its embedding.
                moved |= ids.get(token, index) != index or (index not in added and tokens.get(index, token) != token)
            if moved or max(tokens) >= self.model(model).vocabulary:
                return self.tokenizer(self.recipe.base)
        return aligned.tokenizer

    def draw(self, task: Task, count: int | None = None) -> CalibrationData:
        """Draw a task's calibration samples, once: ``count`` of them, by default the task's number.

        An SltaError also where a model that runs on them cannot read them.
        """
        if (key := (task, count or task.samples)) in self.drawn:
            return self.drawn[key]
        drawn, base = self.source(task, task.calibration).draw(key[1]), self.model(self.recipe.base)
        highest, longest = max(map(max, drawn.token_ids)), max(map(len, drawn.token_ids))
        if highest >= base.vocabulary:
            raise SltaError(
                f"The tokenizer of {base} gives the token id {highest}, but the model has only {base.vocabulary} "
                "embeddings: put the model's original tokenizer into its folder."
            )
        if self.recipe.settings.runs_experts and highest >= (expert := self.model(task.reference)).vocabulary:
            raise SltaError(
                f"The tokenizer of the base model gives the token id {highest}, but the expert {expert} has only "
                f"{expert.vocabulary} embeddings: choose an expert with the base model's vocabulary."
            )
        embedding = self.decoder.model.get_input_embeddings()
        others = [module for module in self.decoder.tower.modules() if module is not embedding]
        rows = [module.num_embeddings for module in others if isinstance(module, torch.nn.Embedding)]
        most = getattr(self.decoder.model.config.get_text_config(), "max_position_embeddings", None) or longest
        if longest > most and max(rows, default=0) >= most:  # a smaller table is of segments, and rotations need none
            raise SltaError(
                f"Calibration source {drawn.source!r} has prompts of {longest} tokens, but {base} has {most} "
                f"positions: set 'max_tokens: {most}' or less."
            )
        self.drawn[key] = drawn
        return drawn

    def held_out(self, task: Task, count: int, merges: Sequence[Recipe] = ()) -> CalibrationData:
        """``count`` records of the task that are no calibration samples of any task, here or in other merges.

        They are of the task's ``evaluation`` source if it has one. A record is left out because of its tokens: the
        merges may name other files that hold it, too.
        """
        used = [self.draw(task), *self.drawn.values()]
        keys = {source_key(source) for source in (task.calibration, task.evaluation) if source}
        for recipe in merges:
            for other in recipe.tasks:
                name, seed = other.calibration, recipe.settings_of(CalibrationSettings).seed
                with suppress(SltaError):  # a file that is not there, or in which nothing fits this task's template
                    if source_key(name) in keys or other.reference == task.reference:
                        used.append(self.source(task, name).draw(other.samples, seed=seed, quiet=True))
        return self.source(task, task.evaluation or task.calibration).draw(count, used)

    def source(self, task: Task, name: str) -> CalibrationSource:
        """A source that is read as the task's records are, from ``sources`` if it is there."""
        if self.quiet and is_dataset(name):
            import datasets  # slow to import, and most recipes name files

            datasets.disable_progress_bars()
        if (task, name) not in self.sources:
            settings = self.recipe.settings_of(CalibrationSettings)
            self.sources[task, name] = CalibrationSource(
                source=name,
                records=read_records(name),  # whose faults are known without a tokenizer
                template=task.template,
                tokenizer=self.samples_tokenizer,
                load_expert_tokenizer=functools.partial(self.tokenizer, task.reference),
                max_tokens=settings.max_tokens,
                seed=settings.seed,
            )
        return self.sources[task, name]

    def load_data(self, tasks: Sequence[Task], count: int | None = None) -> list[CalibrationData]:
        """The calibration samples of tasks that have a source: ``count`` of each, by default the task's number.

        The check before a run already draws them, and the run takes them from ``drawn``. An SltaError if sources give
        no samples, some that a model cannot read, or the same for two experts.
        """
        data = all_of(functools.partial(self.draw, task, count) for task in tasks)
        seen: dict[str, Task] = {}
        refuse(
            f"'{other.calibration}' of {other} and '{task.calibration}' of {task} hold the same prompts: give each "
            f"expert prompts of its own task, {EQUAL_DATA}."
            for task, drawn in zip(tasks, data, strict=True)
            if task.reference != self.recipe.base and (other := seen.setdefault(drawn.sha256, task)) is not task
        )
        return data

    def identity(self, data: Sequence[CalibrationData], **more: Any) -> dict[str, Any]:
        """What decides the layers of a run: versions, models, samples and ``more``; values that JSON can hold.

        The size, time and inode of every file also differ after an edit of a few rows, which a content's sample of the
        bytes does not show.
        """
        adapters = [self.options.lora_merge_dtype] if any(one.reference.lora for one in self.checkpoints) else []
        stamps = digest([*(sorted(model.stamps.values()) for model in self.checkpoints), *adapters])
        # A clone's state also differs by files that compute nothing.
        known = versions() | ({"commit": "clone"} if commit().startswith("clone") else {})
        return {
            "method": self.recipe.config.merge_method,
            "versions": known,
            "models": [model.fingerprint for model in self.checkpoints],
            "config": hashed_computation(self.base.config),
            "tokens": [samples.sha256 for samples in data],
            "files": stamps,
            **more,
        }


def device_of(device: object, multi_gpu: bool) -> str:
    """Where layers run, by mergekit's options: with ``multi_gpu`` alone, its own device stays the CPU."""
    return "cuda" if multi_gpu and str(device) == "cpu" else str(device)


def require_device(name: str) -> None:
    """Refuse a device that PyTorch does not know, or that this machine lacks."""
    try:
        torch.ones((), device=name).add(1).item()
    except Exception as error:  # of a kind that differs between devices
        raise MachineError(
            f"PyTorch cannot compute on the device '{name}' ({first_line(error)}): leave --device, --cuda and "
            "--multi-gpu out to compute on the CPU (a Mac's GPU is '--device mps'), or install what the device needs."
        ) from error


def opened(recipe: RecipeOrFile | Experiment, options: Options) -> Experiment:
    """The experiment of a recipe, on a device that can compute; an opened one has its own options."""
    if isinstance(recipe, Experiment):
        return recipe
    experiment = Experiment(loaded(recipe), **plain(options))
    require_device(experiment.device)
    return experiment
