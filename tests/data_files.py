"""Data for tests of readers: image files, and a hub that needs no connection."""

from pathlib import Path
from typing import Any

import pytest


def save_image(path: Path, pixels: Any, **options: Any) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)


def replace_hub(monkeypatch: pytest.MonkeyPatch, features: Any, **splits: Any) -> None:
    """Let every dataset of the hub have these splits."""
    import datasets

    made = {
        name: datasets.Dataset.from_dict(content, features=features)
        for name, content in splits.items()
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda identifier: datasets.DatasetDict(made))
