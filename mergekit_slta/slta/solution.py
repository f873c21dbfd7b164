"""The merging weights of a level, and how to show or save them: a table, JSON, a plain recipe, a report."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch.nn.utils.rnn import pad_sequence

from mergekit_slta import files
from mergekit_slta.errors import SltaError, whole_number
from mergekit_slta.levels import kinds_of
from mergekit_slta.slta.solver import SubmoduleSolution, bootstrap, pooled
from mergekit_slta.tables import Paragraphs, Table, as_frame, as_json, as_percentage, short_names, without_sign_of_zero
from mergekit_slta.words import kind_name

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

    from mergekit_slta.slta.statistics import Statistics

# Above this condition number, that of two experts with a cosine similarity of 0.98, the samples hardly determine the
# weights.
MOST_CONDITION = 100.0
# From here on a change of the Gram matrices in the seventh digit changes the weights in the first.
ILL_CONDITIONED = 1e6


@dataclass(frozen=True, eq=False, repr=False)
class Solution(Paragraphs):
    """The merging weights of every submodule of a level, as ``Statistics.solve`` gives them.

    Vectors [T] are in the order of ``models``. The mappings are by submodule, in the order of the layers.

    Attributes:
        statistics: the statistics of these experts and of the samples that were used.
        level: the submodules' level.
        submodules: the solution of each submodule.
        balance, ridge, task_weights, keep_weight: the arguments of ``Statistics.solve``.
    """

    statistics: Statistics
    level: str
    submodules: Mapping[str, SubmoduleSolution]
    balance: bool
    ridge: float
    task_weights: tuple[float, ...] | None
    keep_weight: float = 1.0

    @property
    def models(self) -> tuple[str, ...]:
        """The experts' names."""
        return self.statistics.info.models

    @cached_property
    def alpha(self) -> dict[str, torch.Tensor]:
        """The merging weights, [T] float64."""
        return {name: own.alpha for name, own in self.submodules.items()}

    @cached_property
    def retained(self) -> dict[str, torch.Tensor]:
        """The share of each expert's feature change that the merge keeps on that expert's own samples, [T] float64.

        It is at most 1, may be negative, and is NaN where the expert changes nothing.
        """
        return {name: own.retained for name, own in self.submodules.items()}

    @cached_property
    def kept(self) -> torch.Tensor:
        """The share of each expert's feature change that the merge keeps in all submodules together, [T] float64.

        A submodule counts the more, the more the feature change in it is the expert's own. NaN for an expert that
        changes nothing.
        """
        shares = [own.share for own in self.submodules.values()]
        return pooled(torch.stack(list(self.retained.values())), torch.stack(shares))

    @property
    def keeps_base(self) -> bool:
        """Whether the base model has a task of its own."""
        return self.statistics.info.keep is not None

    @cached_property
    def kept_base(self) -> dict[str, float]:
        """The share of the base model that the merge keeps on the base model's own task, where it has one.

        It is 1 if the merge changes nothing there, and 0 if it changes as much as one expert that is added whole.
        """
        return {name: own.kept_base for name, own in self.submodules.items()} if self.keeps_base else {}

    @cached_property
    def base_kept(self) -> float:
        """``kept_base`` in all submodules together, each counted by how much the experts change it on that task."""
        shares = torch.tensor([[own.base_share] for own in self.submodules.values()])
        return float(pooled(torch.tensor([[own.kept_base] for own in self.submodules.values()]), shares))

    @cached_property
    def condition(self) -> dict[str, float]:
        """The condition number of the linear system; NaN where no expert changes anything."""
        return {name: own.condition for name, own in self.submodules.items()}

    @cached_property
    def rank(self) -> dict[str, int]:
        """The rank of the linear system; below T the weights are its minimum-norm solution."""
        return {name: own.rank for name, own in self.submodules.items()}

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments for ``solver.solve`` and ``solver.bootstrap``."""
        return {
            "tokens": self.statistics.tokens,
            "balance": self.balance,
            "ridge": self.ridge,
            "task_weights": self.task_weights,
            "keep_weight": self.keep_weight,
        }

    def bootstrap(self, repeats: int | SupportsIndex, seed: int | SupportsIndex = 0) -> dict[str, torch.Tensor]:
        """The standard errors [T] of each submodule's merging weights, from draws of the samples with replacement.

        Args:
            repeats: the number of draws, at least 2.
            seed: what the draws depend on.

        Returns:
            Submodule name to [T] float64; NaN where a task has one sample, which can only be drawn again.

        Raises:
            SltaError: there are fewer than two draws, or an argument is no whole number.
        """
        count, start = whole_number("repeats", repeats), whole_number("seed", seed)
        if count < 2:
            raise SltaError(f"Standard errors need at least two bootstrap draws, not {count}.")
        grams, task = self.statistics.grams, self.statistics.task
        return {
            name: bootstrap(grams[name], task, count, seed=start, **self.settings).std(0) for name in self.submodules
        }

    def columns(self, errors: Mapping[str, torch.Tensor] | None = None) -> dict[str, list[Any]]:
        """The columns of ``to_frame``, those of ``table``: a row for each submodule."""
        names = short_names(self.models)
        known = torch.stack([errors[name] for name in self.alpha]).T.tolist() if errors is not None else []
        alpha, retained = (torch.stack(list(own.values())).T.tolist() for own in (self.alpha, self.retained))
        return {
            "submodule": list(self.alpha),
            **{f"alpha {name}": weights for name, weights in zip(names, alpha, strict=True)},
            **({f"error {name}": column for name, column in zip(names, known, strict=True)} if known else {}),
            **{f"keeps {name}": shares for name, shares in zip(names, retained, strict=True)},
            **({"keeps base": list(self.kept_base.values())} if self.keeps_base else {}),
            "condition": list(self.condition.values()),
        }

    def to_frame(self, errors: Mapping[str, torch.Tensor] | None = None) -> pandas.DataFrame:
        """The numbers as a table of pandas, a row for each submodule; what is undefined is NaN.

        Args:
            errors: the standard errors of ``bootstrap``, to stand after the weights.

        Returns:
            A ``pandas.DataFrame``.

        Raises:
            SltaError: pandas is not installed.
        """
        return as_frame(self.columns(errors))

    def plot(self) -> Figure:
        """Draw the merging weights, as Figure 5 of the paper: experts by layers for each branch, or heads by layers.

        Returns:
            A figure of matplotlib.
        """
        from mergekit_slta.figures import Matrix, heat_map  # imports matplotlib

        matrices, experts = [], short_names(self.models)
        alpha = torch.stack(list(self.alpha.values()))
        for kind, layers in kinds_of(self.alpha).items():
            # [members, layers, experts]; a layer may have fewer members of a kind than another one
            grid = pad_sequence([alpha[rows] for rows in layers.values()], padding_value=math.nan)
            columns = list(map(str, layers))
            if len(grid) == 1:
                matrices.append(Matrix(kind_name(kind), grid[0].T.tolist(), experts, columns))
            else:
                members = list(map(str, range(len(grid))))
                matrices += [
                    Matrix(f"{kind_name(kind)}, {name}", own.tolist(), members, columns)
                    for name, own in zip(experts, grid.unbind(2), strict=True)
                ]
        return heat_map(
            matrices, x_label="decoder layer", y_label="", value_label="merging weight α", limits=(0.0, 1.0)
        ).figure

    def to_json(self, errors: Mapping[str, torch.Tensor] | None = None) -> str:
        """The solution as JSON, undefined numbers as null, the standard errors of ``bootstrap`` as ``alpha_std``."""
        content: dict[str, Any] = {
            "level": self.level,
            "models": self.models,
            "alpha": {name: alpha.tolist() for name, alpha in self.alpha.items()},
            "retained": {name: retained.tolist() for name, retained in self.retained.items()},
            "condition": self.condition,
        }
        if self.keeps_base:
            content |= {"kept_base": self.kept_base, "keep_weight": self.keep_weight}
        if errors is not None:
            content["alpha_std"] = {name: error.tolist() for name, error in errors.items()}
        return as_json(content)

    def table(self, errors: Mapping[str, torch.Tensor] | None = None) -> Table:
        """One row per submodule: merging weights, kept shares, condition number; and one for all, with ``kept``.

        The standard errors of ``bootstrap`` stand beside the weights.
        """
        names = short_names(self.models)
        header = [f"alpha {name}" for name in names] + [f"keeps {name}" for name in names]
        header += ["keeps base"] if self.keeps_base else []
        rows = []
        for name in self.alpha:
            alpha = [f"{without_sign_of_zero(weight):.3f}" for weight in self.alpha[name].tolist()]
            if errors is not None and not errors[name].isnan().any():
                pairs = zip(alpha, errors[name].tolist(), strict=True)
                alpha = [f"{weight} ±{error:.3f}" for weight, error in pairs]
            retained = [as_percentage(share) for share in self.retained[name].tolist()]
            retained += [as_percentage(self.kept_base[name])] if self.keeps_base else []
            condition = "-" if math.isnan(self.condition[name]) else f"{self.condition[name]:.3g}"
            rows.append([name, *alpha, *retained, condition])
        if len(rows) > 1:
            shares = [*self.kept.tolist(), *([self.base_kept] if self.keeps_base else [])]
            rows.append(["all", *("-" for _ in names), *map(as_percentage, shares), "-"])
        return Table(["submodule", *header, "condition"], rows)

    def notes(self) -> list[str]:
        """Sentences on the submodules whose samples do not determine every weight."""
        dependent = [name for name in self.submodules if self.rank[name] < len(self.models)]
        ill = [name for name in self.submodules if self.condition[name] > ILL_CONDITIONED]
        notes = []
        if ill:
            notes.append(
                f"In {len(ill)} of {len(self.rank)} submodules ({', '.join(ill[:3])}{' ...' * (len(ill) > 3)}) the "
                "experts are nearly linearly dependent: small changes of the data change their weights much; a 'ridge' "
                "steadies them."
            )
        if dependent:
            branch = "; one that changes nothing there takes its mean weight in the branch" * (self.level == "linear")
            notes.append(
                f"In {len(dependent)} of {len(self.rank)} submodules ({dependent[0]} ...) experts are linearly "
                f"dependent or change nothing: their weights are the minimum-norm solution{branch}."
            )
        return notes

    def parts(self, errors: Mapping[str, torch.Tensor] | None = None) -> Iterator[str | Table]:
        """The table, how to read it, which layers are measured at a coarser level, and the notes."""
        yield self.table(errors)
        pairs = zip(short_names(self.models), self.models, strict=True)
        legend = [f"{short} is {name}" for short, name in pairs if short != name]
        legend += ["alpha: the merging weight", "keeps: the share of the expert's feature change that the merge keeps"]
        if self.keeps_base:
            legend += [f"keeps base: the same for the base model on its own prompts, with weight {self.keep_weight:g}"]
        legend += [f"condition: 1 is ideal, above {MOST_CONDITION:.0f} the samples hardly determine the weights"]
        legend += ["±: the standard error over bootstrap draws"] if errors is not None else []
        yield "; ".join(legend) + "."
        yield from (str(own) for own in self.statistics.info.fallbacks if own.level == self.level)
        yield from self.notes()

    def text(self, errors: Mapping[str, torch.Tensor] | None = None) -> str:
        """What is printed, with the standard errors of ``bootstrap``."""
        return "\n\n".join(map(str, self.parts(errors)))

    def save_recipe(
        self,
        path: str | os.PathLike[str],
        *,
        models: Mapping[str, str] | None = None,
        tokenizer_source: str = "",
        trust_remote_code: bool = False,
    ) -> Path:
        """Write a mergekit recipe that does the same merge without this package, without data and without statistics.

        It is the same apart from ``out_dtype``, which is the type that the base model is stored in.

        Args:
            path: the YAML file to write.
            models: the path or Hub id to write for a model, the base model included, by its name in the statistics;
                the others are written as the recipe spells them that was measured, after ``load`` by their names.
            tokenizer_source: mergekit's setting of that name; left out when empty.
            trust_remote_code: run the Python code that comes with the base model, whose configuration is read.

        Returns:
            The recipe's path.

        Raises:
            SltaError: a name is not in the statistics, a recipe cannot express the level, or the base model's
                configuration cannot be read.
            OSError: the file cannot be written.
        """
        from mergekit_slta.slta.plain_recipe import plain_recipe  # imports mergekit, which takes seconds

        known = (self.statistics.info.base_model, *self.models)
        for name in models or {}:
            if name not in known:
                raise SltaError(f"The statistics hold no model '{name}', only {', '.join(known)}.")
        text = plain_recipe(
            self,
            models={**self.statistics.paths, **(models or {})},
            tokenizer_source=tokenizer_source,
            trust_remote_code=trust_remote_code,
        )
        file = Path(path).expanduser()
        files.write(file, text.encode())
        return file
