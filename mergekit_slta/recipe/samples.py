"""Draw the samples of a recipe's tasks, each task's once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mergekit.common import ModelReference
from transformers import PreTrainedTokenizerBase

from mergekit_slta.data.draw import CalibrationData, CalibrationSource
from mergekit_slta.data.sources import is_dataset
from mergekit_slta.recipe.recipe import Task
from mergekit_slta.recipe.settings import CalibrationSettings


@dataclass
class Samples:
    """Draws the samples of a recipe's tasks; one tokenizer tokenizes everything, each model's own has its template."""

    settings: CalibrationSettings
    tokenizer: PreTrainedTokenizerBase
    tokenizer_of: Callable[[ModelReference], PreTrainedTokenizerBase]
    quiet: bool = False

    def __post_init__(self) -> None:
        self.drawn: dict[tuple[Task, int], CalibrationData] = {}

    def of(self, task: Task, count: int | None = None) -> CalibrationData:
        """A task's calibration samples: ``count`` of them, by default the settings' number; see ``draw``."""
        key = task, count or self.settings.samples
        if key not in self.drawn:
            self.drawn[key] = self._source(task, task.calibration).draw(key[1])
        return self.drawn[key]

    def held_out(self, task: Task, count: int) -> CalibrationData:
        """``count`` records of the task that are no calibration samples: of its ``evaluation`` source if it has one."""
        return self._source(task, task.evaluation or task.calibration).draw(count, self.of(task))

    def _source(self, task: Task, source: str) -> CalibrationSource:
        if self.quiet and is_dataset(source):
            import datasets  # slow to import, and most recipes name files

            datasets.disable_progress_bars()
        return CalibrationSource(
            source,
            task.template,
            self.tokenizer,
            lambda: self.tokenizer_of(task.reference),
            self.settings.max_tokens,
            self.settings.seed,
        )
