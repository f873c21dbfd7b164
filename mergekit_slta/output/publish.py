"""Publish a merged model on the Hugging Face Hub: checked, and without what does not belong to it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import CommitOperationAdd, HfApi
from mergekit.common import ModelPath, ModelReference

from mergekit_slta import files
from mergekit_slta.checks.folder import code_of, refuse_links
from mergekit_slta.checks.models import complete_checkpoints
from mergekit_slta.engine.partial import require_finished
from mergekit_slta.errors import SltaError, all_of, as_note, reading, refuse
from mergekit_slta.files import MANIFEST_OF_MERGE, RECIPE_OF_MERGE, STATISTICS_OF_MERGE
from mergekit_slta.models import hub
from mergekit_slta.models.headers import CHAT_TEMPLATES, PROCESSOR, TOKENIZER_FILES, open_model, weight_map
from mergekit_slta.output import card
from mergekit_slta.output.verify import tensor_faults
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.recipe.settings import SltaSettings
from mergekit_slta.tables import as_size
from mergekit_slta.words import listed

_FOUND = ("generation_config.json", *TOKENIZER_FILES, *CHAT_TEMPLATES, *PROCESSOR)  # by programs, if they are there
# What belongs to a model beside its weights. Anything else in the folder stays where it is.
PUBLISHED = (
    *(card.CARD, RECIPE_OF_MERGE, STATISTICS_OF_MERGE, MANIFEST_OF_MERGE),
    *("config.json", "model.safetensors.index.json", *_FOUND),
    *(f"{name}{end}" for name in ("LICENSE", "LICENCE", "NOTICE") for end in ("", ".txt", ".md")),
    *("LICENSE-CODE", "LICENSE-MODEL"),
)
# The texts that may hold paths of the machine; a tokenizer's vocabulary must stay as it is.
_TEXTS = (card.CARD, "config.json", "tokenizer_config.json")
_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True, repr=False)
class Publication:
    """What is published of a merged model; printed, it is a list."""

    repository: str  # ``ORG/NAME`` on the Hub
    files: tuple[tuple[str, int], ...]  # with their sizes in bytes
    left_out: tuple[str, ...]  # what else lies in the folder, and stays there
    notes: tuple[str, ...]  # what is worth knowing, one sentence each
    private: bool = False  # whether a repository that is made for it is private, or as the organization's default says
    address: str | None = None  # where the model is now; None if nothing was uploaded

    def __str__(self) -> str:
        size = as_size(sum(size for _, size in self.files))
        done = f"Published as {self.address}" if self.address else f"Would be uploaded to {self.repository}"
        lines = [f"{done}: {len(self.files)} files, {size}."]
        lines += [f"  {name} ({as_size(size)})" for name, size in self.files]
        lines += [f"Not uploaded: {', '.join(self.left_out)}."] if self.left_out else []
        seen = "private" if self.private else "private or public, by the organization's setting"
        lines += [] if self.address else [f"Visibility: {seen}; an existing repository keeps its own."]
        return "\n".join([*lines, *map(as_note, self.notes)])

    __repr__ = __str__


def publish(
    merged: str | os.PathLike[str],
    repository: str,
    *,
    private: bool = False,
    dry_run: bool = False,
    trust_remote_code: bool = False,
    quiet: bool = False,
) -> Publication:
    """Check a merged model, bring its card up to date, and upload it to the Hugging Face Hub.

    All that belongs to the model is uploaded in one commit, with paths of this machine taken out of the texts;
    calibration data, caches and unfinished files never are.

    Args:
        merged: the folder that the merge was written to.
        repository: ``ORG/NAME``; it is created if it does not exist.
        private: make it private; by default the organization's setting decides. An existing repository keeps its own.
        dry_run: check, and say what would be uploaded, but write and upload nothing.
        trust_remote_code: run the Python code that comes with the model.
        quiet: no progress bars.

    Raises:
        SltaError: everything that is wrong with the model, one sentence each, or why the Hub does not take it.
    """
    folder = Path(merged).expanduser()
    if not _NAME.fullmatch(repository):
        raise SltaError(f"'{repository}' cannot be the name of a repository on the Hub: write ORG/NAME.")
    require_finished(folder)
    tokenizer, recipe = _checked(folder, trust_remote_code, quiet)
    notes = []
    if not tokenizer.chat_template:
        notes.append(
            "The model has no chat template, which chat programs need to turn a conversation into text. If an expert "
            "is a chat model, merge again with 'tokenizer: {source: EXPERT}', which brings its template and the "
            "template's tokens."
        )
    paths = dict.fromkeys(path.path for path in card.model_paths(recipe))
    if local := [path for path in paths if os.path.isabs(path) or os.path.isdir(path)]:
        notes.append(
            f"The recipe names folders of this machine ({listed(local)}), so others cannot run it as it is: write "
            f"their Hub ids in {RECIPE_OF_MERGE} and in the card, {card.CARD}."
        )
    text = card.merge_card(folder, recipe)
    contents = dict(sorted({**_contents(folder, recipe), card.CARD: text.encode()}.items()))
    pairs = contents.items()
    sizes = tuple((name, len(file) if isinstance(file, bytes) else file.stat().st_size) for name, file in pairs)
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    publication = Publication(repository, sizes, tuple(sorted(present - contents.keys())), tuple(notes), private)
    if dry_run:
        return publication
    files.write(folder / card.CARD, text.encode())
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=file) for name, file in pairs]
    try:
        api = HfApi()
        api.create_repo(repository, private=private or None, exist_ok=True)
        there = [name for name in api.list_repo_files(repository) if name not in contents]
        kinds = [(own, own.count("/")) for own in ("model*.safetensors*", "adapter_config.json", *_FOUND)]
        if stale := [name for name in there if any(fnmatch(name, own) and name.count("/") == n for own, n in kinds)]:
            raise SltaError(f"{repository} has {listed(stale)}, which programs would load: delete it there first.")
        done = api.create_commit(repository, operations, commit_message="Upload a merged model")
    except (*hub.HUB_ERRORS, RuntimeError) as error:
        raise hub.refused(f"{repository} cannot be published: ", error) from error
    return replace(publication, address=done.repo_url.url)


def _checked(folder: Path, trust_remote_code: bool, quiet: bool) -> tuple[Any, Recipe]:
    """A merged model's tokenizer and its recipe; an SltaError with everything that keeps it from being published."""

    def companions() -> None:
        refuse_links(folder, _published(folder))

    def weights() -> None:
        names = weight_map(folder)
        refuse_links(folder, [folder / name for name in names])
        if pickled := [name for name in names if not name.endswith(".safetensors")]:
            raise SltaError(
                f"{folder} holds pickled weights ({listed(pickled)}): merge again without --no-safe-serialization."
            )
        model = open_model(ModelReference(model=ModelPath(path=str(folder))), trust_remote_code)
        complete_checkpoints([model])
        refuse(tensor_faults(folder, model.tensors, quiet))

    def tokenizer() -> Any:
        with reading(f"The tokenizer in {folder}", fix="copy that of the base model"):
            return transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)

    def recipe() -> Any:
        if not (folder / RECIPE_OF_MERGE).is_file():
            raise SltaError(
                f"{folder} has no {RECIPE_OF_MERGE}: merge without '--no-write-model-card', or copy the recipe there."
            )
        return Recipe.load(folder / RECIPE_OF_MERGE)

    *_, opened, loaded = all_of([companions, weights, tokenizer, recipe])
    return opened, loaded


def _published(folder: Path) -> list[Path]:
    """The files beside the weights, the model's code among them."""
    beside = [path for pattern in PUBLISHED for path in folder.glob(pattern) if path.is_file()]
    return list(dict.fromkeys([*beside, *code_of(folder)]))


def _contents(folder: Path, recipe: Recipe) -> dict[str, Path | bytes]:
    """The files to publish, by their names in the repository: texts without private paths, the others as they are."""
    contents: dict[str, Path | bytes] = {}
    for path in _published(folder):
        name = path.relative_to(folder).as_posix()
        if name == STATISTICS_OF_MERGE and recipe.config.merge_method != SltaSettings.method:
            continue  # of an earlier merge into the same folder
        contents[name] = path
        if name == RECIPE_OF_MERGE:
            contents[name] = f"{card.published_recipe(recipe)}\n".encode()
        elif name in _TEXTS:
            contents[name] = card.without_private_paths(path.read_text(encoding="utf-8"), recipe).encode()
    return contents | {name: folder / name for name in weight_map(folder)}
