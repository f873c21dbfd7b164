"""The files beside a merged model's weights: those that mergekit 0.1.5 does not copy, and those of an earlier merge.

mergekit downloads ``*.json`` and ``tokenizer.model`` only, and copies the files of a tokenizer that it knows by name.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache

from mergekit_slta.models import hub
from mergekit_slta.models.headers import WEIGHT_FILES

LOG = logging.getLogger(__name__)

PROCESSOR = ("*processor_config.json", "audio_tokenizer_config.json")  # of images, video and sound
GENERATION = ("generation_config.json",)  # names tokens by their ids
MORE_TOKENIZER_FILES = ("chat_template.jinja", "additional_chat_templates/*.jinja", "tekken.json")
CODE = ("*.py",)


def copy_companions(config: MergeConfiguration, tokenizer_source: Any, copy_tokenizer: bool, folder: Path) -> None:
    """Copy the base model's files that fit the tokenizer of the merged model into its folder.

    ``tokenizer_source`` is None if that is the base model's. The weights are written by now: a failure is a warning.
    """
    assert config.base_model is not None
    patterns, base = [*PROCESSOR, *CODE], config.base_model.model
    if tokenizer_source in (None, "base"):
        patterns += GENERATION
    if tokenizer_source is None and not config.chat_template and copy_tokenizer:
        patterns += MORE_TOKENIZER_FILES
    try:
        source = hub.folder_with(patterns, base, LoaderCache().hf_cache_dir)
        if not any(b'"auto_map"' in file.read_bytes() for file in source.glob("*config.json")):
            patterns = [pattern for pattern in patterns if pattern not in CODE]  # programs that are no model's
        for file in sorted(file for pattern in patterns for file in source.glob(pattern)):
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
    except hub.HUB_ERRORS as error:
        LOG.warning("Copy %s from %s yourself: %s", ", ".join(patterns), base, hub.reason(error))


def entry_files(folder: Path) -> dict[Path, tuple[int, int]]:
    """The files by which programs find a model's weights in a folder, with inode and time."""
    found = (folder / f"{name}{index}" for name in WEIGHT_FILES for index in ("", ".index.json"))
    return {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in found if file.is_file()}


def set_aside(file: Path) -> None:
    """Give a file of an earlier merge another name, if it exists."""
    if file.is_file():
        LOG.warning("%s is of an earlier merge: now %s.", file, file.replace(f"{file}.old"))
