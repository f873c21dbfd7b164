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
