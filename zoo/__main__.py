"""`python -m zoo` is `zoo`."""

import sys


def start() -> int:
    """Run `zoo`; Ctrl-C while Python still loads it leaves no traceback either."""
    try:
        from zoo.cli import main

        return main()
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted.\n")
        return 130


if __name__ == "__main__":
    sys.exit(start())
