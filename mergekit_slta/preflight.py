"""Everything about a recipe that can be known to be wrong from configs and file headers, all at once."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.merge_methods import MergeMethodSpec
from mergekit.options import MergeOptions
from transformers import PreTrainedTokenizerBase

from mergekit_slta.adapters import adapter_headers, merged_folder
from mergekit_slta.compatibility import (
    architecture_problem,
    dropped_tensors,
    missing_tensors,
    moved_tokens_problem,
    other_settings,
    quantization_problem,
    shape_problem,
    silenced,
    size,
    tied_problem,
    vocabulary_problem,
)
from mergekit_slta.data import CalibrationData, load_calibration
from mergekit_slta.decoder import Decoder
from mergekit_slta.errors import SltaError
from mergekit_slta.headers import Headers, Model, listed, open_model, weight_map
from mergekit_slta.maps import output_head
from mergekit_slta.measure import load_tokenizer, repeated_data
from mergekit_slta.needs import Needs, needs
from mergekit_slta.recipe import (
    CalibrationSettings,
    Expert,
    Recipe,
    calibrates,
    calibration_problems,
    expert_parameters,
    expert_references,
    key_problems,
    recipe_problems,
    shared_parameters,
    slice_problems,
)
from mergekit_slta.records import template_fields
from mergekit_slta.solved import ANCHOR_LEVEL, scratch_root
from mergekit_slta.sources import check_source, is_dataset
from mergekit_slta.statistics import load, resolve_statistics
from mergekit_slta.submodules import layer_submodules

LOG = logging.getLogger(__name__)

HALF = ("bfloat16", "float16")
FLOATS = (*HALF, "float32", "float64")
WORTH_A_WORD = 100_000  # bytes that a finished part of a merge takes


@dataclass(frozen=True)
class Findings:
    """What there is to say about a recipe, one sentence each.

    Attributes:
        problems: what keeps it from being merged.
        notes: what is worth knowing before it is.
    """

    problems: list[str]
    notes: list[str]


def preflight(
    config: MergeConfiguration,
    options: MergeOptions,
    spec: MergeMethodSpec,
    *,
    source: Any = None,
    out_path: str | os.PathLike[str] | None = None,
    merging: bool = True,
) -> list[str]:
    """What is wrong with a recipe, one sentence each; empty if nothing is. The arguments are those of ``examine``."""
    return examine(config, options, spec, source=source, out_path=out_path, merging=merging).problems


def examine(
    config: MergeConfiguration,
    options: MergeOptions,
    spec: MergeMethodSpec,
    *,
    source: Any = None,
    out_path: str | os.PathLike[str] | None = None,
    merging: bool = True,
    running: bool = True,
) -> Findings:
    """Look at a recipe, its models' configurations and file headers, and its calibration data; read no weights.

    Args:
        config: the recipe.
        options: mergekit's options.
        spec: the merge method's.
        source: the recipe as YAML gives it, for keys that ``config`` has no place for.
        out_path: where the merged model goes, for the space that it needs.
        merging: a merge is meant, rather than a measurement alone.
        running: the recipe is run next, which has its own words for some of what is worth knowing.
    """
    case = Case(config, options, spec, source, None if out_path is None else Path(out_path))
    checks: list[Check] = [
        recipe_text,
        openable_models,
        one_architecture,
        equal_shapes,
        tied_heads,
        quantized_models,
        adapters,
        decoder_layers,
        calibration_sources,
        calibration_data,
        statistics_file,
    ]
    notes: list[Check] = [*([] if running else [few_records]), unseen_tensors, other_configurations]
    if merging:
        checks += [tensor_types, planned_tensors, vocabularies, folders, disk_space]
        notes += [feature_merge_needs, precision, no_tokenizer, card_lookup]
    return Findings(
        list(dict.fromkeys(sentence for check in checks for sentence in check(case))),
        list(dict.fromkeys(sentence for check in notes for sentence in check(case))),
    )


def refuse_problems(config: MergeConfiguration, options: MergeOptions, spec: MergeMethodSpec) -> None:
    """Look at a recipe before mergekit plans its merge, and log what is worth knowing.

    Raises:
        SltaError: everything that is wrong with it.
    """
    findings = examine(config, options, spec)
    if findings.problems:
        raise SltaError("\n".join(findings.problems))
    for note in findings.notes if not options.quiet else ():
        LOG.warning(note)


@dataclass(frozen=True)
class Case:
    """A recipe under examination; what it names is opened once, when it is first looked at."""

    config: MergeConfiguration
    options: MergeOptions
    spec: MergeMethodSpec
    source: Any
    out_path: Path | None

    @property
    def calibrates(self) -> bool:
        return calibrates(self.spec)

    @property
    def runs_experts(self) -> bool:
        """Whether the experts read samples themselves, rather than what the base model makes of them."""
        return self.shared("teacher") is not None

    @cached_property
    def opened(self) -> dict[ModelReference, Model | SltaError]:
        """The base model and the experts, or why one cannot be opened."""
        references = expert_references(self.config)
        if self.config.base_model is not None:
            references.insert(0, self.config.base_model)
        return {reference: attempt(self._open, reference) for reference in references}

    def _open(self, reference: ModelReference) -> Model:
        return open_model(reference, self.options.trust_remote_code, self.options.transformers_cache)

    @property
    def base(self) -> Model | None:
        """The base model, if there is one and it can be opened."""
        return next((model for model in self.models if model.reference == self.config.base_model), None)

    @property
    def models(self) -> list[Model]:
        """The models that can be opened."""
        return [model for model in self.opened.values() if isinstance(model, Model)]

    @property
    def pairs(self) -> list[tuple[Model, Model]]:
        """The base model with each expert, as far as they can be opened."""
        base = self.base
        return [(base, model) for model in self.models if model is not base] if base else []

    @property
    def siblings(self) -> list[tuple[Model, Model]]:
        """The base model with each expert of its architecture and sizes."""
        return [(base, expert) for base, expert in self.pairs if not self.architecture_problem(base, expert)]

    def architecture_problem(self, base: Model, expert: Model) -> str | None:
        """Why an expert is of another architecture, unless mixing was asked for and nothing has to be run."""
        return architecture_problem(base, expert, mixed=self.options.allow_crimes and not self.calibrates)

    @cached_property
    def decoder(self) -> Decoder | SltaError | None:
        """The base model's decoder without weights, or why it has none; None where nothing is to be run."""
        if not self.calibrates or self.base is None:
            return None
        return attempt(Decoder, self.base.config, self.options.trust_remote_code)

    def shared(self, name: str) -> Any:
        """A shared parameter; the default where the recipe's value is none that the method takes."""
        for parameter in self.spec.shared_parameters:
            if parameter.name == name:
                with contextlib.suppress(Exception):  # whatever is wrong with the value is said elsewhere
                    return parameter.validate(shared_parameters(self.config).get(name, parameter.default))
                return parameter.default
        return None

    @cached_property
    def needs(self) -> Needs | SltaError | None:
        """What a feature merge takes while it runs, or why it cannot; None if the recipe is for another method."""
        if self.shared("scratch") is None or not isinstance(self.decoder, Decoder):
            return None
        most = self.shared("samples") * self.shared("max_tokens")
        drawn = [data for data in self.drawn.values() if isinstance(data, CalibrationData)]
        tokens = sum(len(ids) for data in drawn for ids in data.token_ids) + most * (len(self.experts) - len(drawn))
        compare = bool(self.shared("report"))
        found: Needs | SltaError = attempt(needs, self.decoder, len(self.experts), tokens, self.shared("head"), compare)
        return found

    @cached_property
    def experts(self) -> list[Expert]:
        """The experts with their calibration, those left out whose calibration or template is no text."""
        experts = []
        for reference, given in expert_parameters(self.config).items():
            calibration, template = given.get("calibration", ""), given.get("template", "")
            if isinstance(calibration, str) and isinstance(template, str):
                experts.append(Expert(reference, calibration, template))
        return experts

    @cached_property
    def statistics(self) -> Path | SltaError | None:
        """The statistics file that the recipe names, be it there or not."""
        name = self.shared("statistics")
        return attempt(resolve_statistics, name, self.options.transformers_cache) if name else None

    @cached_property
    def drawn(self) -> dict[Expert, CalibrationData | SltaError]:
        """The calibration samples of every expert whose source is a file, or why there are none."""
        base = self.base
        if not self.calibrates or base is None:
            return {}
        files = [expert for expert in self.experts if expert.calibration and not is_dataset(expert.calibration)]
        with silenced("mergekit_slta.data"):  # it warns again when the data are used
            return {expert: attempt(self._draw, expert, base) for expert in files}

    def _draw(self, expert: Expert, base: Model) -> CalibrationData:
        return load_calibration(
            expert.calibration,
            template=expert.template,
            tokenizer=self._tokenizer(base.reference),
            expert_tokenizer=lambda: self._tokenizer(expert.reference),
            samples=self.shared("samples"),
            max_tokens=self.shared("max_tokens"),
            seed=self.shared("seed"),
        )

    @cached_property
    def _tokenizer(self) -> Callable[[ModelReference], PreTrainedTokenizerBase]:
        options = self.options
        return functools.cache(lambda r: load_tokenizer(r, options.trust_remote_code, options.transformers_cache))


