"""The tensors of the checkpoints: whether a merge has all that it reads and writes, found without reading any."""

from __future__ import annotations

import re
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
    own = base.layout(base)
    lacking = {tuple(missing): [base]} if (missing := own.missing()) else {}
    more: dict[tuple[str, ...], list[Model]] = {}
    rows = vocabulary_axes(own, base.tensors, base.config)
    rowless = list[tuple[Model, list[str]]]()
    for expert in experts:
        theirs = expert.layout(base)
        has, may_lack = _merged_tensors(expert, theirs), own.may_lack(theirs)
        if aligned and (lost := [name for name in may_lack if name in rows and name not in has]):
            rowless.append((expert, lost))
        missing = [name for name in theirs.lacks(own) if name not in may_lack]
        for found, names in ((lacking, missing), (more, own.lacks(theirs))):
            if names:
                found.setdefault(tuple(names), []).append(expert)
    refuse(
        [
            *(
                f"{listed(map(str, incomplete))}: the checkpoint lacks {listed(names)} of the model, so it is "
                "incomplete: get a sound copy."
                for names, incomplete in lacking.items()
            ),
            *(
                f"{listed(map(str, larger))}: the checkpoint has {listed(names)}, which the base model {base} lacks, "
                "so it was not fine-tuned from that: leave it out."
                for names, larger in more.items()
            ),
            *(
                f"{expert} lacks {listed(names)} of the base model {base}, whose rows mergekit cannot put in the order "
                "of the recipe's 'tokenizer': leave 'tokenizer' and 'tokenizer_source' out."
                for expert, names in rowless
            ),
        ]
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
    own = base.layout(base)
    lost: dict[tuple[str, ...], list[str]] = {}
    left_out: dict[tuple[str, ...], list[str]] = {}
    if base.reference.lora is not None and own.outside:
        yield f"{listed(own.outside)} of {base} will be left out: merging its adapter loses them."
    written = _merged_tensors(base, own)
    for expert in experts:
        theirs = expert.layout(base)
        may_lack = own.may_lack(theirs)
        missing = tuple(name for name in written if name in may_lack and name not in _merged_tensors(expert, theirs))
        extra = tuple(name for name in theirs.outside if name not in base.tensors)
        for found, names in ((lost, missing), (left_out, extra)):
            if names:
                found.setdefault(names, []).append(str(expert))
    for missing, without in lost.items():
        of_base = f"those of the base model {base}"
        yield f"{listed(missing)}, which {listed(without)} lacks, will be merged as if it had {of_base}."
    for extra, having in left_out.items():
        yield f"{listed(extra)} of {listed(having)} will be left out, because the base model {base} has none."
