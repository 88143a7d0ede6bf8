"""The datasets known by name that have clients of their own.

MNIST by writers, Heart Disease by hospitals, Human Activity Recognition by people.
"""

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedala.data.dataset import RawData
from fedala.data.published import require_part
from fedala.errors import UserError, first_line
from fedala.io.untrusted import check_memory, open_file, read_file

Array = np.ndarray[Any, Any]

#: The writer of each of MNIST's 70,000 images, as NIST numbers them. See mnist_writers.LICENSE.
_WRITERS = Path(__file__).with_name("mnist_writers.npz")
#: Of MNIST's labels, as bytes, in the official order.
_MNIST_LABELS = "671ff9d70b4811116d55c3dd479efa7a981e2e62753ef7a6d5c15fea81e63d27"
MNIST_TRAIN = 60_000

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
_LARGEST_TABLE = 2**24  # bytes of a hospital's file

ACTIVITIES = 6
_SIGNALS = tuple(
    f"{signal}_{axis}" for signal in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"
)
FEATURES, STEPS = 561, 128


def add_writers(raw: RawData) -> RawData:
    """Say who wrote each image of MNIST. Writers of the training images come first."""
    digest = hashlib.sha256(raw.y.astype(np.uint8).tobytes()).hexdigest()
    if digest != _MNIST_LABELS:
        raise UserError(
            f"{raw.where} is not MNIST with all 70,000 images in the official order, train then "
            "test, so nobody can tell who wrote which image."
        )
    writers = read_writers()
    names = [f"w{writer:04}" for writer in writers.tolist()]
    train, test = (sorted(set(part)) for part in (names[:MNIST_TRAIN], names[MNIST_TRAIN:]))
    note = (
        f"The clients are MNIST's writers: first the {len(train)} of the training images, "
        f"then the {len(test)} others, of the test images."
    )
    return raw._replace(clients=names, client_names=(*train, *test), split=None, notes=(note,))


def read_writers() -> Array:
    """Return NIST's number of the writer of each image of MNIST."""
    with np.load(_WRITERS, allow_pickle=False) as archive:
        writers: Array = archive["writers"]
    return writers


def read_heart_disease(folder: Path) -> RawData | None:
    """Read the four `processed.….data` files of UCI's Heart Disease; None if there are none.

    They are prepared as FLamby does it: the columns slope, ca and thal are left out, and then every
    patient with a missing value. The label tells whether there is a disease.
    """
    paths = [folder / f"processed.{hospital}.data" for hospital in HOSPITALS]
    if not any(path.exists() for path in paths):
        return None
    rows, owners = list[list[float]](), list[str]()
    for hospital, path in zip(HOSPITALS, paths, strict=True):
        patients = _read_patients(path)
        rows += patients
        owners += [hospital] * len(patients)
    table = np.array(rows, dtype=np.float64)
    pain, ecg = table[:, 2], table[:, 6]
    plain = table[:, [0, 1, 3, 4, 5, 7, 8, 9]]
    columns = [plain, pain[:, None] == (2, 3, 4), ecg[:, None] == (1, 2)]
    names = (
        "age", "sex", "trestbps", "chol", "fbs", "thalach", "exang", "oldpeak",
        "cp=2", "cp=3", "cp=4", "restecg=1", "restecg=2",
    )  # fmt: skip
    x = torch.from_numpy(np.concatenate(columns, axis=1).astype(np.float32))
    y = (table[:, 10] > 0).astype(np.int64)
    note = "The clients are four hospitals; patients with missing values are left out."
    return RawData(
        str(folder),
        x,
        y,
        clients=owners,
        client_names=HOSPITALS,
        feature_names=names,
        notes=(note,),
    )