Check = Callable[[Case], list[str]]


# The recipe itself


def recipe_text(case: Case) -> list[str]:
    """Unknown, misplaced and wrong parameters, slices and modules, no base model, no expert."""
    return key_problems(case.source, case.spec) + recipe_problems(case.config, case.spec)


def tensor_types(case: Case) -> list[str]:
    """Names of types that mergekit does not know; it would say so in the middle of the merge."""
    given = {"dtype": case.config.dtype, "out_dtype": case.config.out_dtype}
    return [
        f"'{key}: {name}' is no type for a merge: write {', '.join(FLOATS[:-1])} or {FLOATS[-1]}."
        for key, name in given.items()
        if name is not None and name.removeprefix("torch.") not in FLOATS
    ]


# The models


def openable_models(case: Case) -> list[str]:
    """Models that are not there, whose configuration cannot be read, or whose files are missing or damaged."""
    return [problem.message for problem in case.opened.values() if isinstance(problem, SltaError)]


def one_architecture(case: Case) -> list[str]:
    """Experts of another architecture, depth or width than the base model."""
    return [problem for base, expert in case.pairs if (problem := case.architecture_problem(base, expert))]


def equal_shapes(case: Case) -> list[str]:
    """Tensors of an expert that differ in shape from the base model's, but for the size of the vocabulary."""
    return [problem for base, expert in case.siblings if (problem := shape_problem(base, expert))]


