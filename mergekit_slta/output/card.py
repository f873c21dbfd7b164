"""The model card of a merge: what mergekit writes, with a part of ours that tells how the model was made.

Each part lies between marks, so that a later merge into the same folder replaces it and leaves what a user wrote.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from mergekit import merge_methods
from mergekit.common import ModelPath, ModelReference
from mergekit.config import MergeConfiguration

from mergekit_slta import __version__, files
from mergekit_slta.data.sources import DATASET_PREFIX, is_dataset, source_name
from mergekit_slta.errors import SltaError, one_line, reading
from mergekit_slta.models.merged_adapters import adapter_option
from mergekit_slta.recipe.recipe import Recipe, published_name
from mergekit_slta.recipe.settings import SETTINGS, SltaSettings
from mergekit_slta.slta.plain_recipe import plain_recipe
from mergekit_slta.slta.solution import Solution
from mergekit_slta.slta.statistics import STATISTICS_OF_MERGE, versions
from mergekit_slta.tables import as_percentage

LOG = logging.getLogger(__name__)

CARD = "README.md"
UNREADABLE_CARD = "README.old{}.md"  # with a number where that name is taken
RECIPE = "mergekit_config.yml"  # what mergekit calls the recipe beside its card
ALPHA_FIGURE = "mergekit-slta/alpha.png"
PLAIN_RECIPE = "mergekit-slta/plain.yml"
BESIDE = (STATISTICS_OF_MERGE, ALPHA_FIGURE, PLAIN_RECIPE)  # of an ``slta`` merge
_OURS = ("<!-- mergekit-slta: begin -->", "<!-- mergekit-slta: end -->")
_MERGEKITS = ("<!-- mergekit: begin -->", "<!-- mergekit: end -->")
# What each method does, as a card goes on after its name and a colon.
_IN_WORDS = {
    "slta": "every submodule gets one merging weight for each expert, solved in closed form from a few samples of the "
    "expert's task.",
    "featcal": "every linear map is solved by least squares, layer by layer, so that its outputs are near those of "
    "each expert on a few samples of the expert's task.",
    "actmat": "every linear map is solved by least squares without data, the experts' own changes standing in for the "
    "inputs.",
    "sftm": "the singular features of every expert's change are kept in every matrix, without data.",
}
_PATH_IN_TEXT = re.compile(r"""(?<![\w}:/<.~-])(?:~|/[^\s/{}'"`]+)(?:/[^\s/{}'"`]+)+""")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def write_beside(folder: Path, recipe: Recipe, solution: Solution | None, plain: bool) -> None:
    """Write what the card of an ``slta`` merge shows and links: statistics, the weights' figure, the plain recipe.

    Those of an earlier merge go. The plain recipe is written if ``plain`` says that mergekit alone can run it.

    Raises:
        OSError: a file cannot be written.
    """
    clear_beside(folder, solution)
    if solution is None:
        return
    from mergekit_slta.reports.merge import alpha_map  # which imports matplotlib

    solution.statistics.save(folder / STATISTICS_OF_MERGE)
    files.write(folder / ALPHA_FIGURE, alpha_map(solution).picture.png())
    base = recipe.config.base_model
    assert base is not None
    if not plain:
        return
    settings, names = recipe.settings, {solution.statistics.info.base_model: str(base)}
    assert isinstance(settings, SltaSettings)
    try:
        text = plain_recipe(
            solution, edges=settings.edges, towers=settings.towers, models=names, output=_output(recipe.config)
        )
    except SltaError as error:
        LOG.warning("No plain recipe is written beside the merge: %s", error)
        return
    files.write(folder / PLAIN_RECIPE, without_private_paths(text, recipe).encode())


def clear_beside(folder: Path, solution: Solution | None) -> None:
    """Remove what an earlier ``slta`` merge has written beside weights that are another merge's now.

    With a solution the statistics stay until new ones replace them: the recipe may have named this file.
    """
    for name in BESIDE if solution is None else BESIDE[1:]:
        (folder / name).unlink(missing_ok=True)


def _output(config: MergeConfiguration) -> dict[str, Any]:
    """What a recipe says of the merged model's data type, tokenizer and chat template."""
    names = {"out_dtype", "tokenizer", "tokenizer_source", "chat_template"}
    said = config.model_dump(mode="json", include=names, exclude_defaults=True)
    return ({"out_dtype": config.dtype} if config.dtype else {}) | said


def merge_card(written: str, folder: Path, recipe: Recipe, solution: Solution | None) -> str:
    """The card of a merge that has just been written, with what a user added to the card of an earlier one.

    Args:
        written: mergekit's card.
        folder: the merged model's.
        recipe: what was merged.
        solution: the merging weights, of an ``slta`` merge.
    """
    card = ModelCard(without_private_paths(written, recipe), ignore_metadata_errors=True)
    card.text = f"{_MERGEKITS[0]}\n{card.text.strip()}\n{_MERGEKITS[1]}\n"
    before = _earlier_card(folder)
    if before is not None and _part(before.text, _OURS):
        fresh, card = card, before
        data, new = card.data.to_dict(), fresh.data.to_dict()
        tags = [tag for tag in data.get("tags", []) if tag not in SETTINGS]
        card.data = ModelCardData(**{**data, "base_model": new.get("base_model"), "tags": tags})
        if old := _part(card.text, _MERGEKITS):
            card.text = card.text.replace(old, fresh.text.strip())
    return _completed(card, folder, recipe, solution)


def _earlier_card(folder: Path) -> ModelCard | None:
    """The card in a folder, if there is one; one that cannot be read is kept under another name."""
    path = folder / CARD
    if not path.is_file():
        return None
    try:
        return ModelCard(path.read_text(encoding="utf-8"), ignore_metadata_errors=True)
    except (ValueError, yaml.YAMLError) as error:
        names = (folder / UNREADABLE_CARD.format(number) for number in itertools.chain([""], itertools.count(2)))
        kept = next(name for name in names if not name.exists())
        path.replace(kept)
        LOG.warning("The earlier model card cannot be read (%s): it is kept as %s.", one_line(error), kept)
        return None


def published_card(folder: Path, recipe: Recipe, solution: Solution | None) -> str:
    """The card of a merge as it is to be published: the one in the folder, with our part brought up to date.

    Raises:
        SltaError: the one in the folder is not UTF-8 text, or its header is not valid YAML.
    """
    path = folder / CARD
    with reading(path, fix="save it as UTF-8 text, its header as valid YAML"):
        text = path.read_text(encoding="utf-8") if path.is_file() else f"# {folder.resolve().name}\n"
        shown = recipe.text.replace("\r\n", "\n").strip()  # reading a text changes line ends
        text = text.replace(shown, published_recipe(recipe))  # mergekit shows it with its comments
        card = ModelCard(without_private_paths(text, recipe), ignore_metadata_errors=True)
    return _completed(card, folder, recipe, solution) if recipe.config.merge_method in SETTINGS else str(card)


def _completed(card: ModelCard, folder: Path, recipe: Recipe, solution: Solution | None) -> str:
    data: Any = card.data
    paths = model_paths(recipe.references)
    listed = data.base_model if isinstance(data.base_model, list) else [data.base_model or ""]
    models = [path.path for path in paths if _is_on_hub(path.path)]
    data.base_model = list(dict.fromkeys([*filter(None, listed), *models])) or None
    data.base_model_relation = "merge" if data.base_model else None
    data.tags = list(
        dict.fromkeys([*(data.tags or []), "mergekit", "merge", "mergekit-slta", recipe.config.merge_method])
    )
    data.datasets = list(dict.fromkeys([*(data.datasets or []), *_datasets(recipe)])) or None
    data.library_name = data.library_name or "transformers"
    old, new = _part(card.text, _OURS), _section(card.text, folder, recipe, solution)
    card.text = card.text.replace(old, new) if old else f"{card.text.rstrip()}\n\n{new}\n"
    return str(card)


def _section(around: str, folder: Path, recipe: Recipe, solution: Solution | None) -> str:
    """Our part of the card, with its marks; the recipe is in it unless mergekit's part shows it."""
    spec = merge_methods.get(recipe.config.merge_method).spec
    paragraphs = [
        "## How this model was made",
        f"By [{spec.pretty_name}]({spec.reference_url}) (`merge_method: {spec.name}`): {_IN_WORDS[spec.name]}",
        _model_table(recipe, solution),
    ]
    if solution is not None and (folder / ALPHA_FIGURE).is_file():
        from mergekit_slta.reports.merge import verdict

        paragraphs += [
            f"{verdict(solution)} This is a share of feature change, not accuracy.",
            f"![The merging weight of each expert in each layer]({ALPHA_FIGURE})",
        ]
    if not _part(around, _MERGEKITS):
        shown = published_recipe(recipe)
        fence = max(["```", *(f"{found}`" for found in re.findall("`{3,}", shown))], key=len)
        paragraphs.append(f"{fence}yaml\n{shown}\n{fence}")
    paragraphs += ["### Do it again", *_again(folder, recipe, solution)]
    paragraphs.append("Made with " + ", ".join(f"{name} {version}" for name, version in versions().items()) + ".")
    return "\n\n".join([_OURS[0], *paragraphs, _OURS[1]])


def _model_table(recipe: Recipe, solution: Solution | None) -> str:
    header, rows = ["", "Model"], []
    for reference in recipe.references:
        rows.append(["Base model" if reference == recipe.config.base_model else "Expert", _linked(reference)])
    experts = {expert.reference: expert for expert in recipe.experts}
    if any(expert.calibration for expert in experts.values()):
        header.append("Calibration data")
        for row, reference in zip(rows, recipe.references, strict=True):
            source = experts[reference].calibration if reference in experts else ""
            row.append(_code(source_name(source)) if source else "")
    if solution is not None:
        header.append("Feature change kept")
        kept = dict(zip(solution.models, solution.kept.tolist(), strict=True))
        for row, reference in zip(rows, recipe.references, strict=True):
            row.append(as_percentage(kept[name]) if (name := published_name(reference)) in kept else "")
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _again(folder: Path, recipe: Recipe, solution: Solution | None) -> Iterator[str]:
    if (folder / STATISTICS_OF_MERGE).is_file() and solution is not None:
        yield (
            f"What was measured is in `{STATISTICS_OF_MERGE}`: name that file under `statistics` among the recipe's "
            "parameters, leave `calibration` out, and no data are needed."
        )
    options = adapter_option(recipe.references)
    yield f"```sh\npip install mergekit-slta=={__version__}\nmergekit-yaml {RECIPE} ./merged{options}\n```"
    if solution is not None and (folder / PLAIN_RECIPE).is_file():
        yield f"Without mergekit-slta, by mergekit alone:\n\n```sh\nmergekit-yaml {PLAIN_RECIPE} ./merged{options}\n```"
    else:
        yield "mergekit alone cannot do this merge; the model itself needs neither program."


def published_recipe(recipe: Recipe) -> str:
    """A recipe's YAML as mergekit understood it: without comments, and with private paths by their last parts."""

    def published(content: Any, key: str = "") -> Any:
        if isinstance(content, dict):
            return {key: published(value, key) for key, value in content.items()}
        if isinstance(content, list):
            return [published(value, key) for value in content]
        if not isinstance(content, str):
            return content
        return _PATH_IN_TEXT.sub(_last_part, content) if key == "template" else _shortened(content)

    content = published(yaml.safe_load(recipe.config.to_yaml()))
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=1000).strip()


