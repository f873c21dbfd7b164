"""What it means to a user when the Hugging Face Hub does not give what it was asked for."""

from __future__ import annotations

from huggingface_hub import errors as hub

from mergekit_slta.errors import first_line

ERRORS = (OSError, ValueError, hub.HTTPError, hub.EntryNotFoundError)
_MISSING = (hub.RepositoryNotFoundError, hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled)
_UNREACHABLE = "the Hub cannot be reached"
# From the special to the general: the first kind that fits is said.
_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (hub.GatedRepoError, "the repository is gated; ask for access on its page, then run 'hf auth login'"),
    (hub.RepositoryNotFoundError, "there is no such repository, or it is private; check the name or 'hf auth login'"),
    (hub.RevisionNotFoundError, "the repository has no such revision"),
    (hub.LocalEntryNotFoundError, _UNREACHABLE),
    (hub.OfflineModeIsEnabled, _UNREACHABLE),
    (hub.EntryNotFoundError, "the repository has no such file"),
)


def reason(error: Exception) -> str:
    """Why a request failed, without a full stop; for one of ``ERRORS``."""
    return next((words for kind, words in _REASONS if isinstance(error, kind)), first_line(error))


def is_missing(error: Exception) -> bool:
    """Whether there is no such repository, as far as can be seen from here; a gated one is there."""
    return isinstance(error, _MISSING) and not isinstance(error, hub.GatedRepoError)