def tied_heads(case: Case) -> list[str]:
    """A base model that ties its output head to its embedding and an expert that does not, or the reverse."""
    return [problem for base, expert in case.siblings if (problem := tied_problem(base, expert))]


def quantized_models(case: Case) -> list[str]:
    """Models whose weights are codes, which cannot be averaged."""
    return [problem for model in case.models if (problem := quantization_problem(model))]


def planned_tensors(case: Case) -> list[str]:
    """Tensors that mergekit will ask for and a checkpoint lacks, or that it will not ask for."""
    models = [*filter(None, [case.base]), *(expert for _, expert in case.siblings)]
    missing = missing_tensors(models, case.options.trust_remote_code)
    return missing or (dropped_tensors(case.base, case.options.trust_remote_code) if case.base else [])


def vocabularies(case: Case) -> list[str]:
    """Vocabularies that differ in size or in what an id stands for, where the recipe does not have them aligned."""
    if aligns_vocabularies(case):
        return moved_ids(case) if case.runs_experts else []
    if case.options.unsafe_truncate_embeddings:
        return []
    problems = (vocabulary_problem(base, expert) for base, expert in case.siblings)
    fix = "add 'tokenizer: {source: base}' to the recipe, so that mergekit aligns them."
    return [f"{problem}: {fix}" for problem in problems if problem]


def aligns_vocabularies(case: Case) -> bool:
    """Whether mergekit gives all models one tokenizer."""
    return bool(case.config.tokenizer or case.config.tokenizer_source)


