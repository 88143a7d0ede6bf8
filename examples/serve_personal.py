"""Answer with a client's personal model, on a CPU: load it once, then predict again and again.

python examples/serve_personal.py runs/mine 7 monday.npz tuesday.npz
python examples/serve_personal.py runs/mine:fedala 7 monday.npz    # of a run with several methods
"""

import sys

import fedala


def main(folder: str, client: str, *paths: str) -> None:
    """Print what the client's model says of the samples in each file or folder."""
    run, _, method = folder.partition(":")
    trained = fedala.load(run, method or None, best=True)
    for path in paths:
        print(f"{path}: {', '.join(map(str, trained.predict(path, client)))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
