"""Commands in this process."""

from typing import Any

from click.testing import CliRunner, Result

from mergekit_slta.cli.commands import main


def run(*arguments: object, program: Any = main, code: int = 0) -> Result:
    """Run ``mergekit-slta``, or another program of click's; whatever happens, nobody sees a traceback."""
    result = CliRunner().invoke(program, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code == code, result.output
    return result
