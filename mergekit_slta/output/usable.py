"""Whether programs can use a merged folder: how transformers loads it, and what it lacks of the base model.

No weights are read: transformers loads the folder onto the meta device, and the base model from its headers alone.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from mergekit_slta.checks.tokenizers import GENERATION
from mergekit_slta.errors import first_line
from mergekit_slta.models.headers import Model, listed
from mergekit_slta.models.layout import OLD_BUFFER
from mergekit_slta.output.companions import PROCESSOR

CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")


@dataclass(frozen=True)
class _Keys:
    """What transformers said of a checkpoint's tensors."""

    missing: set[str]
    mismatched: set[str]
    unexpected: set[str]


def loading_problems(base: Model, folder: Path, named: Collection[str] = ()) -> Iterator[str]:
    """Say how a merged folder loads worse in transformers than the base model, and what of the base it lacks.

    Tensors that transformers ignores, such as those of a head for multi-token prediction, must be there too; those in
    ``named`` have been reported.
    """
    if base.built is None:
        return
    try:
        merged = _loaded(base, folder)
    except Exception as error:  # of any kind, as transformers reads the folder by code of many models
        yield f"transformers cannot load the folder ({first_line(error)})."
        return
    own, named = _loaded(base), set(named)
    if missing := sorted(merged.missing - own.missing - named):
        yield f"transformers does not find {listed(missing)} in the folder, and would draw them at random."
    if mismatched := sorted(merged.mismatched - named):
        yield f"{listed(mismatched)} have other shapes than the folder's config.json says."
    if unexpected := sorted(merged.unexpected - own.unexpected - named):
        yield f"transformers does not know {listed(unexpected)}, which {base} does not have."
    unread = own.unexpected - merged.unexpected - named
    if lost := sorted(name for name in unread if not OLD_BUFFER.search(name)):
        yield (
            f"{listed(lost)} of {base} are missing: transformers does without them, but programs that predict several "
            "tokens at once do not."
        )


def lacking_files(base: Path, folder: Path, own_tokenizer: bool, own_template: bool) -> Iterator[str]:
    """Name files of the base model's folder that a merged folder lacks and that converters and servers read.

    Args:
        base: the base model's folder.
        folder: the merged folder.
        own_tokenizer: whether the recipe gives the merge a tokenizer of its own.
        own_template: whether the recipe gives it a chat template.
    """
    wanted = {file.name for pattern in PROCESSOR for file in base.glob(pattern)}
    if not own_tokenizer:
        wanted |= {name for name in (GENERATION, "tokenizer.model") if (base / name).is_file()}
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tekken.json")):
            wanted |= {name for name in ("tokenizer.json", "tokenizer_config.json") if (base / name).is_file()}
    if lacking := sorted(name for name in wanted if not (folder / name).is_file()):
        yield f"{listed(lacking)} of {base} are not in the folder: copy them for programs that convert or serve it."
    if not own_template and _has_template(base) and not _has_template(folder):
        yield f"{base} has a chat template and the folder has none: copy {CHAT_TEMPLATES[0]}."


def _loaded(model: Model, folder: Path | None = None) -> _Keys:
    """Load a folder, or the model itself from its headers, onto the meta device, and ask what became of each tensor."""
    kind = type(model.built)
    ignoring_none = property(lambda self: set(), lambda self, patterns: None)  # its modules would add their patterns
    own = {"_keys_to_ignore_on_load_unexpected": ignoring_none, "__module__": kind.__module__}
    strict: Any = type(kind.__name__, (kind,), own)
    source: dict[str, Any] = {"trust_remote_code": model.trust_remote_code}
    if folder is None:
        stored = {name: torch.empty(header.shape, device="meta") for name, header in model.tensors.items()}
        source |= {"config": copy.deepcopy(model.config), "state_dict": stored}
    with _silent_transformers():
        _, found = strict.from_pretrained(
            folder, **source, device_map="meta", output_loading_info=True, ignore_mismatched_sizes=True
        )
    mismatched = {name for name, *_ in found["mismatched_keys"]}
    return _Keys(set(found["missing_keys"]), mismatched, set(found["unexpected_keys"]))


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """Keep transformers' table of missing keys and its progress bar off the screen."""
    log = transformers.utils.logging
    level, shown = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(log.CRITICAL)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if shown:
            log.enable_progress_bar()


def _has_template(folder: Path) -> bool:
    files = [folder / name for name in CHAT_TEMPLATES if (folder / name).is_file()]
    return any('"chat_template"' in file.read_text(encoding="utf-8") or file.suffix == ".jinja" for file in files)
