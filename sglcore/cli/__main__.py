"""The entry point of the command `sglcore`.

`doctor` and `--version` run before any import outside the standard library.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from sglcore.core.errors import SglcoreError, no_space
from sglcore.engine.process_end import drop_output, leave


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments` (None: those of the process) and return its exit code, which
    is the command's own, except:

    2: an error that a user can correct, printed on the error stream. 141, as in a shell: the reader
    of the output has closed it. A full disk is printed as an error too. Other exceptions are
    raised.
    """
    try:
        code = _main(tuple(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        found = no_space(error)
        if not found:
            raise
        drop_output()
        print(f"error: {found}", file=sys.stderr)
        return SglcoreError.exit_code


def _main(words: Sequence[str]) -> int:
    if words[:1] == ("doctor",):
        from sglcore.cli import doctor

        return doctor.main(words[1:])
    if words == ("--version",):
        from sglcore import __version__

        print(f"sglcore {__version__}")
        return 0
    try:
        return _run(words)
    except SglcoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _run(words: Sequence[str]) -> int:
    from sglcore.cli.aliases import refuse

    if words[:1] in (("serve",), ("generate",), ("chat",), ("explain",)):
        refuse(words[1:])
    try:
        from sglcore.cli.app import make_app
        from sglcore.cli.usage import run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("sglcore"):
            raise
        remedy = f"pip install {error.name}; sglcore doctor works without it"
        raise SglcoreError(f"the command line needs {error.name!r}, which is not installed", remedy=remedy) from None
    try:
        return run(make_app(), words)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1


def command() -> NoReturn:
    """Run the command of this process and end the process with its exit code. It does not
    return."""
    leave(main())


if __name__ == "__main__":
    command()
