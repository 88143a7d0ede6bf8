"""The layers of a model as a table in plain text."""

from collections.abc import Collection

from torch import nn

from fedala.lanes.layer_units import is_order_known, layers_of, units_of


def describe_layers(model: nn.Module, governed: Collection[str] = ()) -> str:
    """List the layers, output first: number, parameters, how many of them ALA governs, modules."""
    parameters = dict(model.named_parameters())
    units = units_of(model)
    chosen = set(governed)
    rows: list[tuple[str, ...]] = [("layer", "parameters", "trainable", "ALA blends", "modules")]
    for number, layer in enumerate(layers_of(model), 1):
        own = {name: parameters[name] for name in layer if name in parameters}
        modules = [
            unit or ", ".join(name for name in names if name in own)  # the model's own parameters
            for unit, names in reversed(units.items())
            if not own.keys().isdisjoint(names)
        ]
        counts = (
            sum(value.numel() for value in own.values()),
            sum(value.numel() for value in own.values() if value.requires_grad),
            sum(value.numel() for name, value in own.items() if name in chosen),
        )
        rows.append((str(number), *(f"{count:,}" for count in counts), ", ".join(modules)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join([*(text.rjust(width) for text, width in zip(row, widths, strict=False)), row[4]])
        for row in rows
    ]
    if not is_order_known(model):
        lines.append(
            "The model has not been run, so its layers count in the order in which they are "
            "registered: give inputs, one or two samples."
        )
    return "\n".join(lines)
