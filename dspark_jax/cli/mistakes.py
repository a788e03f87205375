"""How a command ends on its user's mistakes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def told_in_one_line(command: str) -> Iterator[None]:
    """Turns mistakes into a line on stderr and exit code 2, and Ctrl-C into exit code 130.

    Mistakes are ValueError, FileNotFoundError, and FloatingPointError of a run that breaks down.
    """
    try:
        yield
    except (ValueError, FileNotFoundError, FloatingPointError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
