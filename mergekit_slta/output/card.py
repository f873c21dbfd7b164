"""The model card of a merge: what mergekit writes, with a section of ours that tells how the model was made."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard
from mergekit import merge_methods
from mergekit.common import ModelPath, ModelReference
from mergekit.config import MergeConfiguration

from mergekit_slta import files
from mergekit_slta.data.sources import DATASET_PREFIX, is_dataset, source_name
from mergekit_slta.errors import printable, reading
from mergekit_slta.files import MANIFEST_OF_MERGE, RECIPE_OF_MERGE, STATISTICS_OF_MERGE
from mergekit_slta.output import manifest
from mergekit_slta.output.manifest import Manifest
from mergekit_slta.recipe.new import ADAPTER_OPTION
from mergekit_slta.recipe.recipe import Recipe, published_name
from mergekit_slta.recipe.settings import SETTINGS
from mergekit_slta.slta.statistics import Solution
from mergekit_slta.slta.statistics_file import PUBLISHED_PREFIX, resolve_statistics
from mergekit_slta.words import as_score

CARD = "README.md"
INSTALL = "pip install git+https://github.com/mergekit-slta/mergekit-slta"  # not on PyPI yet
HEADING = "## How this model was made"
SCORES = "## Scores on prompts that the merge did not use"
SHOWN = 12  # characters of a commit


def renew_beside(folder: Path, solution: Solution | None, named: str = "") -> None:
    """Write an ``slta`` merge's statistics, and remove what an earlier one has written beside the weights.

    ``named`` is the statistics file that the recipe names, which may be the one there: it stays as it is.
    """
    (folder / MANIFEST_OF_MERGE).unlink(missing_ok=True)
    beside = folder / STATISTICS_OF_MERGE
    if solution is None:
        beside.unlink(missing_ok=True)
    elif not named or named.startswith(PUBLISHED_PREFIX) or resolve_statistics(named).resolve() != beside.resolve():
        solution.statistics.save(beside)


def merge_card(folder: Path, recipe: Recipe, solution: Solution | None = None, caveat: str = "") -> str:
    """The card of a merge for others: the one in its folder, with our section, the recipe as mergekit understood it."""
    path, method = folder / CARD, recipe.config.merge_method
    with reading(path, fix="save it as UTF-8 text, its header as valid YAML"):
        written = path.read_text(encoding="utf-8") if path.is_file() else f"# {folder.resolve().name}\n"
        shown = recipe.text.replace("\r\n", "\n").strip()  # reading a text changes line ends
        written = written.replace(shown, published_recipe(recipe))  # mergekit shows it with its comments
        card = ModelCard(without_private_paths(written, recipe), ignore_metadata_errors=True)
    if method in SETTINGS:
        data: Any = card.data
        on_hub = [path.path for path in model_paths(recipe) if files.is_hub_name(path.path)]
        data.base_model = on_hub or data.base_model or None  # a user's own, where all models are folders
        data.base_model_relation = "merge" if data.base_model else None
        tags = [*(data.tags or []), "mergekit", "merge", "mergekit-slta", method]
        data.tags = list(dict.fromkeys(tags))
        sources = [task.calibration for task in recipe.tasks]
        named = [source.removeprefix(DATASET_PREFIX).partition("?")[0] for source in sources if is_dataset(source)]
        named = [name for name in named if not os.path.exists(name) and not files.is_private(name)]
        data.datasets = list(dict.fromkeys([*(data.datasets or []), *named])) or None
        data.library_name = data.library_name or "transformers"
        made = manifest.read(folder)
        if made and HEADING not in card.text:
            card.text = f"{card.text.rstrip()}\n\n{_section(recipe, made, solution, caveat)}\n"
        if made and made.scores:  # `evaluate` may have replaced those that stand there
            others = re.sub(rf"\n{SCORES}\n+(?:\|.*(?:\n|\Z))*", "\n", card.text)
            card.text = f"{others.rstrip()}\n\n{SCORES}\n\n{_score_table(made)}\n"
    return str(card)


def _section(recipe: Recipe, made: Manifest, solution: Solution | None, caveat: str = "") -> str:
    spec, in_words = merge_methods.get(made.method).spec, SETTINGS[made.method].in_words
    paper = f"[{spec.pretty_name}]({spec.reference_url})"
    paragraphs = [
        HEADING,
        f"Merged with `merge_method: {spec.name}`, after {paper}: {in_words} {caveat}".strip(),
        _model_table(recipe, made, solution),
    ]
    if solution is not None:
        of_base = " The base model's is the share of the experts' change on its prompts that the merge avoids."
        said = f"{printable(solution.verdict())} The share says little about accuracy."
        paragraphs.append(said + of_base * solution.has_base_task)
    sources = [task.calibration for task in recipe.tasks if task.calibration]
    local = [_code(source_name(source)) for source in sources if not is_dataset(source)]
    needed = f" and the files of prompts {', '.join(local)}, which are not in this repository" if local else ""
    named = getattr(recipe.settings, "statistics", "")
    if solution is not None and not sources and not named.startswith(PUBLISHED_PREFIX):
        needed = f" and `{STATISTICS_OF_MERGE}` from here, as `{files.published_path(named)}`"
    commit = made.versions["commit"].partition("clone")[0]  # that of a clone may be nowhere else
    option = ADAPTER_OPTION * any(reference.lora for reference in recipe.references)
    command = f"mergekit-yaml merged/{RECIPE_OF_MERGE} merged{option}"
    paragraphs += [
        "### Reproduce this merge",
        f"You need the models in the table{needed}. Download `{RECIPE_OF_MERGE}` and `{MANIFEST_OF_MERGE}` into a "
        "folder `merged`:",
        f"```sh\n{INSTALL}{f'@{commit}' if commit else ''}\n{command}\n```",
        "The new merge says what differs from this one: models, prompts, settings and versions. It needs this plugin; "
        "the model itself loads like any other.",
    ]
    if solution is not None:
        paragraphs.append(
            f"`{STATISTICS_OF_MERGE}` holds the measurement. To merge again without prompts, name that file under "
            "`statistics` among the recipe's parameters, and leave `calibration` out"
            f"{' (but not the `weight` of the base model, 1.0 if none is written)' * solution.has_base_task}."
        )
    versions = [f"{name} {version}" for name, version in made.versions.items() if name != "commit"]
    return "\n\n".join([*paragraphs, f"Made with {', '.join(versions)}{made.machine and f' on {made.machine}'}."])


def _model_table(recipe: Recipe, made: Manifest, solution: Solution | None) -> str:
    """A row for each model; columns in which no model has anything are left out."""
    shares = dict(zip(solution.models, solution.retained_overall.tolist(), strict=True)) if solution else {}
    if solution and solution.has_base_task:
        shares[made.base_model.name] = solution.kept_base_overall
    tasks = {task.model: f"{task.prompts} of {_code(task.source)}" for task in made.tasks}
    lines = [["", "Model", "Revision", "Prompts", "Feature change kept"], ["---"] * 5]
    for reference, model in zip(recipe.references, (made.base_model, *made.models), strict=True):
        kind = "Base model" if reference == recipe.base else "Expert"
        share = as_score(shares[model.name]) if model.name in shares else ""
        revision = "+".join(commit[:SHOWN] for commit in model.revision.split("+"))  # an adapter's is the second
        lines.append([kind, _linked(reference), revision, tasks.get(model.name, ""), share])
    columns = [column for column in zip(*lines, strict=True) if any(column[2:])]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in zip(*columns, strict=True)
    )


def _score_table(made: Manifest) -> str:
    """The scores of the merge on held-out prompts, with the number of answers behind each accuracy."""
    header = ["Task of", "Prompts", "Accuracy (short answers)", "Share of the expert's gain in likelihood"]
    lines = [header, ["---"] * 4]
    for model, score in made.scores.items():
        counts = score["accuracy_low"] is not None  # else these are too few answers
        accuracy = f"{as_score(score['accuracy'] if counts else None)} ({score['short_answers']:.0f})"
        of_base = " (of its own answers; in likelihood, 0 is the experts' mean)" * (model == made.base_model.name)
        lines.append([_code(model) + of_base, f"{score['prompts']:.0f}", accuracy, as_score(score["gain_kept"])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def published_recipe(recipe: Recipe) -> str:
    """A recipe's YAML with mergekit's keys, and with private paths by their last parts.

    Of its comments, the commands stay that have models answer prompts: nothing else tells how these were made.
    """
    content = {key: value for key, value in recipe.content.items() if key in MergeConfiguration.model_fields}
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000)
    asked = re.findall(r"^#   mergekit-slta ask .*\n", re.sub(r"\\\n#\s*", "", recipe.text), re.MULTILINE)
    shown = "".join(re.sub(r"\S+", lambda word: files.published_path(word[0]), line) for line in asked)
    return without_private_paths(shown + text, recipe).strip()


def without_private_paths(text: str, recipe: Recipe) -> str:
    """A text with this machine's paths, those that a recipe names and those in the home folder, by their last parts."""
    paths = {path for value in _texts(recipe.content) for path in _private_parts(value)}
    for path in sorted(paths, key=len, reverse=True):
        last = files.published_path(path).replace("\\", r"\\")
        text = re.sub(rf"(?<![\w.-]){re.escape(path)}(?![\w-])", last, text)
    home = os.path.expanduser("~")
    return text.replace(f"{home}/", "~/") if len(home) > 2 else text


