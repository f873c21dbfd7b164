"""The checks of models, one by one and beside each other, by their configurations and the headers of their files."""

from __future__ import annotations

from mergekit_slta.case import Case, failures
from mergekit_slta.compatibility import dropped_tensors, missing_tensors, other_settings


def openable_models(case: Case) -> list[str]:
    """Models that are not there, whose configuration cannot be read, or whose files are missing or damaged."""
    return failures(case.opened.values())


def one_architecture(case: Case) -> list[str]:
    """Experts of another architecture, depth or width than the base model."""
    return [problem for base, expert in case.pairs if (problem := case.architecture_problem(base, expert))]


def planned_tensors(case: Case) -> list[str]:
    """Tensors that mergekit will ask for and a checkpoint lacks, or that it will not ask for."""
    models = [*filter(None, [case.base]), *(expert for _, expert in case.siblings)]
    missing = missing_tensors(models, case.options.trust_remote_code)
    return missing or (dropped_tensors(case.base, case.options.trust_remote_code) if case.base else [])


def unseen_tensors(case: Case) -> list[str]:
    """Models whose tensors are only seen after a download."""
    return [
        f"The weights of {model} are pickled on the Hub: whether they fit shows after their download."
        for model in case.models
        if model.tensors is None
    ]


def other_configurations(case: Case) -> list[str]:
    """Experts whose configuration makes them compute something else from the same weights."""
    measured = ", and the expert is measured with that too" if case.calibrates else ""
    return [
        f"The configuration of the expert {expert} differs from that of the base model {base} in {', '.join(names)}: "
        f"the merged model gets the base model's{measured}."
        for base, expert in case.siblings
        if (names := other_settings(base, expert))
    ]


def no_tokenizer(case: Case) -> list[str]:
    """A base model without a tokenizer to copy, over which mergekit prints a traceback after the merge."""
    base, copies = case.base, case.options.copy_tokenizer and not case.aligns_vocabularies
    if not copies or base is None or base.folder is None or any(base.folder.glob("tokenizer*")):
        return []
    return [
        f"{base} has no tokenizer, so the merged model gets none: mergekit says so with a traceback, which is harmless."
    ]
