"""What a merge keeps of its experts' skill: negative log-likelihood on records that calibration did not use."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from mergekit.common import get_auto_cls
from tqdm import tqdm

from mergekit_slta.engine.streams import make_batches
from mergekit_slta.errors import SltaError
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.fresh import Fresh
from mergekit_slta.layers.probe import padding_matters
from mergekit_slta.recipe.experiment import Experiment
from mergekit_slta.recipe.recipe import Recipe, calibration_problems, published_name
from mergekit_slta.recipe.settings import CalibrationSettings
from mergekit_slta.tables import Table, as_json, as_paragraphs, as_percentage

# The logits of a batch, positions times vocabulary, outgrow everything else.
BATCH_TOKENS = 1024

Rows = Sequence[Sequence[int]]


@dataclass(frozen=True)
class TaskEvaluation:
    """How well the base model, the expert and the merged model predict an expert's task.

    Attributes:
        model: the expert.
        records: how many held-out records were used.
        tokens: how many tokens were predicted, which is all but each record's first.
        base, expert, merged: negative log-likelihood per predicted token, in nats.
    """

    model: str
    records: int
    tokens: int
    base: float
    expert: float
    merged: float

    @property
    def kept(self) -> float | None:
        """The share of the expert's gain over the base model that the merge keeps; None if there is no gain."""
        gain = self.base - self.expert
        return (self.base - self.merged) / gain if gain > 0 else None


@dataclass(frozen=True)
class Evaluation:
    """How well a merged model does each expert's task; printed, it is a table.

    Attributes:
        tasks: the tasks, in the order of the recipe's experts.
    """

    tasks: tuple[TaskEvaluation, ...]

    def to_json(self) -> str:
        """The numbers as JSON; the share that is kept is null if the expert gains nothing over the base model."""
        return as_json({"tasks": [{**asdict(task), "kept": task.kept} for task in self.tasks]})

    def table(self) -> Table:
        """One row per task."""
        rows = []
        for task in self.tasks:
            losses = [f"{loss:.4f}" for loss in (task.base, task.expert, task.merged)]
            rows.append([task.model, str(task.records), str(task.tokens), *losses, as_percentage(task.kept)])
        return Table(["task of", "records", "tokens", "base", "expert", "merged", "gain kept"], rows)

    def __str__(self) -> str:
        return "\n\n".join(map(str, self._parts()))

    def _repr_html_(self) -> str:
        return as_paragraphs(*self._parts())

    def _parts(self) -> Iterator[str | Table]:
        yield "Negative log-likelihood per token, lower is better"
        yield self.table()
        if idle := [task.model for task in self.tasks if task.kept is None]:
            yield f"Experts no better than the base model on their own task, with no gain to keep: {', '.join(idle)}."


def evaluate(
    recipe: Recipe | Experiment, merged: str | os.PathLike[str], samples: int = 100, **options: Any
) -> Evaluation:
    """Compare a merged model with the base model and with each expert on that expert's task.

    The records are the next ones of each calibration source, cut as calibration cuts them and tokenized by the base
    model's tokenizer for all models. One model is in memory at a time, in float32.

    Args:
        recipe: the merge's recipe, or an opened one, for which ``options`` are ignored.
        merged: the folder that the merge was written to.
        samples: how many records per task.
        options: ``device`` ("cpu"), ``trust_remote_code`` (False), ``lora_merge_cache`` (None), ``transformers_cache``
            (None), ``quiet`` (False), and whatever else mergekit has options for.

    Raises:
        SltaError: an expert has no calibration source or no record is left in it, or a model cannot be loaded.
    """
    experiment = recipe if isinstance(recipe, Experiment) else Experiment(recipe, **options)
    folder = Path(merged).expanduser()
    if not (folder / "config.json").is_file():
        raise SltaError(f"There is no model in {folder} (no config.json): give the folder that the merge wrote.")
    experiment.recipe.settings_of(CalibrationSettings)  # a recipe of another method has no held-out records
    if problems := calibration_problems(experiment.recipe, takes_statistics=False):
        raise SltaError("\n".join(problems))
    experts = experiment.recipe.experts
    experiment.load_data(experts)  # refuses the same data twice
    held_out = [experiment.samples.held_out(expert, samples) for expert in experts]
    tasks = [[row for row in data.token_ids if len(row) > 1] for data in held_out]
    for expert, rows in zip(experts, tasks, strict=True):
        if not rows:
            raise SltaError(f"The held-out records of {expert} have one token each: there is nothing to predict.")
    with tqdm(
        total=3 * sum(map(len, tasks)), desc="Evaluating", unit="record", leave=False, disable=experiment.quiet
    ) as bar:
        base = _score(experiment, experiment.base.folder, tasks, bar)
        own = [
            _score(experiment, model.folder, [rows], bar)[0]
            for model, rows in zip(experiment.experts, tasks, strict=True)
        ]
        after = _score(experiment, str(folder), tasks, bar)
    return Evaluation(
        tuple(
            TaskEvaluation(
                model=published_name(expert.reference),
                records=len(rows),
                tokens=sum(len(row) - 1 for row in rows),
                base=base[index],
                expert=own[index],
                merged=after[index],
            )
            for index, (expert, rows) in enumerate(zip(experts, tasks, strict=True))
        )
    )


