"""The files beside a merged model's weights, finished when mergekit has written what it writes.

mergekit 0.1.5 copies some files of the base model by their names, and writes configurations and tokenizers in the form
of this transformers alone.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mergekit.common import ModelPath, ModelReference
from mergekit.io.tasks import LoaderCache

from mergekit_slta import files
from mergekit_slta.checks.folder import code_of
from mergekit_slta.checks.tokenizers import GENERATION, json_file, stop_ids
from mergekit_slta.data.sources import end_of_turn
from mergekit_slta.engine.partial import run_of
from mergekit_slta.errors import SltaError, first_line
from mergekit_slta.models import hub
from mergekit_slta.models.headers import CHAT_TEMPLATES, CODE, PROCESSOR, TOKENIZER_FILES, WEIGHT_FILES, folder_with
from mergekit_slta.output.card import CARD
from mergekit_slta.recipe.experiment import Experiment

SHARDS = ("model-*.safetensors", "pytorch_model-*.bin")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def finish_folder(experiment: Experiment, folder: Path) -> list[str]:
    """Give a merged folder the files of the base model, and those of the model whose token ids it has.

    Returns a sentence for each thing that could not be done; the weights are written by now.
    """
    recipe, owner = experiment.recipe, experiment.recipe.tokenizer_owner
    base, aligned, template = recipe.base.model, recipe.tokenizer_source is not None, bool(recipe.config.chat_template)
    (folder / GENERATION).unlink(missing_ok=True)  # of an earlier merge
    problems = [*_copies((*PROCESSOR, CODE), base, folder)]
    try:
        config, of_base = json_file(folder / "config.json"), json_file(_folder(("config.json",), base) / "config.json")
        restore(of_base, config)
        if "vocab_size" in of_base and "text_config" not in of_base:  # older versions would read the newer table
            config.pop("text_config", None)
        if "tie_word_embeddings" in config and not experiment.model(recipe.base).config.tie_word_embeddings:
            config["tie_word_embeddings"] = False
        _write(folder / "config.json", config)
        open_to_others(folder)
        # An adapter that brings the tokenizer has no settings of its own.
        stops_like = owner.model if (_folder(("config.json",), owner.model) / "config.json").is_file() else base
        problems += _copies((GENERATION,), stops_like, folder)
        if not aligned and not experiment.options.copy_tokenizer:
            return problems
        merged = ModelReference(model=ModelPath(path=str(folder)))
        written: Any = experiment.tokenizer(merged) if aligned or template else None
        if not aligned or written.get_vocab() == experiment.tokenizer(owner).get_vocab():
            problems += _copies((*TOKENIZER_FILES, *(() if template else CHAT_TEMPLATES)), owner.model, folder)
        if aligned or template:
            _older_tokenizer(folder, template)
        if template or owner != recipe.base:
            _name_tokens(written, _folder((GENERATION, "config.json"), stops_like), folder)
    except (*hub.HUB_ERRORS, RuntimeError, SltaError) as error:
        problems.append(f"{folder} lacks settings of {owner} ({first_line(error)}): copy them yourself.")
    return problems


def _folder(patterns: Sequence[str], model: ModelPath) -> Path:
    return folder_with(patterns, model, LoaderCache().hf_cache_dir)


def _copies(patterns: Sequence[str], model: ModelPath, folder: Path) -> Iterator[str]:
    """Copy the files of a model that fit patterns, each in the place of an earlier one; say which could not be."""
    try:
        source = _folder(patterns, model)
        wanted = {file for pattern in patterns if pattern != CODE for file in source.glob(pattern)}
        wanted |= {*code_of(source)} if CODE in patterns else set()
    except (*hub.HUB_ERRORS, RuntimeError, SltaError) as error:
        yield f"Copy {', '.join(patterns)} from {model} to {folder} yourself: {hub.reason(error)}."
        return
    for file in sorted(wanted):
        copy = folder / file.relative_to(source)
        try:
            copy.parent.mkdir(exist_ok=True)
            with files.replacing(copy) as beside:
                shutil.copyfile(file, beside)  # not its mode, which may forbid the next merge to write
        except OSError as error:
            yield f"Copy {file} to {copy} yourself: {first_line(error)}."


def restore(base: dict[str, Any], merged: dict[str, Any]) -> None:
    """Write the entries of the base model's configuration as they are in its file; transformers rewrites some.

    Other programs, and older versions of transformers, read ``rope_theta`` but not ``rope_parameters``, and "attention"
    among ``layer_types`` but not "full_attention". What a merge changes stays: the data type and the vocabulary's size.
    """
    newer = {**(merged.get("text_config") or {}), **merged}
    for key, value in base.items():
        if isinstance(value, dict) and isinstance(merged.get(key), dict):
            restore(value, merged[key])
        elif key in ("dtype", "torch_dtype") or key.endswith("vocab_size"):
            merged.setdefault(key, newer.get(key.removeprefix("torch_"), value))
        elif not key.startswith("_"):  # such as the path that the base model was loaded from
            merged[key] = value


def _older_tokenizer(folder: Path, template: bool) -> None:
    """Write a tokenizer's settings in the form that transformers 4 reads too, with the chat template of the recipe."""
    path, jinja = folder / TOKENIZER_FILES[0], folder / CHAT_TEMPLATES[0]
    settings = json_file(path)
    if template and jinja.is_file():
        settings["chat_template"] = jinja.read_text(encoding="utf-8")
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the same class by its older name
    if isinstance(settings.get("extra_special_tokens"), list):
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    for name in ("is_local", "local_files_only"):  # how this machine has loaded it
        settings.pop(name, None)
    _write(path, settings)