def changes_rows(case: Case) -> bool:
    """Whether mergekit gives the models' embeddings other rows than they have."""
    config, base = case.config, case.base
    made = config.tokenizer
    if base is None or (made.source if made else config.tokenizer_source) != "base":
        return True
    if made and (made.tokens or made.pad_to_multiple_of):
        return True
    tokenizer = attempt(case._tokenizer, base.reference)
    return isinstance(tokenizer, SltaError) or len(tokenizer) != size(base, "vocab_size")


def moved_ids(case: Case) -> list[str]:
    """Experts that would misread the base model's token ids, which no alignment of tensors changes."""
    problems = (moved_tokens_problem(base, expert) for base, expert in case.siblings)
    fix = f"'{case.spec.name}' runs every expert on the base model's ids, choose experts that have these."
    return [f"{problem}: {fix}" for problem in problems if problem]


# Adapters


def adapters(case: Case) -> list[str]:
    """LoRA adapters without a place to merge them in, incomplete ones, stale merges, and those of another model."""
    problems = []
    for model in case.models:
        if model.reference.lora is not None:
            headers = attempt(adapter_headers, model.reference.lora)
            if isinstance(headers, SltaError):
                problems.append(headers.message)
            elif headers is not None and (problem := adapter_problem(model, headers)):
                problems.append(problem)
            problems += adapter_cache_problems(model.reference, case.options.lora_merge_cache)
    return problems


def adapter_problem(model: Model, headers: Headers) -> str | None:
    """Why an adapter cannot be for its model, by the sizes of its matrices."""
    sizes = {}
    for name, down in headers.items():
        if name.endswith(".lora_A.weight"):
            up = headers.get(name.replace(".lora_A.", ".lora_B."))
            target = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            sizes[target] = {down.shape[1], up.shape[0] if up else down.shape[1]}
    known = {target: stored for target in sizes if (stored := model.tensor(target))}
    wrong = [target for target, stored in known.items() if set(stored.shape) != sizes[target]]
    if model.tensors is None or not sizes or (known and not wrong):
        return None
    reason = f"its matrices for {listed(wrong)} have other sizes" if wrong else f"it adapts {listed(list(sizes))}"
    return (
        f"The adapter {model.reference.lora} was not trained on {model.reference.model} ({reason}): name its own base."
    )


def adapter_cache_problems(reference: ModelReference, cache: str | None) -> list[str]:
    """Nowhere to merge an adapter, an interrupted merge that mergekit takes for one, or one that is out of date."""
    if not cache:
        return [f"{reference} is a LoRA adapter: give mergekit a folder to merge it in with --lora-merge-cache FOLDER."]
    merged = merged_folder(reference, cache)
    if not merged.exists():
        return []
    files = attempt(weight_map, merged)
    if isinstance(files, SltaError):
        return [f"An earlier merge of {reference} was interrupted and left {merged} without weights: delete it."]
    adapter = Path(reference.lora.path) if reference.lora else merged
    changed = max((file.stat().st_mtime for file in adapter.glob("adapter_*")), default=0)
    if changed > max((merged / name).stat().st_mtime for name in files):
        return [f"{merged} holds {reference} as it was before its adapter changed: delete it."]
    return []


# Calibration


def decoder_layers(case: Case) -> list[str]:
    """Models that are no decoder, slices that are not all of it, and layers without the level's submodules."""
    decoder = case.decoder
    if isinstance(decoder, SltaError):
        return [decoder.message]
    if decoder is None:
        return []
    problems = slice_problems(case.config, len(decoder)) + output_problems(case, decoder)
    level = ANCHOR_LEVEL if case.shared("anchor") == "slta" else case.shared("level")
    if level == "model":
        return problems + [
            f"'level: model' compares logits, but the expert {expert} has a vocabulary of {size(expert, 'vocab_size')} "
            f"tokens and the base model one of {size(base, 'vocab_size')}: choose another level."
            for base, expert in case.siblings
            if size(base, "vocab_size") != size(expert, "vocab_size")
        ]
    found = [attempt(layer_submodules, decoder, level, layer) for layer in decoder.one_of_each_kind()] if level else []
    messages = [problem.message for problem in found if isinstance(problem, SltaError)]
    if isinstance(case.needs, SltaError):
        problems.append(case.needs.message)
    if case.shared("anchor") == "slta":  # there is no level to choose
        messages = [f"{message.partition(': use')[0]}: choose another 'anchor'." for message in messages]
    return problems + messages