def _texts(content: Any) -> Iterator[str]:
    """The texts of a recipe that may be paths; the template of a record may begin with a slash and be none."""
    if isinstance(content, dict):
        content = [value for key, value in content.items() if key != "template"]
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for value in content:
            yield from _texts(value)


def _private_parts(value: str) -> Iterator[str]:
    """The private paths in a value: a model, an adapter behind a plus sign, a file, a folder behind ``hf:``."""
    for part in value.removeprefix(DATASET_PREFIX).partition("?")[0].split("+"):
        for path in (part, part.partition("@")[0]):  # without a revision, which mergekit leaves out
            if files.is_private(path) and "\n" not in path and len(os.path.normpath(path)) > 1:
                yield path


def model_paths(recipe: Recipe) -> list[ModelPath]:
    """The folders and repositories of a recipe's models and adapters, each once."""
    paths = (path for reference in recipe.references for path in (reference.model, reference.lora))
    return list(dict.fromkeys(filter(None, paths)))


def _linked(reference: ModelReference) -> str:
    linked = []
    for path in filter(None, (reference.model, reference.lora)):
        name = published_name(ModelReference(model=path))
        linked.append(f"[{name}](https://huggingface.co/{path.path})" if files.is_hub_name(path.path) else _code(name))
    return " + ".join(linked)


def _code(text: str) -> str:
    """Text as code in Markdown, which it can neither end nor leave."""
    return "`" + printable(" ".join(text.split())).replace("`", "'") + "`"
