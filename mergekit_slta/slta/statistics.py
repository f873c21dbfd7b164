"""What was measured of a recipe's models, and the merging weights that are solved from it.

Both are results that users hold: they print as tables, and can be saved.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, SupportsFloat, SupportsIndex

import torch
from torch.nn.utils.rnn import pad_sequence

from mergekit_slta import files
from mergekit_slta.errors import SltaError, whole_number
from mergekit_slta.levels import LEVELS, kinds_of, of_level, place_of
from mergekit_slta.slta.solver import SubmoduleSolution, bootstrap, pooled, solve
from mergekit_slta.slta.statistics_file import Info, read_statistics, resolve_statistics, write_statistics
from mergekit_slta.tables import Paragraphs, Table, as_json, known_names, short_names
from mergekit_slta.words import as_score, counted, enumerated, kind_name, listed, plain_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Above this condition number, that of two experts with a cosine similarity of 0.98, the samples hardly determine the
# weights.
MOST_CONDITION = 100.0
# From here on a change of the Gram matrices in the seventh digit changes the weights in the first.
ILL_CONDITIONED = 1e6


@dataclass(frozen=True, repr=False, eq=False)
class Statistics(Paragraphs):
    """Per-prompt Gram matrices of every submodule, with the metadata of their measurement."""

    grams: dict[str, torch.Tensor]  # submodule name to [N, T, T] float64
    task: torch.Tensor  # [N] int64, whose prompt it is: t for expert t, T for the base model, if it has a task
    tokens: torch.Tensor  # [N] int64, the number of tokens of the prompt
    info: Info  # the file's metadata
    # Where ``measure`` found the models, by their names in ``info``; not in the file, so empty after ``load``.
    paths: Mapping[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """How many prompts, tasks, tokens and submodules were measured."""
        submodules = ", ".join(f"{len(self.submodules(level))} at {level}" for level in self.info.levels)
        drawn = f"{counted(len(self.task), 'prompt')} of {counted(int(self.task.max()) + 1, 'task')}"
        return f"{drawn} ({int(self.tokens.sum())} tokens), submodules: {submodules}"

    def parts(self) -> Iterator[str | Table]:
        """A row for each task, and a sentence on all."""
        rows, models = [], [*self.info.models, self.info.base_model]
        for task, data in enumerate(self.info.tasks):
            tokens = self.tokens[self.task == task]
            rows.append([models[task], str(len(tokens)), str(int(tokens.sum())), data.source])
        yield Table(["task of", "prompts", "tokens", "calibration"], rows)
        yield f"{self.summary}."
        yield from map(str, self.info.fallbacks)

    def submodules(self, level: str) -> list[str]:
        """The names of a level's submodules, in the order of the layers, attention before the MLP, linear maps by name.

        Raises:
            SltaError: the level was not measured.
        """
        if level not in self.info.levels:
            levels = " ".join(f"--level {other}" for other in (*self.info.levels, level))
            measured = f"measure another file with 'mergekit-slta calibrate RECIPE -o FILE {levels}'"
            fix = measured if level in LEVELS else "name one of these"
            raise SltaError(f"The statistics hold no level '{level}', only {', '.join(self.info.levels)}: {fix}.")
        return of_level(self.grams, level)

    def select(self, *names: str) -> Statistics:
        """The statistics of some of the experts in the given order, as if only they had been measured.

        The base model's task stays.

        The names are those in ``info.models``, in the tables, or in the recipe that was measured.

        Raises:
            SltaError: no name is given, or a name is not in the statistics or given twice.
        """
        models, experts = self.info.models, [self._name(name) for name in names]
        if not names or len(set(experts)) < len(experts):
            raise SltaError(f"Name one or more of {', '.join(models)}, each once at most.")
        return self.take([models.index(name) for name in experts])

    def _name(self, name: str) -> str:
        """The expert of this name in ``info.models``, in the tables, or in the recipe that was measured."""
        models = self.info.models
        spellings = {path: model for model, path in self.paths.items()} | known_names(models)
        if (expert := spellings.get(str(name))) not in models:
            one = "" if isinstance(name, str) else " Give each name as an argument of its own."
            raise SltaError(f"The statistics hold no expert '{name}', only {', '.join(models)}.{one}")
        return expert

    def take(self, experts: Sequence[int], keep: bool = True) -> Statistics:
        """``select`` by the experts' positions in ``info.models``; with the base model's task only if ``keep``."""
        columns, info = torch.tensor(list(experts)), self.info
        base_task = info.keep if keep else None
        tasks = [*experts, *([len(info.models)] if base_task else [])]
        rows = torch.cat([(self.task == task).nonzero().flatten() for task in tasks])
        fingerprints = tuple(info.fingerprint.experts[expert] for expert in experts)
        described = {
            "models": tuple(info.models[expert] for expert in experts),
            "calibration": tuple(info.calibration[expert] for expert in experts),
            "keep": base_task,
            "fingerprint": info.fingerprint.model_copy(update={"experts": fingerprints}),
        }
        drawn = self._rows(rows)
        return replace(
            drawn,
            grams={name: gram[:, columns][:, :, columns] for name, gram in drawn.grams.items()},
            task=torch.tensor([tasks.index(task) for task in drawn.task.tolist()]),
            info=info.model_copy(update=described),
        )

    def _rows(self, rows: torch.Tensor) -> Statistics:
        grams = {name: gram[rows] for name, gram in self.grams.items()}
        return replace(self, grams=grams, task=self.task[rows], tokens=self.tokens[rows])

    def first_samples(self, count: int | SupportsIndex) -> Statistics:
        """The statistics of each task's first ``count`` samples, or of all samples if a task has fewer.

        Raises:
            SltaError: every task has fewer samples, or ``count`` is not positive.
        """
        most, first = int(self.task.bincount().max()), operator.index(count)
        if not 1 <= first <= most:
            raise SltaError(f"The statistics hold {most} prompts per task: set 'samples' to 1 to {most}, not {first}.")
        return self._rows(torch.cat([(self.task == task).nonzero().flatten()[:first] for task in self.task.unique()]))

    def solve(
        self,
        level: str | None = None,
        *,
        balance: bool = True,
        ridge: float | SupportsFloat = 0.0,
        task_weights: Mapping[str, float | SupportsFloat] | None = None,
        samples: int | SupportsIndex | None = None,
        keep_weight: float | SupportsFloat | None = None,
    ) -> Solution:
        """Solve for the merging weights of every submodule of a level.

        Args:
            level: the level; by default ``attn_mlp`` if it was measured, else the first measured level.
            balance: give every sample the same influence (Eq. 33-34).
            ridge: draws the weights towards zero: adds ridge * trace(A) / T to A's diagonal.
            task_weights: how much each expert's task counts relative to the others, by the expert's name; 1 by default.
            samples: how many of each task's first samples to use; all by default.
            keep_weight: how much the base model's task counts, κ; 1 by default, 0 leaves it out.

        Raises:
            SltaError: the level was not measured, an argument is out of its range, or the base model has no task to
                weight.
        """
        level = level or ("attn_mlp" if "attn_mlp" in self.info.levels else self.info.levels[0])
        balance, ridge = bool(balance), float(ridge)
        kappa = 1.0 if keep_weight is None else float(keep_weight)
        for name, value in {"ridge": ridge, "keep_weight": kappa}.items():
            if not 0 <= value < math.inf:
                raise SltaError(f"'{name}' is {value}: give a number of at least zero.")
        if keep_weight is not None and kappa and self.info.keep is None:
            raise SltaError(
                "The statistics were measured without prompts for the base model, so 'keep_weight' has no effect: list "
                "the base model with a 'calibration' under the recipe's 'models', and measure again."
            )
        weights = self._task_weights(task_weights) if task_weights is not None else None
        used = self if samples is None else self.first_samples(samples)
        arguments: dict[str, Any] = {"balance": balance, "ridge": ridge, "task_weights": weights, "keep_weight": kappa}
        names = used.submodules(level)
        solved = {name: solve(used.grams[name], used.task, tokens=used.tokens, **arguments) for name in names}
        return Solution(used, level, solved, **arguments)

    def _task_weights(self, given: Mapping[str, float | SupportsFloat]) -> tuple[float, ...]:
        named = dict[str, float]()
        for name, weight in given.items():
            try:
                number = float(weight)
            except ValueError:  # text, from the command
                number = math.nan
            expert = self._name(name)
            if not 0 <= number < math.inf:
                raise SltaError(f"The task weight of {name} is {weight!r}: give a number of at least zero.")
            named[expert] = number
        weights = tuple(named.get(name, 1.0) for name in self.info.models)
        if not any(weights):
            raise SltaError("Every task weight is zero: at least one task must count.")
        return weights

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the statistics file.

        Raises:
            OSError: the file cannot be written; an earlier file stays as it was.
        """
        file = Path(path).expanduser()
        write_statistics(file, (self.grams, self.task, self.tokens, self.info))
        return file

    @staticmethod
    def load(source: str | os.PathLike[str], cache_dir: str | None = None) -> Statistics:
        """Read and check a statistics file.

        Args:
            source: its path, the folder of a merge by ``slta``, or ``hf:ORG/REPO/FILE[@REVISION]`` on the Hub.
            cache_dir: the folder for downloads; the Hub's own cache by default.

        Raises:
            SltaError: the file is missing, truncated, damaged, of another kind or version, or cannot be downloaded.
        """
        return Statistics(*read_statistics(resolve_statistics(os.fspath(source), cache_dir)))


