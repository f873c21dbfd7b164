"""Draw the samples of a recipe's tasks, and load the tokenizers for them; each is done once."""

from __future__ import annotations

from dataclasses import dataclass

from mergekit.common import ModelReference
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mergekit_slta.data.draw import CalibrationData, CalibrationSource
from mergekit_slta.data.sources import is_dataset
from mergekit_slta.errors import reading
from mergekit_slta.models.adapters import tokenizer_folder
from mergekit_slta.recipe.recipe import Task
from mergekit_slta.recipe.settings import CalibrationSettings


@dataclass
class Samples:
    """Draws the samples of a recipe's tasks; the base model's tokenizer tokenizes everything."""

    base: ModelReference
    settings: CalibrationSettings
    trust_remote_code: bool = False
    cache_dir: str | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        self.drawn: dict[tuple[Task, int], CalibrationData] = {}
        self._tokenizers: dict[ModelReference, PreTrainedTokenizerBase] = {}

    def of(self, task: Task, count: int | None = None) -> CalibrationData:
        """A task's calibration samples: ``count`` of them, by default the settings' number; see ``draw``."""
        key = task, count or self.settings.samples
        if key not in self.drawn:
            self.drawn[key] = self._source(task, task.calibration).draw(key[1])
        return self.drawn[key]

    def held_out(self, task: Task, count: int) -> CalibrationData:
        """``count`` records of the task that are no calibration samples: of its ``evaluation`` source if it has one."""
        return self._source(task, task.evaluation or task.calibration).draw(count, self.of(task))

    def tokenizer(self, reference: ModelReference) -> PreTrainedTokenizerBase:
        """A model's tokenizer; for an adapter its own, or else that of its base model."""
        if reference in self._tokenizers:
            return self._tokenizers[reference]
        with reading(reference, "has no usable tokenizer, which calibration needs", "get sound copies of its files"):
            own = reference.lora and tokenizer_folder(reference.lora, self.cache_dir)
            tokenizer = AutoTokenizer.from_pretrained(
                str(own or reference.model.path),
                revision=None if own else reference.model.revision,
                trust_remote_code=self.trust_remote_code,
                cache_dir=self.cache_dir,
            )
            self._tokenizers[reference] = tokenizer
            return tokenizer

    def _source(self, task: Task, source: str) -> CalibrationSource:
        if self.quiet and is_dataset(source):
            import datasets  # slow to import, and most recipes name files

            datasets.disable_progress_bars()
        return CalibrationSource(
            source,
            task.template,
            self.tokenizer(self.base),
            lambda: self.tokenizer(task.reference),
            self.settings.max_tokens,
            self.settings.seed,
        )
