"""The entry point: `fedala`, or `python -m fedala`."""

import sys


def main() -> None:
    """Run the command line. Loading it takes a second or two, in which Ctrl-C ends it like any other command."""
    try:
        from fedala.cli.app import main as run

        run()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