def output_problems(case: Case, decoder: Decoder) -> list[str]:
    """Experts with another vocabulary, whose output head or embeddings cannot be compared with the base model's."""
    averaged, solved = case.shared("anchor") == "average", bool(case.shared("head")) and output_head(decoder)
    fix = "choose another 'anchor'" if averaged else "set 'head: false'"
    return [
        f"The expert {expert} has a vocabulary of {size(expert, 'vocab_size')} tokens and the base model one of "
        f"{size(base, 'vocab_size')}: {fix}."
        for base, expert in case.siblings
        if (averaged or solved) and size(base, "vocab_size") != size(expert, "vocab_size")
    ] + (
        ["mergekit gives the output head the rows of the recipe's 'tokenizer': set 'head: false', or leave it out."]
        if solved and aligns_vocabularies(case) and changes_rows(case)
        else []
    )


def calibration_sources(case: Case) -> list[str]:
    """Experts without data and without statistics, and experts that share their data."""
    if not case.calibrates or case.config.base_model is None:
        return []
    there = isinstance(case.statistics, Path) and case.statistics.exists()
    recipe = Recipe(case.config.base_model, tuple(case.experts), CalibrationSettings())
    known = there or isinstance(case.statistics, SltaError)
    return calibration_problems(recipe, known, takes_statistics=case.shared("statistics") is not None)


def calibration_data(case: Case) -> list[str]:
    """Sources that cannot be read, records that cannot be turned into text, samples that the model cannot take."""
    if not case.calibrates:
        return []
    problems = same_samples(case)
    for expert in case.experts:
        drawn = case.drawn.get(expert)
        if isinstance(drawn, SltaError):
            problems.append(drawn.message)
        elif drawn is not None:
            problems += sample_problems(case, drawn)
            problems += unknown_ids(case, expert, drawn)
        elif expert.calibration:
            unread = attempt(check_unread, expert)
            problems += [unread.message] if isinstance(unread, SltaError) else []
    return problems


def same_samples(case: Case) -> list[str]:
    """Experts whose sources differ but give the same tokens."""
    drawn = [(expert, data) for expert, data in case.drawn.items() if isinstance(data, CalibrationData)]
    return [] if calibration_sources(case) else repeated_data(drawn)


def check_unread(expert: Expert) -> None:
    """Check what can be checked of a dataset, or of a file without a tokenizer.

    Raises:
        SltaError: the template is no template, or the source is malformed or missing.
    """
    if expert.template:
        template_fields(expert.template)
    check_source(expert.calibration)


def sample_problems(case: Case, drawn: CalibrationData) -> list[str]:
    """Samples that are longer than a table of positions, or have tokens that the base model has no embedding for."""
    decoder, base = case.decoder, case.base
    if not isinstance(decoder, Decoder) or base is None:
        return []
    embedding, vocabulary = decoder.model.get_input_embeddings(), size(base, "vocab_size")
    others = [module for module in decoder.model.modules() if module is not embedding]
    positions = min(
        (module.num_embeddings for module in others if isinstance(module, torch.nn.Embedding)), default=None
    )
    longest, highest = max(map(len, drawn.token_ids)), max(map(max, drawn.token_ids))
    problems = []
    if positions is not None and longest > positions:
        problems.append(
            f"Calibration source {drawn.source!r} has samples of {longest} tokens, but {base} has {positions} "
            f"positions: set 'max_tokens: {positions}' or less."
        )
    if highest >= vocabulary:
        problems.append(
            f"The tokenizer of {base} gives the token id {highest}, but the model has only {vocabulary} embeddings: "
            "it needs the tokenizer that it was trained with."
        )
    return problems


