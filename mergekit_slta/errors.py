"""The one exception for everything that a user can put right."""

import click


class SltaError(click.ClickException):
    """A problem with a recipe, a model, data or a file, said in one sentence that names the thing and the fix.

    It is a click exception because mergekit's commands and ours are click commands: they print the sentence after
    ``Error:`` and exit with status 1, without a traceback. It is not a ``ValueError`` on purpose, since pydantic
    would wrap one that is raised while mergekit builds its plan.
    """

    def __str__(self) -> str:
        return self.message


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type if it has none; without a full stop."""
    return (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(" .:")


def one_line(error: BaseException) -> str:
    """An error in one line, with the cause where its own text does not tell it; without a full stop."""
    text = " ".join(str(error).split()).rstrip(".")
    cause = " ".join(str(error.__cause__ or "").split()).rstrip(".")
    return f"{type(error).__name__}: {text}" + (f"; {cause}" if cause and cause not in text else "")