def _shortened(value: str) -> str:
    """A recipe's value with its absolute paths by their last parts."""
    for path in _absolute_parts(value):
        value = value.replace(path, files.published_path(path))
    return value


def _last_part(found: re.Match[str]) -> str:
    return files.published_path(found.group())


def without_private_paths(text: str, recipe: Recipe) -> str:
    """A text with this machine's paths, those that a recipe names and those in the home folder, by their last parts."""
    paths = {path for value in _texts(recipe.content or recipe.config.model_dump()) for path in _absolute_parts(value)}
    paths |= {path.path for path in model_paths(recipe.references) if files.is_private(path.path)}
    for path in sorted(paths, key=len, reverse=True):
        last = files.published_path(path).replace("\\", r"\\")
        text = re.sub(rf"(?<![\w.-]){re.escape(path)}(?![\w-])", last, text)
    home = os.path.expanduser("~")
    if len(home) < 3:
        return text
    return re.sub(rf"{re.escape(home)}(?=[/\s\"'`)\]]|$)", "~", text)


def _texts(content: Any) -> Iterator[str]:
    """The texts of a recipe that may be paths; the template of a record may begin with a slash and be none."""
    if isinstance(content, dict):
        content = [value for key, value in content.items() if key != "template"]
    if isinstance(content, str):
        yield content
    elif isinstance(content, (list, tuple)):
        for value in content:
            yield from _texts(value)


