"""The command line: `narrowcast`, and `python -m narrowcast`."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line, which is imported here so that an interrupt of its imports is one line too."""
    try:
        from narrowcast.cli.main import main as run_commands

        run_commands()
    except KeyboardInterrupt:
        exec("")  # Python ends by SIGINT if the last exec, as in a dataclass of an import, was interrupted
        sys.exit("narrowcast: interrupted")


if __name__ == "__main__":
    main()