def _read_patients(path: Path) -> list[list[float]]:
    """Return age to oldpeak, and the diagnosis, of each patient without missing values."""
    require_part(path)
    patients = []
    lines = read_file(path, _LARGEST_TABLE).decode("ascii", "replace").splitlines()
    for line, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        values = [value.strip() for value in text.split(",")]
        kept = [*values[:10], *values[13:]]
        try:
            patient = [] if "?" in kept else [float(value) for value in kept]
            is_sound = not patient or (patient[2] in (1, 2, 3, 4) and patient[6] in (0, 1, 2))
        except (ValueError, IndexError):
            is_sound = False
        if len(values) != 14 or not is_sound:
            raise UserError(
                f"{path}, line {line}: a patient has 14 numbers, separated by commas, or ? for "
                "those that are missing; cp is 1, 2, 3 or 4, and restecg 0, 1 or 2."
            )
        if patient:
            patients.append(patient)
    return patients


def read_har(folder: Path) -> RawData | None:
    """Read the 561 features of UCI's Human Activity Recognition; None if there are none."""
    if not (folder / "train" / "X_train.txt").exists():
        return None
    parts = [_read_numbers(folder / part / f"X_{part}.txt", FEATURES) for part in ("train", "test")]
    names = _read_feature_names(folder / "features.txt")
    return _describe_people(folder, parts)._replace(feature_names=names)


def read_har_signals(folder: Path) -> RawData | None:
    """Read its nine signals of 128 steps, N×9×128; None if there are none."""
    if not (folder / "train" / "Inertial Signals").is_dir():
        return None
    parts = []
    for part in ("train", "test"):
        signals = folder / part / "Inertial Signals"
        paths = [signals / f"{name}_{part}.txt" for name in _SIGNALS]
        read = [_read_numbers(path, STEPS) for path in paths]
        if len({len(values) for values in read}) > 1:
            raise UserError(f"{signals}: its files differ in the number of lines; they must agree.")
        parts.append(np.stack(read, axis=1))
    return _describe_people(folder, parts)


def _describe_people(folder: Path, parts: list[Array]) -> RawData:
    """Add activities and people. The people in test are others than those in train."""
    labels, people = list[Array](), list[Array]()
    for part, x in zip(("train", "test"), parts, strict=True):
        for name, values in (("y", labels), ("subject", people)):
            path = folder / part / f"{name}_{part}.txt"
            column = _read_numbers(path, 1)[:, 0].astype(np.int64)
            if len(column) != len(x):
                raise UserError(
                    f"{path} has {len(column)} lines, but there are {len(x)} samples in its part."
                )
            values.append(column)
    y = np.concatenate(labels) - 1
    if not ((y >= 0) & (y < ACTIVITIES)).all():
        raise UserError(f"{folder}: activities must be numbers from 1 to {ACTIVITIES}.")
    owners = [str(number) for number in np.concatenate(people).tolist()]
    note = f"The clients are {len(set(owners))} people; the parts train and test are pooled."
    samples = torch.from_numpy(np.concatenate(parts))
    return RawData(str(folder), samples, y, clients=owners, notes=(note,))


def _read_numbers(path: Path, columns: int) -> Array:
    """Read a file of numbers, separated by spaces, as float32."""
    require_part(path)
    try:
        with open_file(path) as file:
            check_memory(2 * os.fstat(file.fileno()).st_size, str(path))
            text = io.TextIOWrapper(file, encoding="ascii")
            values: Array = np.loadtxt(text, dtype=np.float32, ndmin=2, comments=None)
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not a file of numbers ({first_line(error)}).") from None
    if values.shape[1] != columns:
        raise UserError(f"{path} has {values.shape[1]} numbers in a line; it must have {columns}.")
    return values


def _read_feature_names(path: Path) -> tuple[str, ...]:
    """Read lines such as `1 tBodyAcc-mean()-X`; () if there is no such file."""
    if not path.exists():
        return ()
    text = read_file(path, 2**20).decode("ascii", "replace")
    names = tuple(line.split()[-1] for line in text.splitlines() if line.strip())
    return names if len(names) == FEATURES else ()
