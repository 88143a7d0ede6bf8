"""The entry point: `fedala`, or `python -m fedala`."""

import signal
import sys


def main() -> None:
    """Run the command line. Ctrl-C also ends it during the second or two in which it loads."""
    try:
        from fedala.cli.app import main as run

        run()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        _ignore_ctrl_c()
        raise SystemExit(130) from None
    except SystemExit as end:
        if end.code == 130:
            _ignore_ctrl_c()
        raise


def _ignore_ctrl_c() -> None:
    """Once interrupted, let the interpreter end in peace: another Ctrl-C would kill it there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
