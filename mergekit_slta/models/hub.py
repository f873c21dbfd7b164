"""Explain the errors of the Hugging Face Hub to a user."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import errors as hub

from mergekit_slta.errors import MachineError, SltaError, first_line, is_disk_full, suggestion

if TYPE_CHECKING:  # importing mergekit takes seconds, which the command solve does not need
    from mergekit.common import ModelPath

HUB_ERRORS = (OSError, ValueError, hub.HTTPError, hub.EntryNotFoundError, hub.SafetensorsParsingError)
# The first kind that fits is reported, so special kinds stand before general ones.
_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (hub.GatedRepoError, "the repository is gated; ask for access on its page, then run 'hf auth login'"),
    (hub.RepositoryNotFoundError, "there is no such repository, or it is private; check the name or 'hf auth login'"),
    (hub.RevisionNotFoundError, "the repository has no such revision"),
    (hub.LocalEntryNotFoundError, "the Hub cannot be reached"),
    (hub.OfflineModeIsEnabled, "the Hub cannot be reached"),
    (hub.EntryNotFoundError, "the repository has no such file"),
    (hub.HFValidationError, "it is not the name of a repository"),
)


def refused(problem: str, error: Exception) -> SltaError:
    """The refusal for one of ``HUB_ERRORS``; ``problem`` is the sentence up to the reason, which is added."""
    later = _no_answer(error) or isinstance(error, (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled))
    if isinstance(error, hub.HfHubHTTPError):
        status = error.response.status_code
        later |= status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR
    return (MachineError if later or is_disk_full(error) else SltaError)(f"{problem}{reason(error)}.")


def _no_answer(error: Exception) -> bool:
    xets = type(error) in (ConnectionError, TimeoutError) or str(error).startswith("Task error")
    broken = isinstance(error, hub.HTTPError) or xets
    return broken and not isinstance(error, hub.HfHubHTTPError)


def reason(error: Exception) -> str:
    """Why a request failed with one of ``HUB_ERRORS``, without a full stop."""
    if _no_answer(error):
        return f"the Hub cannot be reached ({first_line(error)})"
    return next((words for kind, words in _REASONS if isinstance(error, kind)), first_line(error))


@contextmanager
def asking(path: ModelPath) -> Iterator[None]:
    """Turn the Hub's errors into an SltaError that says why a model or an adapter cannot be used."""
    try:
        yield
    except (*HUB_ERRORS, RuntimeError) as error:  # the last of Xet, for whatever ends a download
        folder = "folder" if path.path[:1] in ("/", "~") else f"folder in {os.getcwd()}"
        named = Path(path.path).expanduser()
        beside = [entry.name for entry in named.parent.iterdir() if entry.is_dir()] if named.parent.is_dir() else []
        near = suggestion(named.name, beside).removesuffix("?")
        if path.path.startswith("~") and named.is_dir():
            raise SltaError(f"mergekit does not expand the '~' in {path}: write {named}.") from error
        if named.suffix == ".gguf":
            raise SltaError(f"{path} is a GGUF file: name the unquantized model that it was made from.") from error
        problem = f"{path} cannot be used: there is no such {folder}{near}, and "
        if near:  # no later try mends a name
            raise SltaError(f"{problem}{reason(error)}.") from error
        raise refused(problem, error) from error