def unknown_ids(case: Case, expert: Expert, drawn: CalibrationData) -> list[str]:
    """Samples with tokens that the expert itself has no embedding for."""
    model, highest = case.opened.get(expert.reference), max(map(max, drawn.token_ids))
    if not case.runs_experts or not isinstance(model, Model) or highest < size(model, "vocab_size"):
        return []
    return [
        f"The tokenizer of the base model gives the token id {highest}, but the expert {model} has only "
        f"{size(model, 'vocab_size')} embeddings: choose one with the base model's vocabulary."
    ]


def statistics_file(case: Case) -> list[str]:
    """Statistics that cannot be read, lack the level and cannot be completed, or cannot be written."""
    path = case.statistics
    if not isinstance(path, Path):
        return [path.message] if path else []
    if not path.exists():
        parent = nearest_folder(path)
        if is_writable(parent):
            return []
        return [f"The statistics file {path} cannot be written, {parent} is no folder to write to: name another."]
    found = attempt(load, path)
    if isinstance(found, SltaError):
        return [found.message]
    level = case.shared("level")
    if level not in found.info.levels and not all(expert.calibration for expert in case.experts):
        return [
            f"{path} holds {', '.join(found.info.levels)} but not 'level: {level}': choose one of these, or give every "
            "expert its calibration, so that it can be measured."
        ]
    return []


def folders(case: Case) -> list[str]:
    """Folders for the report and for the layers of a feature merge that cannot be made or written to."""
    problems = []
    for name in ("scratch", "report"):
        given = case.shared(name)
        nearest = nearest_folder(Path(given).expanduser()) if given else None
        if nearest is not None and not is_writable(nearest):
            problems.append(f"'{name}: {given}' cannot be made, {nearest} is no folder to write to: name another.")
    return problems


# Space


def disk_space(case: Case) -> list[str]:
    """Disks that are too small for the output and for the adapters that mergekit merges first."""
    needs: dict[int, list[tuple[Path, str, int]]] = {}
    for folder, what, nbytes in [*output_need(case), *adapter_needs(case), *scratch_need(case)]:
        needs.setdefault(nearest_folder(folder).stat().st_dev, []).append((folder, what, nbytes))
    problems = []
    for entries in needs.values():
        free = shutil.disk_usage(nearest_folder(entries[0][0])).free
        if sum(nbytes for *_, nbytes in entries) > free:
            parts = " and ".join(f"{what} (about {gigabytes(nbytes)})" for _, what, nbytes in entries)
            problems.append(
                f"The disk with {entries[0][0]} has {gigabytes(free)} free, too little for {parts}: "
                "make room or choose another."
            )
    return problems


def output_need(case: Case) -> list[tuple[Path, str, int]]:
    """The folder of the merged model, and its size by the base model's."""
    if case.out_path is None or case.base is None:
        return []
    name = case.config.out_dtype or case.config.dtype
    return [(case.out_path, "the merged model", stored_bytes(case.base, name))]


def adapter_needs(case: Case) -> list[tuple[Path, str, int]]:
    """The folders of adapters that are still to be merged, and their sizes."""
    cache, name = case.options.lora_merge_cache, case.options.lora_merge_dtype
    adapted = [model for model in case.models if model.reference.lora is not None] if cache else []
    folders = {model.reference: merged_folder(model.reference, str(cache)) for model in adapted}
    return [
        (folders[model.reference], f"the merged adapter {model}", stored_bytes(model, name))
        for model in adapted
        if not folders[model.reference].exists()
    ]


def scratch_need(case: Case) -> list[tuple[Path, str, int]]:
    """The folder that a feature merge is solved into, and its size."""
    needed = case.needs
    if not isinstance(needed, Needs):
        return []
    return [(scratch_root(case.shared("scratch")), "the layers as they are solved", needed.disk)]


def stored_bytes(model: Model, dtype: str | None) -> int:
    """The bytes that a model's tensors take in a type, or in those that they have."""
    tensors = (model.tensors or {}).values()
    kind = getattr(torch, (dtype or "").removeprefix("torch."), None)
    if not isinstance(kind, torch.dtype):
        return sum(stored.nbytes for stored in tensors)
    return sum(stored.count * kind.itemsize for stored in tensors)


