"""Checks of a recipe's text: its parameters, its data types, its paths."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from mergekit._data import chat_templates

from mergekit_slta.checks.case import Case

HALF = ("bfloat16", "float16")
FLOATS = (*HALF, "float32", "float64")
SHORTEST_TEMPLATE = 20  # mergekit takes a shorter text for a name


def recipe_text(case: Case) -> list[str]:
    """Unknown, misplaced and wrong parameters, slices and modules, a missing base model, missing experts."""
    return case.experiment.recipe.problems


def tensor_types(case: Case) -> list[str]:
    """Data types that mergekit does not know, which it would say only in the middle of the merge."""
    given = {"dtype": case.config.dtype, "out_dtype": case.config.out_dtype}
    return [
        f"'{key}: {name}' is not a data type for a merge: write {', '.join(FLOATS[:-1])} or {FLOATS[-1]}."
        for key, name in given.items()
        if name is not None and name.removeprefix("torch.") not in FLOATS
    ]


def chat_template(case: Case) -> list[str]:
    """A chat template that mergekit does not know, which it would say only after the merge, without a tokenizer."""
    given = case.config.chat_template or "auto"
    files = (Path(file.name) for file in importlib.resources.files(chat_templates).iterdir())
    known = ["auto", *sorted(file.stem for file in files if file.suffix == ".jinja")]
    if given in known or (len(given) >= SHORTEST_TEMPLATE and "{" in given):
        return []
    return [
        f"'chat_template: {given}' is not one that mergekit knows: write {', '.join(known)}, or a whole template in "
        "Jinja."
    ]


def precision(case: Case) -> list[str]:
    """Merges in half precision, unless the method solves its tensors in float32 beforehand."""
    if case.method.solves_layers:
        return []
    config = case.config
    given = (config.dtype or "").removeprefix("torch.")
    stored = {str(getattr(model.config, "dtype", None)).removeprefix("torch.") for model in case.models}
    if given in HALF or (not given and stored & set(HALF)):
        half = given or next(name for name in HALF if name in stored)
        return [
            f"Merging in {half} rounds at every step: set 'dtype: float32' and 'out_dtype: {config.out_dtype or half}' "
            "to round only once."
        ]
    return []
