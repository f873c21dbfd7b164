"""How well one model predicts records, run by the engine one layer at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mergekit_slta.engine import memory
from mergekit_slta.engine.loop import LayerMethod, Progress, pass_layers
from mergekit_slta.engine.ranks import Ranks
from mergekit_slta.engine.streams import Streams, read_edges
from mergekit_slta.errors import SltaError
from mergekit_slta.layers.calls import logits
from mergekit_slta.layers.decoder import Decoder
from mergekit_slta.layers.trace import tail_problem, trace
from mergekit_slta.models.checkpoint import Checkpoint, Tensors
from mergekit_slta.models.headers import Model
from mergekit_slta.models.layout import language_names
from mergekit_slta.words import listed

# Positions whose logits are in memory at once: with a large vocabulary they outgrow everything else.
LOGIT_POSITIONS = 1024


class Sample(NamedTuple):
    """A record."""

    token_ids: tuple[int, ...]  # at least two
    begin: int  # the first token that is predicted, at least 1
    end: int  # the one after the last
    known: bool = False  # these tokens are the record's answer, as far as it is in the row
    whole: bool = False  # they are all of it

    @property
    def length(self) -> int:
        return self.end - self.begin

    @property
    def end_token(self) -> int | None:
        """The token after a whole answer."""
        return self.token_ids[self.end] if self.whole and self.end < len(self.token_ids) else None


class Score(NamedTuple):
    """How a model predicts a record."""

    loss: float  # the negative log-likelihood of the predicted tokens, in nats
    likeliest: tuple[int, ...]  # at each predicted position and after the last one, with the record's own tokens before

    def right(self, sample: Sample) -> int:
        """How many of the predicted tokens are the likeliest; if all are, greedy decoding gives them."""
        wanted = sample.token_ids[sample.begin : sample.end]
        return sum(one == other for one, other in zip(self.likeliest, wanted, strict=False))


Group = Sequence[Sample]


def lacking(model: Model) -> Iterator[str]:
    """A sentence if a model lacks tensors of its language model, so that it cannot be scored."""
    names = language_names(model.built) & {*dict(model.built.named_parameters())} if model.built else ()
    if lost := sorted(name for name in names if name not in model.layout(model.built)):
        yield f"{model} lacks {listed(lost)}, as some mixtures do after mergekit's own methods: it cannot be scored."


def score_model(
    checkpoint: Checkpoint, groups: Sequence[Group], *, device: str = "cpu", doing: str = "Scoring", quiet: bool = True
) -> list[list[Score]]:
    """Score every record of each group by a model, in float32, with one decoder layer in memory at a time."""
    highest = max(token for group in groups for sample in group for token in sample.token_ids)
    if highest >= (vocabulary := checkpoint.config.get_text_config().vocab_size):
        raise SltaError(
            f"The base model's tokenizer gives the token id {highest}, but {checkpoint} has only {vocabulary} "
            "tokens: compare only models with the base model's vocabulary."
        )
    decoder = trace(checkpoint.config, checkpoint.model.trust_remote_code, device)
    if tail_problem(decoder):
        raise SltaError(
            f"{checkpoint} cannot be scored: its logits need more than the output of its last layer. Score it with a "
            "library that runs whole models."
        )
    tasks = [[sample.token_ids for sample in group] for group in groups]
    scores = pass_layers(_Scoring(decoder, [checkpoint], tasks, Ranks(), groups=groups), doing, quiet=quiet)
    rows = iter(range(len(scores)))
    return [[scores[next(rows)] for _ in group] for group in groups]


def scoring_bytes(decoder: Decoder, groups: Sequence[Group]) -> int:
    """The bytes that it takes to score a model: the hidden states, and one layer or the head with the logits."""
    tasks = [[sample.token_ids for sample in group] for group in groups]
    shapes, tokens = memory.batch_shapes(decoder, tasks), sum(len(row) for task in tasks for row in task)
    # Of some positions the logits, the logarithms of the probabilities, and hidden states in the norm and the head; of
    # the largest batch the hidden states, and those that predict.
    width, most = memory.hidden_size(decoder), max(map(math.prod, shapes))
    wide = 2 * decoder.model.config.get_text_config().vocab_size + 4 * width
    logits = memory.NUMBER * (wide * min(LOGIT_POSITIONS, most) + 2 * width * most)
    # The layer's input and its copy, the outputs of its children and a copy, the stream, a norm's parts; an MLP's
    # factors and their product, which are wider than the attention's queries, keys and values.
    batch = memory.batch_bytes(decoder, shapes, hidden=memory.children(decoder) + 6, inner=3, scores=3)
    waiting = memory.states_bytes(decoder, tasks, 1) + 3 * memory.TOKEN * tokens  # with the answers of all models
    inside = max(memory.edge_bytes(decoder) + logits, memory.layer_bytes(decoder, 1) + batch)
    return memory.LIBRARIES + waiting + inside


@dataclass
class _Scoring(LayerMethod[dict[int, Score]]):
    """Each record's score, by its number among the records of all groups."""

    groups: Sequence[Group]

    def take_layer(self, layer: int, tensors: Sequence[Tensors], streams: Streams, report: Progress) -> Tensors:
        for number, batch in enumerate(streams.batches):
            streams.run_layer(0, number, tensors[0])
            report(len(batch.rows))
        return {}

    def finish(self, streams: Streams, report: Progress) -> dict[int, Score]:
        edges = read_edges(self.decoder, self.models[0], self.decoder.logit_tensors)
        samples = [sample for group in self.groups for sample in group]
        scores: dict[int, Score] = {}
        for number, batch in enumerate(streams.batches):
            of_batch = [samples[row] for row in batch.rows]
            scores |= zip(batch.rows, self._scored(streams.hidden(0, number), of_batch, edges), strict=True)
        return scores

    def _scored(self, hidden: torch.Tensor, samples: Sequence[Sample], edges: Tensors) -> Iterator[Score]:
        """The scores of a batch's records, from those of the hidden states [B, S, D] that predict their tokens."""
        predicting = [hidden[row, sample.begin - 1 : sample.end] for row, sample in enumerate(samples)]
        # What is after the last token is not predicted.
        wanted = torch.tensor([token for s in samples for token in (*s.token_ids[s.begin : s.end], 0)])
        width = min(len(wanted), hidden.shape[1], LOGIT_POSITIONS)  # no more positions than the model has
        rest, losses, likeliest = -len(wanted) % width, list[torch.Tensor](), list[torch.Tensor]()
        states = torch.cat([*predicting, hidden.new_zeros(rest, *hidden.shape[2:])]).unflatten(0, (-1, width))
        tokens, several = torch.nn.functional.pad(wanted, (0, rest)).view(-1, width), LOGIT_POSITIONS // width
        for rows, ids in zip(states.split(several), tokens.to(states.device).split(several), strict=True):
            predicted = logits(self.decoder, rows, edges).flatten(0, 1).float()
            lost = torch.nn.functional.cross_entropy(predicted, ids.flatten(), reduction="none").cpu().double()
            losses.append(lost.nan_to_num(1e6, 1e6))  # of logits that are not finite
            likeliest.append(predicted.argmax(-1).cpu())
            del predicted  # before the next are made beside them
        lengths = [sample.length + 1 for sample in samples]
        parts = (torch.cat(of_all)[: len(wanted)].split(lengths) for of_all in (losses, likeliest))
        for loss, tokens in zip(*parts, strict=True):
            yield Score(float(loss[:-1].sum()), tuple(tokens.tolist()))
