"""Whether programs can use a merged folder: what transformers does with it, what it lacks of the base model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import MakeFamily
from mergekit.common import ModelPath, ModelReference
from support.copies import edit_tensors, edited
from support.examining import edit_config
from support.families import Family

from mergekit_slta.models.headers import Model, open_model
from mergekit_slta.output.usable import lacking_files, loading_problems

Edit = Callable[[dict[str, torch.Tensor]], object]
HEAD = "mtp.layers.0.self_attn.q_proj.weight"


def opened(folder: Path) -> Model:
    return open_model(ModelReference(model=ModelPath(path=str(folder))))


@pytest.fixture(scope="module")
def predicting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen 3.5 with a head for multi-token prediction, which transformers ignores."""
    from support import families

    base = families.make_family(tmp_path_factory.mktemp("predicting"), "qwen3_5", experts=0).base
    edit_tensors(base, lambda tensors: tensors.update({HEAD: torch.ones(32, 32)}))
    return base


def test_what_is_lost_of_a_prediction_head(predicting: Path, tmp_path: Path) -> None:
    whole = Path(shutil.copytree(predicting, tmp_path / "whole"))
    assert list(loading_problems(opened(predicting), whole)) == []
    headless = edited(predicting, tmp_path / "headless", lambda tensors: tensors.pop(HEAD))
    (problem,) = loading_problems(opened(predicting), headless)
    assert problem.startswith(f"{HEAD} of {predicting} are missing: transformers does without them, but programs that")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda tensors: None, None),
        (lambda tensors: tensors.pop("lm_head.weight"), "transformers does not find lm_head.weight in the folder, and"),
        (lambda tensors: tensors.update(more=torch.zeros(2)), "transformers does not know more, which "),
        (
            lambda tensors: tensors.pop("model.layers.1.block_sparse_moe.experts.2.w3.weight"),
            "transformers cannot load the folder (",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.zeros(31)}),
            "model.norm.weight have other shapes than the folder's config.json says",
        ),
    ],
)
def test_how_a_mixture_loads(make_family: MakeFamily, tmp_path: Path, edit: Edit, said: str | None) -> None:
    base = make_family("mixtral", experts=0).base
    problems = list(loading_problems(opened(base), edited(base, tmp_path / "merged", edit)))
    assert len(problems) == bool(said) and all(problem.startswith(said or "") for problem in problems), problems


def test_a_folder_that_transformers_cannot_load(family: Family, tmp_path: Path) -> None:
    base = opened(family.base)
    edit_config(family.experts[0], num_attention_heads="four")
    (problem,) = loading_problems(base, family.experts[0])
    assert problem.startswith("transformers cannot load the folder (")


def test_files_that_converters_and_servers_read(family: Family) -> None:
    base, folder = family.base, family.experts[0]
    assert list(lacking_files(base, folder, False, False)) == []
    for name in ("tokenizer.model", "preprocessor_config.json", "chat_template.jinja", "generation_config.json"):
        (base / name).write_text("{}")
    (folder / "generation_config.json").unlink()
    lacking, template = lacking_files(base, folder, False, False)
    assert lacking.startswith("generation_config.json, preprocessor_config.json, tokenizer.model of ")
    assert template == f"{base} has a chat template and the folder has none: copy chat_template.jinja."
    # With a tokenizer and a template of its own, the merge needs the processor only.
    (processor,) = lacking_files(base, folder, True, True)
    assert processor.startswith("preprocessor_config.json of ")
