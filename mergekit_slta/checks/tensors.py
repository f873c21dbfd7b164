"""The tensors of the checkpoints: whether a merge has all that it reads and writes, found without reading any."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from mergekit_slta.errors import refuse
from mergekit_slta.models.architecture import vocabulary_axes
from mergekit_slta.models.headers import Model, listed
from mergekit_slta.models.layout import Layout

# What programs put before a model's names, or before those of its parts, when they wrap it for training.
WRAPPER = re.compile(r"\b(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module|base_model\.model)\.")


def complete_checkpoints(models: Sequence[Model], aligned: bool = False) -> None:
    """Refuse checkpoints that lack tensors of the model, and experts with tensors that the base model lacks.

    A tensor that the model does not run, such as a head that predicts several tokens, may be missing.

    Args:
        models: the base model, then the experts.
        aligned: whether mergekit puts the rows of embeddings in the order of another tokenizer.

    Raises:
        SltaError: one sentence for all models that lack the same.
    """
    base, *experts = models
    refuse(sentence for model in models for sentence in _wrapped(model, base))
    layout = base.layout(base)
    lacking, more, rowless = (defaultdict[tuple[str, ...], list[Model]](list) for _ in range(3))
    lacking[tuple(layout.missing())].append(base)
    rows = vocabulary_axes(layout, base.tensors, base.config) if aligned else {}
    for expert in experts:
        theirs = expert.layout(base)
        has, may_lack = _merged_tensors(expert, theirs), layout.may_lack(theirs)
        rowless[tuple(name for name in may_lack if name in rows and name not in has)].append(expert)
        lacking[tuple(name for name in theirs.lacks(layout) if name not in may_lack)].append(expert)
        more[tuple(layout.lacks(theirs))].append(expert)
    trained_elsewhere = f"which the base model {base} lacks, so it was not fine-tuned from that: leave it out."
    unaligned = (
        f"of the base model {base}, whose rows mergekit cannot put in the order of the recipe's 'tokenizer': leave "
        "'tokenizer' and 'tokenizer_source' out."
    )
    refuse(
        f"{listed(map(str, having))}{verb} {listed(names)}{rest}"
        for kinds, verb, rest in (
            (lacking, ": the checkpoint lacks", " of the model, so it is incomplete: get a sound copy."),
            (more, ": the checkpoint has", f", {trained_elsewhere}"),
            (rowless, " lacks", f" {unaligned}"),
        )
        for names, having in kinds.items()
        if names
    )


def _wrapped(model: Model, base: Model) -> Iterator[str]:
    """A checkpoint that would be complete without the names of modules that programs put around a model's."""
    words = dict.fromkeys(WRAPPER.findall(" ".join(model.tensors)))
    bare = [WRAPPER.sub("", name) for name in model.tensors]
    if words and model.layout(base).missing() and not Layout(base.built, bare).missing():
        yield (
            f"The names of the tensors of {model} contain {listed(words)}, because the model was saved from inside "
            "torch.compile, FSDP, DDP or peft: save the module that these wrap, or take that out of the names."
        )


def _merged_tensors(model: Model, layout: Layout) -> Collection[str]:
    """The stored tensors of a model that are there when its adapter, if it has one, has been merged."""
    return model.tensors if model.reference.lora is None else layout.pieces


def outside_the_model(base: Model, experts: Sequence[Model]) -> Iterator[str]:
    """The tensors outside the language model that not all checkpoints have."""
    layout = base.layout(base)
    if base.reference.lora is not None and layout.outside:
        yield f"{listed(layout.outside)} of {base} will be left out: merging its adapter loses them."
    lacking, more = (defaultdict[tuple[str, ...], list[str]](list) for _ in range(2))
    for expert in experts:
        theirs = expert.layout(base)
        lost = {*layout.may_lack(theirs)} - {*_merged_tensors(expert, theirs)}
        lacking[tuple(name for name in _merged_tensors(base, layout) if name in lost)].append(str(expert))
        more[tuple(name for name in theirs.outside if name not in base.tensors)].append(str(expert))
    for names, without in lacking.items():
        if names:
            of_base = f"those of the base model {base}"
            yield f"{listed(names)}, which {listed(without)} lacks, will be merged as if it had {of_base}."
    for names, having in more.items():
        if names:
            yield f"{listed(names)} of {listed(having)} will be left out, because the base model {base} has none."
