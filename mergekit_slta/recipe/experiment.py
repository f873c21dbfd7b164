"""A recipe with its models and data opened, for everything that runs them."""

from __future__ import annotations

from collections.abc import Sequence

from mergekit_slta.data.draw import CalibrationData
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.errors import SltaError
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.models.checkpoint import Checkpoint
from mergekit_slta.models.skeleton import hashed_computation
from mergekit_slta.recipe.recipe import Expert, Recipe
from mergekit_slta.recipe.samples import Samples, repeated_data
from mergekit_slta.slta.statistics import BaseContent, Content, Fingerprint, settings_fingerprint, tokens_fingerprint


class Experiment:
    """A recipe's models and data, opened; what is costly is done once and only when it is needed.

    Args:
        recipe: the recipe.
        device: where the layers run.
        trust_remote_code, cache_dir: mergekit's options ``--trust-remote-code`` and ``--transformers-cache``.
        quiet: no progress bar.
        ranks: the processes that share the work.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        device: str = "cpu",
        trust_remote_code: bool = False,
        cache_dir: str | None = None,
        quiet: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        self.recipe = recipe
        self.device = device
        self.trust_remote_code = trust_remote_code
        self.cache_dir = cache_dir
        self.quiet = quiet
        self.ranks = ranks or Ranks()
        self.samples = Samples(recipe.base, recipe.settings, trust_remote_code, cache_dir, quiet)
        self.base = Checkpoint(recipe.base, trust_remote_code)
        self.experts = [Checkpoint(expert.reference, trust_remote_code) for expert in recipe.experts]
        self._merge_adapters()

    def open(self) -> None:
        """Have all models here: mergekit downloads those that are not."""
        for checkpoint in (self.base, *self.experts):
            checkpoint.open()

    def _merge_adapters(self) -> None:
        """Have the first rank alone merge the adapters that mergekit has not merged yet."""
        adapted = [expert for expert in (self.base, *self.experts) if expert.reference.lora is not None]
        if not adapted or self.ranks.count == 1:
            return
        if self.ranks.first:
            for checkpoint in adapted:
                checkpoint.open()
        self.ranks.wait()

    def check_edges(self, decoder: Decoder, experts: bool) -> None:
        """Read the tensors outside the decoder layers, the base model's and perhaps the experts', for their values.

        Raises:
            SltaError: a tensor is missing, or holds NaN or Inf.
        """
        for model in [self.base, *self.experts] if experts else [self.base]:
            for name in decoder.edge_tensors():
                model.read({name: name}, decoder.base_model_prefix)

    def load_data(self, experts: Sequence[Expert], count: int | None = None) -> list[CalibrationData]:
        """The calibration samples of experts that have a source: as many as the recipe says, or ``count``.

        Raises:
            SltaError: a source gives no samples, or the same ones as another's.
        """
        data = [self.samples.of(expert, count) for expert in experts]
        if problems := repeated_data(zip(experts, data, strict=True)):
            raise SltaError("\n".join(problems))
        return data

    def contents(self) -> tuple[BaseContent, list[Content]]:
        """The base model and the experts by content; the first rank alone reads them whole, where files are shared."""
        if not self.ranks.first:
            self.ranks.wait()
        base, *experts = (
            {"sample": model.fingerprint(self.cache_dir), "whole": model.fingerprint(self.cache_dir, whole=True)}
            for model in (self.base, *self.experts)
        )
        if self.ranks.first:
            self.ranks.wait()
        config = hashed_computation(self.base.config)
        return BaseContent(**base, config=config), [Content(**expert) for expert in experts]

    def fingerprint(self, data: Sequence[CalibrationData]) -> Fingerprint:
        """What the models, the samples and how they were drawn are, by content."""
        settings = self.recipe.settings
        base, experts = self.contents()
        return Fingerprint(
            base=base,
            experts=tuple(experts),
            tokens=tokens_fingerprint([samples.sha256 for samples in data]),
            settings=settings_fingerprint(settings.samples, settings.max_tokens, settings.seed),
        )