def _name_tokens(tokenizer: Any, source: Path, folder: Path) -> None:
    """Name in the configurations the tokens of the model in ``source``, which the merged model has its tokenizer from.

    It stops where that model does, and where its own chat template ends a turn.
    """
    source_config, stops = json_file(source / "config.json"), stop_ids(source) or [tokenizer.eos_token_id]
    if end := end_of_turn(tokenizer):
        stops = list(dict.fromkeys([tokenizer.convert_tokens_to_ids(end), *stops]))
    eos = {"eos_token_id": stops if len(stops) > 1 else stops[0]}
    ids = {key: source_config[key] for key in TOKEN_IDS if key in source_config} | eos
    config, generation = json_file(folder / "config.json"), json_file(folder / GENERATION)
    if config.get("text_config"):
        config["text_config"] |= {key: value for key, value in ids.items() if key in config["text_config"]}
    _write(folder / "config.json", config | ids)
    _write(folder / GENERATION, ids | generation | eos)


def _write(path: Path, content: dict[str, Any]) -> None:
    files.write(path, f"{json.dumps(content, indent=2, sort_keys=True)}\n".encode())  # as transformers does


def set_aside(experiment: Experiment, folder: Path) -> list[str]:
    """Add ``.old`` to the names of the files that a merge would replace and that no merge has written; their names."""
    options, ours = experiment.options, (files.RECIPE_OF_MERGE, files.MANIFEST_OF_MERGE)
    known = run_of(folder / files.PARTIAL_OF_MERGE) is not None or any((folder / name).is_file() for name in ours)
    strange = [folder / CARD] if options.write_model_card and not _is_card(folder / CARD) else []
    if not known:
        others = [file for pattern in ("config.json", GENERATION, *PROCESSOR) for file in folder.glob(pattern)]
        strange += [*entry_files(experiment, folder), *others]
    names = sorted({str(file.relative_to(folder)) for file in strange if file.is_file()})
    olds = {name: files.set_aside(folder / name).suffix for name in names}
    return [name if old == ".old" else f"{name} ({old})" for name, old in olds.items()]


def _is_card(file: Path) -> bool:
    """Whether a merge has written a model card, to which nobody has added a license."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    return "mergekit" in text and "\nlicense:" not in text


def open_to_others(folder: Path) -> None:
    """Give the weights the mode of other new files; the library that writes them keeps them from everybody else."""
    for pattern in ("model*.safetensors", "pytorch_model*.bin"):
        for file in folder.glob(pattern):
            with contextlib.suppress(OSError):  # some disks have no modes
                file.chmod((folder / "config.json").stat().st_mode)


def entry_files(experiment: Experiment, folder: Path) -> dict[Path, tuple[int, int]]:
    """The files of a merge that programs read, with inode and time: weights, recipe, card, the tokenizer's files."""
    tokenizer = experiment.options.copy_tokenizer or experiment.recipe.tokenizer_source is not None
    patterns = [f"{name}{index}" for name in WEIGHT_FILES for index in ("", ".index.json")]
    patterns += [*SHARDS, files.RECIPE_OF_MERGE, *((*TOKENIZER_FILES, *CHAT_TEMPLATES) if tokenizer else ())]
    entries = [file for pattern in patterns for file in folder.glob(pattern)]
    entries += [folder / CARD] if _is_card(folder / CARD) else []
    return {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in entries if file.is_file()}
