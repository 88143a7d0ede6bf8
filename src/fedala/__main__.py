"""The entry point: `fedala`, or `python -m fedala`."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C also ends it during the second or two in which it loads."""
    try:
        from fedala.cli.app import main as run

        run()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
