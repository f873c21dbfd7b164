"""The exception for every problem that a user can fix, and what turns other errors into it."""

from __future__ import annotations

import difflib
import errno
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import SupportsIndex, TypeVar

import click

Result = TypeVar("Result")
LONGEST = 2000  # characters of a sentence
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# "cublasCreate" and "cusolverDnCreate" fail where another program has filled the GPU.
_OUT_OF_MEMORY = re.compile("out of memory|can('t|not) allocate memory|CPUAllocator|STATUS_ALLOC|(blas|Dn)Create", re.I)
_DISK_FULL = re.compile("no space left|not enough disk space|disk quota exceeded", re.IGNORECASE)


class SltaError(click.ClickException):
    """Problems with a recipe, a model, data or a file, each in a sentence that names the thing and the fix.

    It is a click exception because mergekit's commands and ours are click commands: they print the sentence after
    ``Error:`` and exit with status 1, without a traceback. It is not a ``ValueError`` on purpose, since pydantic
    would wrap one that is raised while mergekit builds its plan.
    """

    def __init__(self, *sentences: str) -> None:
        self.sentences = tuple(map(printable, sentences))
        super().__init__("\n".join(self.sentences))


class MachineError(SltaError):
    """Problems of the machine or the network alone: the same command may succeed later, or elsewhere."""

    exit_code = 3


def printable(text: str, longest: int = LONGEST) -> str:
    """Text for a terminal or a page, in which names and values of other people's files can do no harm.

    Characters that move the cursor, end the line or change the direction become escapes, and a long text loses its
    middle.
    """
    if len(text) > longest:
        text = f"{text[: longest * 2 // 3]} … {text[-longest // 3 :]}"
    return UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def as_note(sentence: str) -> str:
    """A sentence about something that is no mistake, as it is printed."""
    return f"Note: {printable(sentence)}"


def refuse(sentences: Iterable[str]) -> None:
    """Refuse with all sentences at once, each once, if there are any."""
    if distinct := dict.fromkeys(sentences):
        raise SltaError(*distinct)


def whole_number(name: str, number: SupportsIndex, least: int = 1) -> int:
    """An argument of this name, also a scalar of numpy or torch, as a number from the least one on."""
    if (value := operator.index(number)) < least:
        raise SltaError(f"'{name}' is {value}: give a whole number from {least} on.")
    return value


def all_of(calls: Iterable[Callable[[], Result]]) -> list[Result]:
    """Make all calls and return their results, or refuse with the sentences of all that failed."""
    results, errors = list[Result](), list[SltaError]()
    for call in calls:
        try:
            results.append(call())
        except SltaError as error:
            errors.append(error)
    if errors:
        kind = MachineError if all(isinstance(error, MachineError) for error in errors) else SltaError
        raise kind(*dict.fromkeys(sentence for error in errors for sentence in error.sentences))
    return results


@contextmanager
def reading(what: object, problem: str = "cannot be read", fix: str = "get an undamaged copy") -> Iterator[None]:
    """Turn errors of many kinds that libraries raise for damaged input, ``what``, into an SltaError that names it."""
    try:
        yield
    except BaseException as error:
        # Libraries written in Rust raise panics, which are not Exceptions and whose class cannot be imported.
        of_library = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if isinstance(error, SltaError) or is_out_of_memory(error) or not of_library:
            raise
        kind = SltaError
        if is_disk_full(error):  # the reader writes too: it merges an adapter, or downloads
            kind, fix = MachineError, "make room on the disk"
        raise kind(f"{what} {problem} ({first_line(error)}): {fix}.") from error


def is_disk_full(error: BaseException) -> bool:
    """Whether a disk has no room: libraries have errors of many kinds for it."""
    return _DISK_FULL.search(str(error)) is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: torch has an error of its own for a GPU's, and a RuntimeError for the computer's."""
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return known or _OUT_OF_MEMORY.search(str(error)) is not None


@contextmanager
def files_named(then: str = "") -> Iterator[None]:
    """Turn unexplained errors of memory and files into an SltaError; ``then`` says what the user can do about files."""
    try:
        yield
    except SltaError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            fix = "merge fewer experts, or without a GPU; `ask` needs memory for a whole model"
            raise MachineError(f"Memory ran out ({first_line(error)}): {fix}.") from error
        # safetensors and torch have errors of their own for files that they cannot open or write.
        of_library = type(error).__name__ == "SafetensorError" or str(error).startswith("unable to ")
        if not (of_library or isinstance(error, OSError)) or getattr(error, "errno", None) == errno.EPIPE:
            raise  # click handles a pipe whose reader has gone
        raise MachineError(one_line(error) + (f": {then}" if then else "") + ".") from error


@contextmanager
def interruptible(then: str, command: str = "the same command") -> Iterator[None]:
    """Say, when the user interrupts the block, what a command does when it is given again."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"\nInterrupted: {command} {then}.", err=True)
        raise


def suggestion(name: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The end of a sentence about a misspelt name: the closest known one, or "" if none is close."""
    near = difflib.get_close_matches(name.lower(), known, 1, likeness)
    return f", did you mean '{near[0]}'?" if near else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type if it has none; without a full stop."""
    return (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(" .:")


def one_line(error: BaseException) -> str:
    """An error in one line, with the cause where its own text does not tell it; without a full stop."""
    text = " ".join(str(error).split()).rstrip(".")
    cause = " ".join(str(error.__cause__ or "").split()).rstrip(".")
    return f"{type(error).__name__}: {text}" + (f"; {cause}" if cause and cause not in text else "")
