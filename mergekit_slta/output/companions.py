"""Copy the base model's files that lie beside its weights and that mergekit 0.1.5 does not copy.

mergekit downloads ``*.json`` and ``tokenizer.model`` only, and copies the files of a tokenizer that it knows by name.
What it writes itself, it writes after this, so that counts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
from pathlib import Path

from mergekit.io.tasks import LoaderCache

from mergekit_slta.errors import one_line
from mergekit_slta.models import hub
from mergekit_slta.models.headers import WEIGHT_FILES
from mergekit_slta.recipe.experiment import Experiment

LOG = logging.getLogger(__name__)

PROCESSOR = ("*processor_config.json", "audio_tokenizer_config.json")  # of images, video and sound
GENERATION = ("generation_config.json",)  # names tokens by their ids
TOKENIZER_FILES = ("chat_template.jinja", "additional_chat_templates/*.jinja", "tekken.json")
CODE = ("*.py",)


def copy_companions(experiment: Experiment, folder: Path) -> None:
    """Copy the files that fit the tokenizer that the merged model gets into its folder.

    What cannot be copied is a warning, because the weights are written.
    """
    config, tokenizer, patterns = experiment.recipe.config, experiment.recipe.tokenizer_source, [*PROCESSOR]
    if tokenizer in (None, "base"):
        patterns += GENERATION
    if tokenizer is None and not config.chat_template and experiment.options.copy_tokenizer:
        patterns += TOKENIZER_FILES
    path = experiment.recipe.base.model
    wanted = [*patterns, *CODE]
    try:
        source = hub.folder_with(wanted, path, LoaderCache().hf_cache_dir)
    except hub.HUB_ERRORS as error:
        LOG.warning("Copy %s from %s yourself: %s", ", ".join(wanted), path, hub.reason(error))
        return
    patterns += CODE if _names_code(source) else ()
    for file in sorted(file for pattern in patterns for file in source.glob(pattern)):
        name = file.relative_to(source)
        try:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, folder / name)
            LOG.info("Copied %s from %s", name, experiment.recipe.base)
        except OSError as error:
            LOG.warning("Copy %s from %s yourself: %s", name, experiment.recipe.base, one_line(error))


def set_aside(folder: Path, written: str) -> None:
    """Rename weights and indices of an earlier merge that programs may read instead of the file just written."""
    for name in (name + index for name in WEIGHT_FILES for index in ("", ".index.json")):
        if name != written and (old := folder / name).is_file():
            aside = old.replace(folder / f"{name}.old")
            LOG.warning(
                "%s is of an earlier merge, and programs would read it instead of this one: now %s.", old, aside
            )


def _names_code(folder: Path) -> bool:
    """Whether a configuration in a model's folder names classes of the model's own code."""
    for file in folder.glob("*config.json"):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            content = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(content, dict) and content.get("auto_map"):
                return True
    return False