def negative_log_likelihood(model: torch.nn.Module, rows: Rows, bar: Any = None) -> float:
    """Mean negative log-likelihood of each token given those before it, in nats.

    Records are right-padded into batches without a mask if that does not change the model's results.

    Args:
        model: a causal language model, in evaluation mode.
        rows: token ids, at least two in each row; the first one of a row is not predicted.
        bar: a progress bar for the rows.
    """
    device, fresh = next(model.parameters()).device, Fresh(model)
    total = 0.0
    for batch in make_batches([rows], BATCH_TOKENS, {0} if _padding_matters(model, rows) else ()):
        fresh.restore()
        token_ids = batch.token_ids.to(device)
        with torch.no_grad():
            logits = model(input_ids=token_ids, use_cache=False).logits
        for row, length in enumerate(batch.lengths):
            losses = torch.nn.functional.cross_entropy(
                logits[row, : length - 1].float(), token_ids[row, 1:length], reduction="none"
            )
            total += float(losses.double().sum())
        if bar is not None:
            bar.update(len(batch.lengths))
    return total / sum(len(row) - 1 for row in rows)


def _padding_matters(model: Any, rows: Rows) -> bool:
    own_code = type(model).__module__.startswith("transformers_modules")  # which was trusted when it was loaded
    try:
        return padding_matters(Decoder(copy.deepcopy(model.config), own_code), [*map(len, rows)])
    except SltaError:  # the model's structure is unknown
        return True


def _score(experiment: Experiment, folder: str, tasks: Sequence[Rows], bar: Any) -> list[float]:
    """The model's negative log-likelihood on each task; the model is gone afterwards."""
    bar.set_postfix_str(Path(folder).name)
    model = _load(experiment, folder)
    highest = max(token for rows in tasks for row in rows for token in row)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if highest >= vocabulary:
        raise SltaError(
            f"The base model's tokenizer gives the token id {highest}, but {folder} knows only {vocabulary} tokens."
        )
    try:
        return [negative_log_likelihood(model, rows, bar) for rows in tasks]
    except torch.OutOfMemoryError as error:
        raise _out_of_memory(folder, experiment.device) from error


def _load(experiment: Experiment, folder: str) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=experiment.trust_remote_code)
        model = get_auto_cls((config.architectures or [""])[0]).from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=experiment.trust_remote_code
        )
        return model.eval().to(experiment.device)
    except torch.OutOfMemoryError as error:
        raise _out_of_memory(folder, experiment.device) from error
    except (OSError, ValueError) as error:
        raise SltaError(f"The model in {folder} cannot be loaded: {error}") from error


def _out_of_memory(folder: str, device: str) -> SltaError:
    return SltaError(f"The model in {folder} does not fit into the memory of {device} in float32: use '--device cpu'.")