def _absolute_parts(value: str) -> Iterator[str]:
    """The absolute paths in a value: a model, an adapter behind a plus sign, a file, a folder behind ``hf:``."""
    for part in value.removeprefix(DATASET_PREFIX).partition("?")[0].split("+"):
        path = part.partition("@")[0]
        if files.is_private(path) and "\n" not in path and len(os.path.normpath(path)) > 1:
            yield path


def model_paths(references: Sequence[ModelReference]) -> list[ModelPath]:
    return [path for reference in references for path in (reference.model, reference.lora) if path is not None]


def _is_on_hub(path: str) -> bool:
    return _HUB_NAME.fullmatch(path) is not None and not os.path.exists(path)


def _linked(reference: ModelReference) -> str:
    linked = []
    for path in model_paths([reference]):
        name = published_name(ModelReference(model=path))
        linked.append(f"[{name}](https://huggingface.co/{path.path})" if _is_on_hub(path.path) else _code(name))
    return " + ".join(linked)


def _code(text: str) -> str:
    """Text as code in Markdown, which it can neither end nor leave."""
    return "`" + " ".join(text.split()).replace("`", "'") + "`"


def _datasets(recipe: Recipe) -> list[str]:
    """The Hub's datasets among the calibration sources."""
    sources = [expert.calibration for expert in recipe.experts if is_dataset(expert.calibration)]
    names = [source.removeprefix(DATASET_PREFIX).partition("?")[0] for source in sources]
    return [name for name in names if not os.path.exists(name) and not files.is_private(name)]


def _part(text: str, marks: tuple[str, str]) -> str:
    """What lies between two marks, with them; "" if there is no such part."""
    begin, end = text.find(marks[0]), text.find(marks[1])
    return text[begin : end + len(marks[1])] if 0 <= begin < end else ""
