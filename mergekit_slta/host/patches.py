"""What of mergekit is replaced, and why.

mergekit 0.1.5 has a table of merge methods and no other way in: a method sees one tensor at a time; it sees neither the
recipe nor the output folder. So each function below that is marked with `replaces` replaces one function of mergekit's,
which it gets as ``stock``; its docstring says why.

All was read from the source of mergekit 0.1.5. When this module is imported, the parameters of each function that it
replaces are compared with those expected here; if they differ, the import fails with one sentence, the start-up hook
warns, and mergekit works without us.

One thing more is replaced, which is no function: in mergekit's table of open models, the loader of an expert that
stores its tensors otherwise than the base model (`models/architecture.py`).
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import yaml
from mergekit import card, merge
from mergekit.architecture import ModelArchitecture, auto
from mergekit.common import ModelPath, ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions, PrettyPrintHelp
from mergekit.tokenizer import build
from transformers import AutoConfig

from mergekit_slta.errors import MachineError, SltaError
from mergekit_slta.host.run import METHODS, register, run
from mergekit_slta.models import hub
from mergekit_slta.models.adapters import merge_adapter
from mergekit_slta.models.architecture import architecture_of
from mergekit_slta.models.headers import CODE, folder_with, local_folder, weight_map
from mergekit_slta.recipe.recipe import Recipe
from mergekit_slta.recipe.settings import expert_references

_REPLACEMENTS: list[tuple[Any, str, Callable[..., Any]]] = []  # whose function it was, its name there, our function


def replaces(owner: Any, name: str, *parameters: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a function as the replacement of mergekit's ``owner.name``, which must have these parameters.

    An ImportError if it is missing or has others.
    """
    stock = inspect.unwrap(getattr(owner, name, lambda: None))
    if tuple(inspect.signature(stock).parameters) != parameters:
        raise ImportError(
            f"mergekit {version('mergekit')} has changed {owner.__name__}.{name}, which mergekit-slta needs as it is "
            "in mergekit 0.1.5: install that version, or a newer mergekit-slta."
        )

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def replacement(*arguments: Any, **named: Any) -> Any:
            return function(stock, *arguments, **named)

        _REPLACEMENTS.append((owner, name, replacement))
        return function

    return enter


def install() -> None:
    """Register the methods and replace mergekit's functions; a second call changes nothing."""
    register()
    for owner, name, replacement in _REPLACEMENTS:
        setattr(owner, name, replacement)


# To check a recipe and run its models before mergekit merges its tensors, and to complete the output folder after.
replaces(merge, "run_merge", "merge_config", "out_path", "options", "config_source")(run)


@replaces(MergeConfiguration, "referenced_models", "self")
def referenced_models(stock: Callable[..., Any], self: MergeConfiguration) -> list[ModelReference]:
    """List a recipe's models in the recipe's order.

    mergekit lists a set, whose order changes between processes, and with that order the card and a merged tokenizer.
    """
    return [*([self.base_model] if self.base_model else []), *expert_references(self)]


@replaces(ModelReference, "merged", "self", "cache_dir", "trust_remote_code", "lora_merge_dtype")
def merged(stock: Callable[..., Any], self: ModelReference, *arguments: Any, **named: Any) -> ModelReference:
    """Merge an adapter into its base model, in a folder that is named by their content.

    mergekit names the folder by the two paths, and so reuses a stale one when the adapter has been trained again.
    """
    return merge_adapter(self, *arguments, **named) if self.lora else self


@replaces(ModelReference, "local_path", "self", "cache_dir", "ignore_lora")
def local_path(
    stock: Callable[..., str], self: ModelReference, cache_dir: str | None = None, ignore_lora: bool = False
) -> str:
    """Take a downloaded model where the Hub, which mergekit asks for each folder at each use, cannot be reached.

    mergekit downloads all .safetensors files, also those of checkpoints, and the weights once more in another format.
    """
    if self.lora and not ignore_lora:
        return stock(self, cache_dir, ignore_lora)  # which refuses what it has not merged
    patterns = "*.json", "tokenizer.model", "model*.safetensors", CODE
    try:
        with suppress(SltaError):  # it has other weights
            weight_map(downloaded := folder_with(patterns, self.model, cache_dir))
            return str(downloaded)
        return stock(self, cache_dir, ignore_lora)
    except hub.HUB_ERRORS as error:
        folder = local_folder(self.model, cache_dir)
        if folder is None or not isinstance(hub.refused("", error), MachineError):
            raise
        return str(folder)


@replaces(merge, "get_architecture_info", "config", "options")
def get_architecture_info(
    stock: Callable[..., ModelArchitecture], config: MergeConfiguration, options: MergeOptions
) -> ModelArchitecture:
    """Merge all tensors of the base model's checkpoint.

    mergekit's definitions, and the names that it takes from transformers, leave out heads for multi-token prediction
    and a mixture's experts in some layers.
    """
    method = METHODS.get(config.merge_method)
    if method is None or method.experiment is None:
        return stock(config, options)
    base, layout = method.experiment.base, method.experiment.layout
    return architecture_of(layout, base.model.tensors, base.config)


@replaces(auto, "get_model_tensor_names", "model", "options")
def get_model_tensor_names(stock: Callable[..., list[str]], model: ModelReference, options: MergeOptions) -> list[str]:
    """Take the names of an adapter's model; mergekit refuses adapters for architectures that it does not know."""
    return stock(ModelReference(model=model.model), options)


@replaces(build, "get_vocab_size", "model_path", "trust_remote_code")
def get_vocab_size(stock: Callable[..., int | None], model_path: ModelPath, trust_remote_code: bool) -> int | None:
    """Look for the number of tokens where a multimodal model's configuration has it.

    mergekit looks at the top alone. Where it finds none, it prints a traceback, and ``union`` loses added tokens.
    """
    revision = model_path.revision
    config = AutoConfig.from_pretrained(model_path.path, revision=revision, trust_remote_code=trust_remote_code)
    return getattr(config.get_text_config(), "vocab_size", None) or stock(model_path, trust_remote_code)


@replaces(PrettyPrintHelp, "invoke", "self", "ctx")
def invoke(stock: Callable[..., Any], self: click.Command, ctx: click.Context) -> Any:
    """Say in a sentence why mergekit-yaml cannot read a recipe; mergekit ends in a traceback."""
    file = Path(ctx.params.get("config_file") or "")
    if self.name == "mergekit-yaml" and not file.is_fifo():  # a pipe can be read once
        try:
            MergeConfiguration.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
        except Exception:  # YAML's tags and mergekit's checks may raise errors of any kind
            Recipe.load(file)
    return stock(self, ctx)


@replaces(card, "is_hf", "path")
def is_hf(stock: Callable[..., Any], path: str) -> bool:
    """Do not look up an existing folder on the Hub.

    mergekit looks a relative path such as ``models/base`` up on the Hub, which fails without a network when the weights
    are written.
    """
    return not os.path.exists(path) and bool(stock(path))


install()
