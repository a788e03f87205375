"""How a command ends on its user's mistakes."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def told_in_one_line(command: str) -> Iterator[None]:
    """Turns mistakes into a line on stderr and exit code 2, and Ctrl-C into exit code 130.

    Mistakes are ValueError, OSError, and FloatingPointError of a run that breaks down. A reader of stdout that has left
    ends the command with 141 and no word.
    """
    try:
        yield
    except BrokenPipeError:
        # The reader has left, as `| head` does: nobody to tell, and nothing more to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except (ValueError, OSError, FloatingPointError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
