"""Updates that a broken or hostile node would send."""

import numpy as np
from flwr.app import Array, ArrayRecord


def poison(record: ArrayRecord, how: str) -> None:
    """Spoil a client's upload."""
    arrays = {name: array.numpy().copy() for name, array in record.items()}
    if how == "nan":
        arrays["out.bias"][0] = np.nan
    elif how == "infinite":
        arrays["norm.running_var"][0] = np.inf
    elif how == "shape":
        arrays["out.bias"] = arrays["out.bias"][:2]
    elif how == "type":
        arrays["out.bias"] = arrays["out.bias"].astype(np.float64)
    elif how == "missing":
        del arrays["out.bias"]
    elif how == "strange":
        arrays["trojan"] = arrays["out.bias"]
    elif how == "huge":
        arrays["out.bias"] += 1e4
    record.clear()
    record.update({name: Array(value) for name, value in arrays.items()})
