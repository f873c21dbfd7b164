"""Re-read a finished merge, one tensor at a time, and say whether programs can use it."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from mergekit.common import ModelPath, ModelReference, get_auto_cls
from mergekit.config import MergeConfiguration
from mergekit.io.lazy_tensor_loader import LazyTensorLoader

from mergekit_slta.checks.models import other_computation
from mergekit_slta.checks.tokenizers import GENERATION
from mergekit_slta.engine.loop import progress_bar
from mergekit_slta.engine.partial import require_finished
from mergekit_slta.errors import SltaError, as_note, first_line, printable
from mergekit_slta.files import MANIFEST_OF_MERGE
from mergekit_slta.models.checkpoint import is_finite
from mergekit_slta.models.fingerprint import fingerprint_of
from mergekit_slta.models.headers import (
    CHAT_TEMPLATES,
    PROCESSOR,
    TOKENIZER_FILES,
    Headers,
    Model,
    folder_headers,
    refuse_adapter_in,
)
from mergekit_slta.models.layout import silenced
from mergekit_slta.output import manifest
from mergekit_slta.recipe.experiment import Experiment, Options, opened
from mergekit_slta.recipe.recipe import RecipeOrFile
from mergekit_slta.recipe.settings import SETTINGS
from mergekit_slta.words import counted, listed


@dataclass(frozen=True, repr=False)
class Verification:
    """What a second look at a merged model found; printed, it is sentences."""

    problems: tuple[str, ...]  # what is wrong, a sentence each; empty for a sound merge
    tensors: int  # how many were read
    notes: tuple[str, ...] = ()  # what programs may miss, a sentence each

    def __str__(self) -> str:
        heading = f"{counted(len(self.problems), 'problem')} found, {self.tensors} tensors read."
        if not self.problems:
            heading = f"Nothing is wrong with the names, shapes, types and sampled values of {self.tensors} tensors. "
            heading += "transformers loads the folder, which has all tensors of the model."
        return "\n".join([heading, *(f"- {printable(each)}" for each in self.problems), *map(as_note, self.notes)])

    __repr__ = __str__


def verify(recipe: RecipeOrFile, merged: str | os.PathLike[str], **options: Unpack[Options]) -> Verification:
    """Re-read a merged model tensor by tensor, and check that programs can use it.

    Its tensors must match the hash in its manifest, the recipe must be the one recorded there, and the values must
    be finite. transformers loads the folder, by its own configuration and without its weights;
    configuration and tokenizer must be the base model's, but for what a merge changes. The base model's other tensors
    and files are looked for. The experts are opened only where the manifest has other names. Merges by mergekit's own
    methods have no manifest.

    Args:
        recipe: the recipe that was merged, or its file.
        merged: the folder that the merge was written to.
        options: see ``Options``.

    Raises:
        SltaError: the recipe or its base model cannot be opened, or the merged model's files cannot be read.
    """
    experiment = opened(recipe, options)
    folder, config = Path(merged).expanduser(), experiment.recipe.config
    require_finished(folder)
    refuse_adapter_in(folder)
    base = experiment.model(config.base_model or config.referenced_models()[0])
    merged_model, notes = ModelReference(model=ModelPath(path=str(folder))), list[str]()
    stored, ours = folder_headers(folder), config.merge_method in SETTINGS
    problems = [*_not_as_merged(experiment, folder, ours), *tensor_faults(folder, stored, experiment.quiet)]
    try:
        written = experiment.model(merged_model)
    except SltaError as error:
        problems.append(str(error))
    else:
        problems += _loading_problems(experiment, base, written, stored)
    source = experiment.recipe.tokenizer_source
    owner = experiment.recipe.tokenizer_owner if isinstance(source, ModelReference) else base.reference
    problems += _tokenizer_problems(experiment, owner, merged_model)
    base_folder = ModelReference(model=base.reference.model).local_path(experiment.options.transformers_cache)
    notes += _lacking_files(Path(base_folder), folder, config, source is not None)
    return Verification(tuple(problems), len(stored), tuple(notes))


def _not_as_merged(experiment: Experiment, folder: Path, ours: bool) -> Iterator[str]:
    """In what a folder differs from what its manifest says, and the recipe from the one that was merged."""
    recorded = manifest.read(folder)
    if recorded is None:
        if ours:
            none = f"has no {MANIFEST_OF_MERGE}, so it holds no merge by this package"
            yield f"{folder} {none}: is it the recipe's folder?"
        return
    if not ours:
        yield f"{folder} holds a merge by {recorded.method}: is this the recipe of this folder?"
        return
    made = recorded.model_copy(update={"versions": {}})
    clauses = manifest.differences(made, manifest.describe(experiment, whole=False))
    if clauses:
        with suppress(SltaError):  # models in another place are known by their content, if they are there
            clauses = manifest.differences(made, manifest.describe(experiment))
    if clauses:
        yield f"{folder} holds another merge, which had {listed(clauses)}: is this the recipe of this folder?"
    if recorded.sha256 and fingerprint_of(folder) != recorded.sha256:
        yield "The tensors have other names, shapes, types or values than those that the merge wrote: merge again."


def tensor_faults(folder: Path, names: Collection[str], quiet: bool) -> Iterator[str]:
    """Name the tensors of a folder that hold values that are not finite."""
    # mergekit's lazy reader of pickled files does not find what its own writer has written.
    loader, broken = LazyTensorLoader.from_disk(str(folder), lazy_unpickle=False), list[str]()
    with progress_bar("Verifying", [folder], len(names), quiet) as progress:
        for name in names:
            tensor = loader.get_tensor(name)
            if not is_finite(tensor):
                broken.append(f"{name} ({int((~tensor.double().isfinite()).sum())})")
            progress(name, 1)
    if broken:
        yield f"Tensors have values that are not finite: {listed(broken)}; merge in 'dtype: float32'."


def _loading_problems(experiment: Experiment, base: Model, written: Model, stored: Headers) -> Iterator[str]:
    """Say how transformers loads a merged folder onto the meta device, by its own configuration, reading no weights.

    Also named are tensors that transformers ignores, such as those of a head for multi-token prediction, where the
    base model has them and the folder does not.
    """
    sliced = experiment.recipe.config.slices or experiment.recipe.config.modules  # by mergekit's own methods
    may_differ = ["num_nextn_predict_layers", "mtp_num_hidden_layers"]  # of a head that many checkpoints lack
    may_differ += ["num_hidden_layers", "layer_types"] if sliced else []
    names = other_computation(base.config, written.config, whole=True)
    names = [name for name in names if name.rpartition(".")[2] not in may_differ]
    names += ["architectures"] * (base.architecture != written.architecture)
    if names:
        yield f"The folder's config.json differs from that of {base} in {listed(names)}: copy these entries from there."
    try:
        with silenced(logging.CRITICAL):  # transformers prints a table of missing keys
            _, info = get_auto_cls(written.architecture).from_pretrained(
                written.folder,
                trust_remote_code=base.trust_remote_code,
                device_map="meta",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except Exception as error:  # of any kind, as transformers reads the folder by code of many models
        yield f"transformers cannot load the folder ({first_line(error)})."
        return
    outside = base.layout(base.built).outside
    if missing := sorted(info["missing_keys"]):
        yield f"transformers misses {listed(missing)} in the folder, and would initialize them at random."
    if mismatched := sorted({name for name, *_ in info["mismatched_keys"]}):
        yield f"{listed(mismatched)} have other shapes than the folder's config.json gives."
    if unexpected := sorted({*info["unexpected_keys"]} & stored.keys() - {*outside}):
        yield f"transformers does not know {listed(unexpected)}."
    if lost := sorted(name for name in outside if name not in stored):
        yield (
            f"{listed(lost)} of {base} are missing: transformers ignores them, but programs for multi-token "
            "prediction need them."
        )


def _tokenizer_problems(experiment: Experiment, owner: ModelReference, merged: ModelReference) -> Iterator[str]:
    """A tokenizer of the merge that cannot be used, or has other ids than that of the model that it is to be of."""
    if not any(Path(merged.model.path, name).is_file() for name in TOKENIZER_FILES[:3]):
        if experiment.recipe.tokenizer_source is not None:
            yield f"{merged} has no tokenizer, which the recipe's 'tokenizer' asks for: merge again."
        return
    try:
        ids = experiment.tokenizer(merged).get_vocab()
    except SltaError as error:
        yield str(error)
        return
    with suppress(SltaError):  # the owner may be gone, or have none
        rows = experiment.model(owner).vocabulary or len(ids)
        known = {token: index for token, index in experiment.tokenizer(owner).get_vocab().items() if index < rows}
        if moved := sorted(token for token, index in known.items() if ids.get(token) != index):
            yield f"The tokenizer in {merged} is not that of {owner}: it has no or another id for {listed(moved)}."


def _lacking_files(base: Path, folder: Path, config: MergeConfiguration, has_tokenizer: bool) -> Iterator[str]:
    """Name files of the base model's folder that a merge with its tokenizer has too, where it lacks them."""
    of_tokenizer = (GENERATION, *TOKENIZER_FILES, *(() if config.chat_template else CHAT_TEMPLATES))
    patterns = PROCESSOR if has_tokenizer else (*PROCESSOR, *of_tokenizer)
    names = {file.relative_to(base).as_posix() for pattern in patterns for file in base.glob(pattern)}
    if lacking := sorted(name for name in names if not (folder / name).is_file()):
        fix = "copy them, because programs that convert or serve the model need them"
        yield f"{', '.join(lacking)} of {base} are not in the folder: {fix}."