def nearest_folder(path: Path) -> Path:
    """The path itself, or the nearest of the folders above it that is there."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def is_writable(folder: Path) -> bool:
    """Whether files and folders can be made in it."""
    return folder.is_dir() and os.access(folder, os.W_OK)


def gigabytes(nbytes: int) -> str:
    """A size in words."""
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:,.1f} MB"


# What is worth knowing


def few_records(case: Case) -> list[str]:
    """Sources with fewer usable records than asked."""
    asked = case.shared("samples")
    drawn = [data for data in case.drawn.values() if isinstance(data, CalibrationData)]
    return [
        f"Calibration source {data.source!r} has {len(data.records)} usable records, 'samples' asks for {asked}."
        for data in drawn
        if len(data.records) < asked
    ]


def unseen_tensors(case: Case) -> list[str]:
    """Models whose tensors are only seen after a download."""
    return [
        f"The weights of {model} are pickled on the Hub: whether they fit shows after their download."
        for model in case.models
        if model.tensors is None
    ]


def other_configurations(case: Case) -> list[str]:
    """Experts whose configuration makes them compute something else from the same weights."""
    measured = ", and the expert is measured with that too" if case.calibrates else ""
    return [
        f"The configuration of the expert {expert} differs from that of the base model {base} in {', '.join(names)}: "
        f"the merged model gets the base model's{measured}."
        for base, expert in case.siblings
        if (names := other_settings(base, expert))
    ]


def feature_merge_needs(case: Case) -> list[str]:
    """The memory and the disk space that a feature merge takes while it runs."""
    needed = case.needs
    if not isinstance(needed, Needs):
        return []
    root = scratch_root(case.shared("scratch"))
    said = [
        f"'{case.spec.name}' takes about {gigabytes(needed.memory)} of memory while it solves, and "
        f"{gigabytes(needed.disk)} on the disk with {root} until the output is written."
    ]
    left = sum(file.stat().st_size for file in root.glob("featcal-*/*"))
    if left >= WORTH_A_WORD:
        said.append(
            f"{root} holds {gigabytes(left)} of merges that did not finish: this one goes on if it is among them; "
            "delete the folders featcal-* of those that are not wanted."
        )
    return said


def precision(case: Case) -> list[str]:
    """Merges in half precision, and of models in several precisions; feature merges are solved in single precision."""
    if case.runs_experts:
        return []
    config = case.config
    given = (config.dtype or "").removeprefix("torch.")
    stored = {str(getattr(model.config, "dtype", None)).removeprefix("torch.") for model in case.models}
    if given in HALF or (not given and stored & set(HALF)):
        half = given or next(name for name in HALF if name in stored)
        return [
            f"Merging in {half} rounds at every step: better round once, with 'dtype: float32' and "
            f"'out_dtype: {config.out_dtype or half}'."
        ]
    return []


def no_tokenizer(case: Case) -> list[str]:
    """A base model without a tokenizer to copy, over which mergekit prints a traceback after the merge."""
    base, config = case.base, case.config
    copies = case.options.copy_tokenizer and not (config.tokenizer or config.tokenizer_source)
    if not copies or base is None or base.folder is None or any(base.folder.glob("tokenizer*")):
        return []
    return [
        f"{base} has no tokenizer, so the merged model gets none: mergekit says so with a traceback, which is harmless."
    ]


def card_lookup(case: Case) -> list[str]:
    """Relative paths that mergekit takes for names on the Hub when it writes the model card, after the weights."""
    if not case.options.write_model_card:
        return []
    paths = [path.path for reference in case.opened for path in (reference.model, reference.lora) if path]
    return [
        f"mergekit looks {path} up on the Hub when it writes the model card, and fails there without a network: "
        f"write ./{path}, or merge with --no-write-model-card."
        for path in paths
        if os.path.exists(path) and path[0] not in "./~" and path.count("/") <= 1
    ]


# Tools


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, or the SltaError that it raised."""
    try:
        return function(*arguments)
    except SltaError as error:
        return error
