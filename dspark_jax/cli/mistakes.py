"""How a command ends on its user's mistakes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def told_in_one_line(command: str) -> Iterator[None]:
    """Turns ValueError and FileNotFoundError into a line on stderr and exit code 2, and Ctrl-C into exit code 130."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