@dataclass(frozen=True, eq=False, repr=False)
class Solution(Paragraphs):
    """The merging weights of every submodule of a level, as ``Statistics.solve`` gives them; not to be changed.

    Vectors [T] are in the order of ``models``. The mappings are by submodule, in the order of the layers.
    """

    statistics: Statistics  # of these experts and of the samples that were used
    level: str
    submodules: Mapping[str, SubmoduleSolution]
    # The arguments of ``Statistics.solve``.
    balance: bool
    ridge: float
    task_weights: tuple[float, ...] | None
    keep_weight: float = 1.0
    draws: Mapping[str, torch.Tensor] | None = None  # [R, T] float64, the merging weights of R draws, by ``bootstrap``

    @property
    def models(self) -> tuple[str, ...]:
        """The experts' names."""
        return self.statistics.info.models

    @cached_property
    def alpha(self) -> Mapping[str, torch.Tensor]:
        """The merging weights, [T] float64."""
        return MappingProxyType({name: solved.alpha for name, solved in self.submodules.items()})

    @cached_property
    def alpha_std(self) -> Mapping[str, torch.Tensor]:
        """The standard errors of the merging weights, [T] float64, over the draws of ``bootstrap``; empty without.

        They are NaN where a task has one sample, which can only be drawn again.
        """
        return MappingProxyType({name: drawn.std(0) for name, drawn in (self.draws or {}).items()})

    @cached_property
    def retained(self) -> Mapping[str, torch.Tensor]:
        """The share of each expert's feature change that the merge retains on that expert's own samples, [T] float64.

        It is at most 1, may be negative, and is NaN where the expert changes nothing.
        """
        return MappingProxyType({name: solved.retained for name, solved in self.submodules.items()})

    @cached_property
    def retained_overall(self) -> torch.Tensor:
        """The share of each expert's feature change that the merge retains in all submodules together, [T] float64.

        A submodule counts the more, the more the feature change in it is the expert's own. NaN for an expert that
        changes nothing.
        """
        return _retained_together(self.submodules.values())

    def retained_by_layer(self) -> dict[int, torch.Tensor]:
        """``retained_overall`` of each layer's submodules alone."""
        layers: dict[int, list[SubmoduleSolution]] = {}
        for name, solved in self.submodules.items():
            if (layer := place_of(name).layer) is not None:
                layers.setdefault(layer, []).append(solved)
        return {layer: _retained_together(parts) for layer, parts in layers.items()}

    @property
    def has_base_task(self) -> bool:
        """Whether the base model has a task of its own."""
        return self.statistics.info.keep is not None

    @cached_property
    def kept_base(self) -> dict[str, float]:
        """The share of the base model that the merge keeps on the base model's own task, where it has one.

        It is 1 if the merge changes nothing there, and 0 if it changes as much as one expert that is added whole.
        """
        return {name: solved.kept_base for name, solved in self.submodules.items()} if self.has_base_task else {}

    @cached_property
    def kept_base_overall(self) -> float:
        """``kept_base`` in all submodules together, each counted by how much the experts change it on that task."""
        solved = self.submodules.values()
        kept_base, shares = ([[one.kept_base] for one in solved], [[one.base_share] for one in solved])
        return float(pooled(torch.tensor(kept_base), torch.tensor(shares)))

    @cached_property
    def condition(self) -> dict[str, float]:
        """The condition number of A, scaled to a unit diagonal; NaN where no expert changes anything."""
        return {name: solved.condition for name, solved in self.submodules.items()}

    def bootstrap(self, repeats: int | SupportsIndex, seed: int | SupportsIndex = 0) -> Solution:
        """Solve again for draws of the samples with replacement, for standard errors and intervals.

        The same solution then has ``draws`` and ``alpha_std``, and its table the standard errors beside the weights.

        Raises:
            SltaError: there are fewer than two draws.
        """
        count, start = whole_number("repeats", repeats, least=2), operator.index(seed)
        measured = self.statistics
        settings = {of: getattr(self, of) for of in ("balance", "ridge", "task_weights", "keep_weight")}
        draws = {
            name: bootstrap(measured.grams[name], measured.task, count, seed=start, tokens=measured.tokens, **settings)
            for name in self.submodules
        }
        return replace(self, draws=draws)

    def intervals(self, share: float | SupportsFloat = 0.9) -> dict[str, torch.Tensor]:
        """The lowest and the highest merging weights [2, T] float64 of this share of the draws, outer ones left out.

        Raises:
            SltaError: ``bootstrap`` was not called, or ``share`` is not between 0 and 1.
        """
        inside = float(share)
        if self.draws is None:
            raise SltaError("There are no bootstrap draws yet: call bootstrap before intervals.")
        if not 0 < inside < 1:
            raise SltaError(f"'share' is {inside:g}: give a number between 0 and 1.")
        ends = torch.tensor([(1 - inside) / 2, (1 + inside) / 2], dtype=torch.float64)
        return {name: drawn.quantile(ends, dim=0) for name, drawn in self.draws.items()}

    def plot(self) -> Figure:
        """Draw the merging weights, as Figure 5 of the paper: experts by layers for each branch, or heads by layers."""
        from mergekit_slta.figures import Matrix, heat_map  # imports matplotlib

        matrices, experts = [], short_names(self.models)
        alpha = torch.stack(list(self.alpha.values()))
        for kind, layers in kinds_of(self.alpha).items():
            # [members, layers, experts]; a layer may have fewer members of a kind than another one
            grid = pad_sequence([alpha[rows] for rows in layers.values()], padding_value=math.nan)
            title, columns = kind_name(kind), [""] if self.level == "model" else list(map(str, layers))
            if len(grid) == 1:
                matrices.append(Matrix(title, grid[0].T.tolist(), experts, columns))
            else:
                members = list(map(str, range(len(grid))))
                by_expert = zip(experts, grid.unbind(2), strict=True)
                matrices += [Matrix(f"{title}, {name}", of.tolist(), members, columns) for name, of in by_expert]
        x_label = "decoder layer" * (self.level != "model")
        return heat_map(matrices, x_label=x_label, y_label="", value_label="merging weight α")

    def to_json(self) -> str:
        """The solution as JSON, undefined numbers as null."""
        content: dict[str, Any] = {
            "level": self.level,
            "models": self.models,
            "alpha": {name: alpha.tolist() for name, alpha in self.alpha.items()},
            "retained": {name: retained.tolist() for name, retained in self.retained.items()},
            "condition": self.condition,
        }
        if self.has_base_task:
            content |= {"kept_base": self.kept_base, "keep_weight": self.keep_weight}
        if self.draws:
            content["alpha_std"] = {name: error.tolist() for name, error in self.alpha_std.items()}
        return as_json(content)

    def table(self) -> Table:
        """One row per submodule: merging weights with their standard errors, shares, condition; and one for all."""
        names, kept_base = short_names(self.models), ["kept_base"] * self.has_base_task
        header = ["submodule", *(f"alpha {name}" for name in names), *(f"retained {name}" for name in names)]
        rows, no_errors = [], torch.full((len(names),), math.nan)
        for name, solved in self.submodules.items():
            pairs = zip(solved.alpha.tolist(), self.alpha_std.get(name, no_errors).tolist(), strict=True)
            cells = [as_score(weight, 3) + ("" if math.isnan(error) else f" ±{error:.3f}") for weight, error in pairs]
            shares = [*solved.retained.tolist(), *[solved.kept_base] * self.has_base_task]
            rows.append([name, *cells, *map(as_score, shares), plain_number(solved.condition)])
        if len(rows) > 1:
            shares = [*self.retained_overall.tolist(), *([self.kept_base_overall] if self.has_base_task else [])]
            rows.append(["all", *("–" for _ in self.models), *map(as_score, shares), "–"])
        return Table([*header, *kept_base, "condition"], rows)

    def verdict(self) -> str:
        """How much of each expert's feature change the merge retains, and where; and how much of the base it keeps."""
        by_layer, clauses = self.retained_by_layer(), []
        overall = zip(short_names(self.models), self.retained_overall.tolist(), strict=True)
        for place, (name, share) in enumerate(overall):
            clause = f"{as_score(share)} of {name}'{'s' * (name[-1:] != 's')}" + " feature change" * (place == 0)
            layers = {layer: float(shares[place]) for layer, shares in by_layer.items() if not shares[place].isnan()}
            if len(layers) > 1:
                least, most = min(layers, key=layers.__getitem__), max(layers, key=layers.__getitem__)
                where = f"from {as_score(layers[least])} in layer {least} to {as_score(layers[most])} in layer {most}"
                clause += f" ({where})"
            elif math.isnan(share):
                clause += " (it has none: is it a copy of the base model?)"
            clauses.append(clause)
        said = f"At level {self.level}, the merge retains {enumerated(clauses)}"
        if self.has_base_task:
            said += f"; it keeps {as_score(self.kept_base_overall)} of the base model on its own task"
        return f"{said}."

    def notes(self) -> list[str]:
        """Sentences on the submodules whose samples do not determine every weight that was solved."""
        count, notes = len(self.submodules), list[str]()
        if ill := [name for name, solved in self.submodules.items() if solved.condition > ILL_CONDITIONED]:
            notes.append(
                f"In {len(ill)} of {count} submodules ({listed(ill)}) the experts are "
                "nearly linearly dependent, so small changes of the prompts change the weights much: set a 'ridge'."
            )
        unknown = {name: s.rank < len(self.models) or not s.measured.all() for name, s in self.submodules.items()}
        if dependent := [name for name, is_unknown in unknown.items() if is_unknown]:
            branch = "; an expert without changes there gets its mean in the branch or layer" * (self.level == "linear")
            notes.append(
                f"In {len(dependent)} of {count} submodules ({listed(dependent)}) experts are linearly dependent or "
                f"change nothing, so several weights fit the prompts: the smallest are taken{branch}."
            )
        return notes

    def parts(self) -> Iterator[str | Table]:
        """The table, how to read it, which layers are measured at a coarser level, and the notes."""
        yield self.table()
        pairs = zip(short_names(self.models), self.models, strict=True)
        legend = [f"{short} is {name}" for short, name in pairs if short != name]
        legend += [
            "alpha: the merging weight",
            "retained: the share of the expert's feature change that the merge retains",
        ]
        if self.has_base_task:
            legend += [f"kept_base: the share kept of the base model on its own prompts, with κ = {self.keep_weight:g}"]
        legend += [f"condition: 1 is ideal, above {MOST_CONDITION:.0f} the prompts hardly determine the weights"]
        legend += ["±: alpha_std, the standard error over bootstrap draws"] if self.draws else []
        yield "; ".join(legend) + "."
        yield from (str(fallback) for fallback in self.statistics.info.fallbacks if fallback.level == self.level)
        yield from self.notes()

    def save_recipe(
        self,
        path: str | os.PathLike[str],
        *,
        models: Mapping[str, str] | None = None,
        tokenizer_source: str = "",
        trust_remote_code: bool = False,
    ) -> Path:
        """Write a mergekit recipe that does the same merge without this plugin, without prompts and without statistics.

        ``out_dtype`` is the type that the base model is stored in; a comment says what mergekit alone may leave out.

        Args:
            path: the YAML file to write.
            models: the path or Hub id to write for a model, the base model included, by its name in the statistics;
                the others are written as the recipe spells them that was measured, after ``load`` by their names.
            tokenizer_source: mergekit's setting of that name, or a model's name; left out when empty.
            trust_remote_code: run the Python code that comes with the base model, whose configuration is read.

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
        named = {name: name for name in known} | dict(self.statistics.paths) | dict(models or {})
        paths = {name: files.local_name(os.fspath(path)) for name, path in named.items()}
        how = f"level {self.level}, balance {str(self.balance).lower()}, ridge {self.ridge}"
        how += f", kappa {self.keep_weight:g}" * self.has_base_task
        if self.task_weights:
            how += f", task weights {':'.join(map(str, self.task_weights))}"
        origin = f"The merging weights were solved in closed form (arXiv 2504.10902): {how}. {self.verdict()}"
        solved = self.statistics.info, self.level, self.submodules, origin
        text = plain_recipe(*solved, paths, paths.get(tokenizer_source, tokenizer_source), trust_remote_code)
        file = Path(path).expanduser()
        files.write(file, text.encode())
        return file


def _retained_together(solved: Collection[SubmoduleSolution]) -> torch.Tensor:
    """The ``retained`` of several submodules, each counted by how much of its feature change is the expert's own."""
    return pooled(torch.stack([one.retained for one in solved]), torch.stack([one.share for one in solved]))
