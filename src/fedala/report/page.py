"""The HTML page of one or several run folders: what came out, how it got there, who gains, and what made it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedala.errors import UserError
from fedala.io.files import write_file
from fedala.report.markup import Html, details, document, join, table, tag
from fedala.report.runs import (
    Array,
    Run,
    columns,
    curves,
    distinct_splits,
    elapsed,
    find,
    mean_std,
    reach,
    reaches,
    spread,
)
from fedala.runs.results import MethodResult

#: The most points of a curve, rows of a table, and clients that the page shows; the csv files have all of them.
POINTS, LINES, CLIENTS = 400, 25, 200

#: What the figures of a summary are, in words that say how the round was chosen.
ACCURACIES = {
    "best": (
        "Best round",
        "the highest of all rounds, picked on test data, as in the paper: optimistic",
    ),
    "best_joined": (
        "Best round, participants",
        "the same over the clients of the round alone, as in the paper for ρ < 1",
    ),
    "final": ("Last round", "the last round that was evaluated, whatever came before"),
    "validation_picked": (
        "Picked by validation",
        "test accuracy in the round that is best on held-out training data: what one would get in earnest",
    ),
}
COLUMNS = {
    "accuracy": "test accuracy",
    "accuracy_joined": "test accuracy of the participants",
    "accuracy_validation": "validation accuracy",
    "loss": "test loss",
    "train_loss": "training loss",
    "ala_weight": "mean of W",
    "ala_epochs": "epochs of weight learning",
    "ala_capped": "share of initial stages cut off",
    "diverged": "clients that diverged",
}


@dataclass(frozen=True)
class Series:
    """One method of one run folder: a line in every chart."""

    run: Run
    result: MethodResult
    label: str
    place: int
    kind: int
    """The same for methods that can be compared client by client."""

    def name(self) -> Html:
        """The label behind its colour."""
        return tag(
            "span",
            tag("i", class_="key", aria_hidden="true"),
            self.label,
            class_=f"s{self.place % 8} g{self.place // 8 % 3}",
        )

    @cached_property
    def figures(self) -> dict[str, Any]:
        return self.result.summary()

    @cached_property
    def of_clients(self) -> Array:
        """Every client's accuracy, mean of the runs; empty where the method is not that far."""
        return mean_std(self.run.accuracies(self.result.method))[0]

    @cached_property
    def spread(self) -> tuple[Array, list[list[Any]]] | None:
        return spread(self.run, self.result.method)


def write(
    paths: Sequence[Path],
    out: Path | None = None,
    *,
    say: Callable[[str], None] = lambda sentence: None,
) -> Path:
    """Write the page of these folders; without `out`, as report.html into the only one.

    `say` gets a sentence about everything that is unverified.
    """
    if out is None and len(paths) != 1:
        raise UserError(
            "Several folders make one page: say where it goes, such as --out report.html."
        )
    runs = find(paths)
    for run in runs:
        for sentence in run.unverified:
            say(sentence)
    target = out or paths[0] / "report.html"
    if not target.absolute().parent.is_dir():
        raise UserError(
            f"The page {target} cannot be written: there is no folder {target.absolute().parent}."
        )
    text = page(runs)
    try:
        write_file(target, text.encode())
    except OSError as error:
        raise UserError(f"The page cannot be written to {target} ({error.strerror}).") from None
    return target


def page(runs: Sequence[Run]) -> str:
    """The page as text."""
    series = lines(runs)
    sections = [
        ("results", "Results", results(series)),
        ("curves", "Learning curves", learning(series)),
        ("clients", "Clients", clients(series)),
        ("split", "Split", split(runs)),
        ("weights", "Weights W", weights(series)),
        ("cost", "Cost", cost(series)),
        ("setup", "Set-up", setup(runs)),
    ]
    data = {
        "series": [_curve_data(one) for one in series],
        "columns": COLUMNS,
        "clients": [_client_data(one) for one in series],
        "samples": [_whole(one.run.samples()) for one in series],
        "kinds": [one.kind for one in series],
        "splits": [_split_data(run) for run in distinct_splits(runs)],
        "weights": [found for one in series if (found := _weight_data(one))],
    }
    there = [(identifier, title, content) for identifier, title, content in sections if content]
    return document(_title(runs), there, lead=_lead(runs, series), data=data)


def lines(runs: Sequence[Run]) -> list[Series]:
    """Every method of every folder, under names that tell them apart."""
    kinds = [next(kind for kind, other in enumerate(runs) if run.is_like(other)) for run in runs]
    every = [
        (run, result, kind)
        for run, kind in zip(runs, kinds, strict=True)
        for result in run.results.values()
    ]
    titles = [result.title for _, result, _ in every]
    # A method's own name will do where it is there once, and all folders are alike.
    clear = {title for title in titles if titles.count(title) == 1 and len(set(kinds)) == 1}
    return [
        Series(
            run,
            result,
            result.title if result.title in clear else f"{result.title} · {run.name}",
            place,
            kind,
        )
        for place, (run, result, kind) in enumerate(every)
    ]


def reference(one: Series, method: str, series: Sequence[Series]) -> Series | None:
    """What to compare with, FedAvg or Local: that of the same folder, or else that of a folder which is like it."""
    found = [other for other in series if other.result.method == method and other.kind == one.kind]
    return next((other for other in found if other.run is one.run), found[0] if found else None)


# --- head ----------------------------------------------------------------------------------------------------------


def _title(runs: Sequence[Run]) -> str:
    titles = list(dict.fromkeys(result.title for run in runs for result in run.results.values()))
    shown = titles if len(titles) <= 4 else [f"{len(titles)} methods"]
    named = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"{named} on {', '.join(dict.fromkeys(_dataset(run) for run in runs))}"


def _dataset(run: Run) -> str:
    return Path(str(run.config.get("dataset", "unknown data"))).name


def _lead(runs: Sequence[Run], series: Sequence[Series]) -> Html:
    best = max(series, key=lambda one: float(np.nan_to_num(one.result.best.mean(), nan=-1)))
    accuracy = best.figures["accuracy"]
    cards = [
        tag(
            "div",
            tag("dt", ACCURACIES[key][0]),
            tag("dd", _percent(accuracy[key]), tag("small", " %")),
        )
        for key in ACCURACIES
        if key in accuracy
    ]
    facts: dict[str, list[str]] = {}
    for run in runs:
        facts.setdefault(_facts(run), []).append(run.name)
    return join(
        [
            [
                tag("p", f"{', '.join(names)}: {fact}" if len(facts) > 1 else fact, class_="facts")
                for fact, names in facts.items()
            ],
            [
                tag("p", warning, class_="warning", role="note")
                for run in runs
                for warning in _warnings(run)
            ],
            tag(
                "div",
                tag("p", "Highest test accuracy: ", best.name()),
                tag("dl", cards),
                class_="hero",
            )
            if np.isfinite(best.result.best).all() and len(set(map(_task, runs))) == 1
            else None,
        ]
    )


def _task(run: Run) -> tuple[str, ...]:
    """What the clients learn; accuracies of different tasks have no highest."""
    return tuple(
        str(run.config.get(option))
        for option in ("dataset", "partition", "partition_seed", "clients")
    )


def _facts(run: Run) -> str:
    config = run.config
    ratio = config.get("join_ratio", 1)
    whom = (
        "only the participants of a round"
        if config.get("eval_clients") == "joined"
        else "all clients"
    )
    parts = [
        f"{config.get('clients', '?')} clients",
        str(config.get("partition", "")),
        str(config.get("model", "")),
        _counted(run.rounds, "round"),
        _counted(config.get("seeds", 1), "run") + " of each method",
        f"ρ = {ratio:g}, {whom} evaluated" if isinstance(ratio, float) and ratio < 1 else "",
        "" if config.get("shuffle", True) else "fixed order of the samples",
    ]
    return " · ".join(filter(None, parts))


def _counted(number: object, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _warnings(run: Run) -> list[str]:
    short = [
        f"{run.results[name].title} {run.reached(name)}"
        for name in run.results
        if run.reached(name) < run.rounds
    ]
    found = []
    if short:
        found.append(f"{run.name} is unfinished: {', '.join(short)} of {run.rounds} rounds.")
    if note := run.summary.get("data"):
        found.append(f"The data of {run.name}: {note}.")
    for result in run.results.values():
        if lost := sum(row.diverged for row in result.history):
            found.append(
                f"{result.title} in {run.name}: {_counted(lost, 'client round')} diverged and did not count."
            )
    if run.missing:
        found.append(f"{run.name} has not begun with {', '.join(run.missing)}.")
    return [*found, *(sentence.replace(str(run.path), run.name) for sentence in run.unverified)]


# --- sections ------------------------------------------------------------------------------------------------------


def results(series: Sequence[Series]) -> Html:
    """Every accuracy as what it is, and the distance to FedAvg."""
    figures = [one.figures["accuracy"] for one in series]
    shown = [key for key in ACCURACIES if any(key in found for found in figures)]
    heads = ["Method", *(ACCURACIES[key][0] for key in shown)]
    references = [
        None if (other := reference(one, "fedavg", series)) is one else other for one in series
    ]
    compared = any(other is not None for other in references)
    against = [
        (key, f"{ACCURACIES[key][0]}, against FedAvg") for key in ("best", "final") if compared
    ]
    top: dict[tuple[object, str], float] = {}
    for one in series:
        for key, figure in one.figures["accuracy"].items():
            place = _task(one.run), key
            top[place] = float(np.fmax(figure["mean"], top.get(place, 0.0)))
    rows = []
    for one, found, other in zip(series, figures, references, strict=True):
        cells = [_accuracy(found.get(key), top.get((_task(one.run), key), 0.0)) for key in shown]
        for key, _ in against:
            cells.append(
                _signed(
                    found[key]["mean"] - other.figures["accuracy"][key]["mean"] if other else None
                )
            )
        rows.append([one.name(), *cells])
    runs = {len(found["best"]["runs"]) for found in figures}
    whose = f"{max(runs)} runs" if len(runs) == 1 else "its runs"
    spread_ = f", mean ± standard deviation of {whose}" if max(runs) > 1 else ""
    caption = (
        f"Test accuracy in %{spread_}; Σ correct / Σ samples over the clients, before they train."
    )
    meaning = [
        join([tag("dt", ACCURACIES[key][0]), tag("dd", ACCURACIES[key][1])]) for key in shown
    ]
    return join(
        [
            table(caption, [*heads, *(text for _, text in against)], rows, class_="figures"),
            tag("dl", meaning, class_="meaning"),
        ]
    )


def _accuracy(figure: dict[str, Any] | None, top: float) -> Html:
    if figure is None:
        return tag("span", "–")
    text = _percent(figure)
    return tag("strong", text) if figure["mean"] == top else tag("span", text)


def _percent(figure: dict[str, Any]) -> Html:
    deviation = (
        tag("span", f" ± {100 * figure['std']:.2f}", class_="std")
        if len(figure["runs"]) > 1
        else None
    )
    return join([f"{100 * figure['mean']:.2f}", deviation])


def _signed(difference: float | None) -> Html:
    if difference is None:
        return tag("span", "–")
    return tag(
        "span",
        f"{100 * difference:+.2f}".replace("-", "−"),
        class_="gain" if difference > 0 else "loss" if difference < 0 else None,
    )


def learning(series: Sequence[Series]) -> Html:
    """Accuracy, loss, and whatever else the methods note about a round."""
    there = list(dict.fromkeys(name for one in series for name in columns(one.result)))
    if all(_equal(one.result, "accuracy", "accuracy_joined") for one in series):
        there = [name for name in there if name != "accuracy_joined"]
    accuracy = [name for name in there if name.startswith("accuracy")]
    loss = [name for name in there if name.endswith("loss")]
    other = [name for name in there if name not in accuracy + loss]
    band = " Bands are one standard deviation over the runs." if _most_seeds(series) > 1 else ""
    figures = [
        _curves("accuracy", accuracy, series, f"Accuracy over the rounds.{band}", controls=True),
        _curves("loss", loss, series, f"Loss over the rounds.{band}"),
        _curves("notes", other, series, "What the methods note about themselves.")
        if other
        else None,
    ]
    return join(figures)


def _most_seeds(series: Sequence[Series]) -> int:
    return max(len({row.seed for row in one.result.history}) for one in series)


def _equal(result: MethodResult, first: str, second: str) -> bool:
    pairs = [(getattr(row, first), getattr(row, second)) for row in result.history]
    return all(a == b or a != a for a, b in pairs)


def _curves(
    kind: str, names: list[str], series: Sequence[Series], caption: str, *, controls: bool = False
) -> Html:
    """A chart to be drawn, what can be chosen about it, and the same as a table."""
    identifier = f"curves-{kind}"
    choose = _select(
        f"{identifier}-column",
        "Show",
        [(name, COLUMNS.get(name, name)) for name in names],
        data="column",
    )
    chosen = [choose if len(names) > 1 else None]
    if controls:
        seeds = sorted({row.seed for one in series for row in one.result.history})
        if len(seeds) > 1:
            each = [(str(seed), f"seed {seed}") for seed in seeds]
            chosen.append(
                _select(
                    f"{identifier}-seeds",
                    "Runs",
                    [("band", "mean ± std"), ("each", "each run"), *each],
                    data="seeds",
                )
            )
        chosen.append(
            _select(
                f"{identifier}-x", "Over", [("rounds", "rounds"), ("seconds", "seconds")], data="x"
            )
        )
        chosen.append(
            _select(
                f"{identifier}-zoom",
                "Axis",
                [("all", "everything"), ("late", "the later half")],
                data="zoom",
            )
        )
    return _figure(
        identifier,
        "curves",
        caption,
        chosen,
        _curve_table(names[0], series),
        columns=" ".join(names),
    )


def _figure(
    identifier: str,
    kind: str,
    caption: str,
    controls: Sequence[Html | None],
    alternative: object,
    **data: str,
) -> Html:
    """A chart that the script draws, with its controls and its caption, and the same as a table."""
    attributes = {f"data_{key}": value for key, value in data.items()}
    chosen = [control for control in controls if control]
    return tag(
        "figure",
        tag("figcaption", caption, id=f"{identifier}-caption"),
        tag("div", chosen, class_="controls") if chosen else None,
        tag("div", class_="chart", id=identifier, data_chart=kind, role="group", aria_roledescription="chart",
            aria_labelledby=f"{identifier}-caption", **attributes),
        details("As a table", alternative),
    )  # fmt: skip


def _select(identifier: str, label: str, choices: Sequence[tuple[str, str]], *, data: str) -> Html:
    options = [tag("option", text, value=value) for value, text in choices]
    return tag("label", f"{label} ", tag("select", options, id=identifier, data_control=data))


def _curve_table(column: str, series: Sequence[Series]) -> Html:
    """Some of the rounds, the first and the last among them."""
    found = {
        one.label: curves(one.result, column) for one in series if column in columns(one.result)
    }
    every = sorted({round for rounds, _ in found.values() for round in rounds})
    chosen = [every[place] for place in _thin(len(every), LINES)]
    scale = 100 if column.startswith("accuracy") else 1
    told: dict[str, dict[int, str]] = {}
    for label, (rounds, values) in found.items():
        mean, deviation = mean_std(values)
        told[label] = {
            round: f"{scale * m:.2f}" + (f" ± {scale * d:.2f}" if len(values) > 1 else "")
            for round, m, d in zip(rounds, mean, deviation, strict=True)
        }
    rows = [[round, *(told[label].get(round, "–") for label in told)] for round in chosen]
    unit = " in %" if scale == 100 else ""
    part = (
        f"; {len(chosen)} of {len(every)} rounds, all of them in history.csv"
        if len(chosen) < len(every)
        else ""
    )
    return table(f"{COLUMNS.get(column, column).capitalize()}{unit}{part}", ["Round", *told], rows)


def _thin(size: int, most: int) -> list[int]:
    """Places of at most `most` of `size` things, evenly, with both ends."""
    return sorted({int(place) for place in np.linspace(0, size - 1, min(size, most)).round()})


def clients(series: Sequence[Series]) -> Html | None:
    """Who gains and who loses."""
    known = [one for one in series if one.of_clients.size]
    if not known:
        return None
    references = [
        one
        for one in known
        if one.result.method in ("fedavg", "local")
        and sum(other.kind == one.kind for other in known) > 1
    ]
    shown = [
        ("accuracy", "accuracy"),
        *((str(one.place), f"difference to {one.label}") for one in references),
    ]
    order = [
        ("client", "by number"),
        ("samples", "by samples"),
        ("value", "by the first method's value"),
    ]
    controls = [
        _select("clients-show", "Show", shown, data="show") if references else None,
        _select("clients-order", "Order", order, data="order"),
    ]
    chart = _figure(
        "clients-chart",
        "clients",
        "Every client's test accuracy in the last round, mean of the runs.",
        controls,
        [
            _client_table([one for one in known if one.kind == kind])
            for kind in dict.fromkeys(one.kind for one in known)
        ],
    )
    return join([chart, *(_gains(known, one) for one in references)])


def _client_table(known: Sequence[Series]) -> Html:
    samples, values = known[0].run.samples(), [one.of_clients for one in known]
    shown = range(min(CLIENTS, len(samples)))
    rows = [
        [
            client,
            f"{samples[client]:.0f}",
            *(_cell(own[client]) if client < len(own) else "–" for own in values),
        ]
        for client in shown
    ]
    part = (
        f"; the first {CLIENTS} of {len(samples)}, all of them in clients.csv"
        if len(samples) > CLIENTS
        else ""
    )
    return table(
        f"Accuracy in % by client{part}",
        ["Client", "Test samples", *(one.label for one in known)],
        rows,
    )


def _cell(value: float) -> str:
    return f"{100 * value:.2f}" if np.isfinite(value) else "–"


def _gains(known: Sequence[Series], base: Series) -> Html | None:
    """How many clients every method serves better or worse than FedAvg or Local does."""
    rows = []
    for one in known:
        own = one.of_clients
        if (
            one is base
            or reference(one, base.result.method, known) is not base
            or own.shape != base.of_clients.shape
        ):
            continue
        apart = own - base.of_clients
        apart = apart[np.isfinite(apart)]
        if apart.size:
            sides = [int((apart > 0).sum()), int((apart == 0).sum()), int((apart < 0).sum())]
            rows.append(
                [
                    one.name(),
                    *sides,
                    _signed(float(apart.mean())),
                    _signed(float(apart.max()) if sides[0] else None),
                    _signed(float(apart.min()) if sides[2] else None),
                ]
            )
    heads = [
        "Method",
        "Clients that gain",
        "equal",
        "that lose",
        "Mean difference",
        "Gains most",
        "Loses most",
    ]
    caption = f"Against {base.label}, in points of accuracy; every client counts the same."
    return table(caption, heads, rows, class_="figures") if rows else None


def split(runs: Sequence[Run]) -> Html | None:
    """Who holds how many samples of which class."""
    known = distinct_splits(runs)
    if not known:
        return None
    choices = [
        (str(place), f"{run.name}: {run.config.get('partition')}")
        for place, run in enumerate(known)
    ]
    controls = [_select("split-run", "Folder", choices, data="run")] if len(known) > 1 else []
    caption = "Who holds what: a circle's area is how many samples of the class the client has."
    return _figure("split-chart", "split", caption, controls, [_split_table(run) for run in known])


def _split_table(run: Run) -> Html:
    counts, numbers, names = run.counts()
    shown, kept = counts[:CLIENTS], names[:100]
    rows = [
        [client, *(f"{n:.0f}" for n in own[: len(kept)]), f"{own.sum():.0f}"]
        for client, own in zip(numbers, shown, strict=False)
    ]
    part = "" if counts.shape == (len(shown), len(kept)) else "; the rest is in split.csv"
    return table(
        f"Samples by client and class, {run.name}{part}", ["Client", *kept, "together"], rows
    )


def weights(series: Sequence[Series]) -> Html | None:
    """W: 1 takes everything from the received model, 0 keeps everything of the client's own."""
    known = [(one, found) for one in series if (found := one.spread)]
    if not known:
        return None
    _, (seeds, rounds, _, parameters) = known[0][1]
    methods = [(str(place), one.label) for place, (one, _) in enumerate(known)]
    each = [(str(place), f"seed {seed}") for place, seed in enumerate(seeds)]
    runs = [("mean", "mean"), *(each if len(seeds) > 1 else [])]
    controls = [
        _select("w-method", "Method", methods, data="method"),
        _select(
            "w-parameter",
            "Parameter",
            [(str(k), name) for k, name in enumerate(parameters)],
            data="parameter",
        ),
        _select("w-seed", "Runs", runs, data="seed"),
    ]
    last = len(rounds) - 1
    slider = tag(
        "input", type="range", id="w-round", min=0, max=last, value=last, data_control="round"
    )
    figures = [
        ("w-rounds", "Mean of W, client by client, over the rounds.", None, _weight_table),
        (
            "w-histogram",
            "How the elements of W are spread over [0, 1], all clients together; colours grow with the square root.",
            None,
            _bin_table,
        ),
        (
            "w-parameters",
            "Mean of W by client and parameter.",
            tag(
                "label",
                "Round ",
                slider,
                " ",
                tag("output", rounds[-1], id="w-round-shown", for_="w-round"),
            ),
            _parameter_table,
        ),
    ]
    text = "With W = 1 an element comes from the received model, with W = 0 it stays the client's own. W starts at ones."
    return join(
        [
            tag("p", text),
            tag("div", controls, class_="controls", id="w-controls"),
            [
                _figure(kind, kind, caption, [own], [make(*one) for one in known])
                for kind, caption, own, make in figures
            ],
        ]
    )


def _weight_table(one: Series, found: tuple[Array, list[list[Any]]]) -> Html:
    cube, (_, rounds, clients_, parameters) = found
    kept = _thin(len(rounds), 12)
    mean = mean_std(cube[..., 0, 0])[0]
    rows = [
        [client, *(f"{mean[place, i]:.3f}" for place in kept)]
        for i, client in enumerate(clients_[:CLIENTS])
    ]
    return table(
        f"{one.label}, mean of W, {parameters[0]}",
        ["Client", *(f"round {rounds[place]}" for place in kept)],
        rows,
    )


def _bin_table(one: Series, found: tuple[Array, list[list[Any]]]) -> Html:
    cube, (_, rounds, _, parameters) = found
    kept = _thin(len(rounds), 12)
    shares = _over_clients(cube)[:, :, 0, 1:].mean(0)
    rows = [
        [
            f"{k / 10:.1f} to {(k + 1) / 10:.1f}",
            *(f"{100 * shares[place, k]:.2f}" for place in kept),
        ]
        for k in range(10)
    ]
    return table(
        f"{one.label}, share of W's elements in %, {parameters[0]}",
        ["W", *(f"round {rounds[place]}" for place in kept)],
        rows,
    )


def _parameter_table(one: Series, found: tuple[Array, list[list[Any]]]) -> Html:
    cube, (_, rounds, clients_, parameters) = found
    mean = mean_std(cube[..., 0])[0][-1]
    rows = [
        [client, *(f"{value:.3f}" for value in mean[i])]
        for i, client in enumerate(clients_[:CLIENTS])
    ]
    return table(f"{one.label}, mean of W in round {rounds[-1]}", ["Client", *parameters], rows)


def _over_clients(cube: Array) -> Array:
    """[seed, round, client, parameter, …] → the mean over the clients that took part."""
    return mean_std(cube, axis=2)[0]


def cost(series: Sequence[Series]) -> Html:
    """Seconds, parameters, and how soon an accuracy is reached."""
    rows = []
    for one in series:
        figures = one.figures
        sent = figures["parameters_per_client_and_round"]
        total = float(elapsed(one.result)[-1])
        rows.append(
            [
                one.name(),
                f"{figures['seconds_per_round']:.3g}",
                f"{total:,.0f}",
                *(f"{sent[key]:,}" for key in ("sent", "uploaded", "together")),
            ]
        )
    heads = [
        "Method",
        "Seconds per round",
        "Seconds in all",
        "Parameters received",
        "uploaded",
        "together",
    ]
    together = (
        " All runs of a method go side by side: the seconds are those of all of them."
        if _most_seeds(series) > 1
        else ""
    )
    caption = f"Cost; parameters per client and round.{together}"
    target = _target(series)
    return join([table(caption, heads, rows, class_="figures"), _speed(series, target)])


def _target(series: Sequence[Series]) -> int:
    """An accuracy in percent that is worth asking for: nine tenths of the best one's."""
    best = max(
        (float(value) for one in series for value in one.result.best if np.isfinite(value)),
        default=0.5,
    )
    return max(1, int(90 * best))


def _speed(series: Sequence[Series], target: int) -> Html:
    box = tag(
        "input",
        type="number",
        id="speed-target",
        min=1,
        max=100,
        step=1,
        value=target,
        inputmode="numeric",
    )
    rows = [[one.name(), *_told(*reach(one.result, target / 100))] for one in series]
    heads = ["Method", "Rounds", "Seconds", "Runs that get there"]
    caption = join(
        [
            "Rounds and seconds until the accuracy is first at least ",
            tag("output", target, id="speed-shown"),
            " %",
        ]
    )
    choose = tag("div", tag("label", "Accuracy to reach, in % ", box), class_="controls")
    return join(
        [
            choose,
            table(caption, heads, rows, label="Convergence speed", class_="figures", id="speed"),
        ]
    )


def _told(rounds: list[int | None], seconds: list[float | None]) -> list[str]:
    there = [
        (r, s) for r, s in zip(rounds, seconds, strict=True) if r is not None and s is not None
    ]
    if not there:
        return ["–", "–", f"0 of {len(rounds)}"]
    mean_rounds, mean_seconds = np.mean(there, axis=0)
    return [f"{mean_rounds:.4g}", f"{mean_seconds:.3g}", f"{len(there)} of {len(rounds)}"]


def setup(runs: Sequence[Run]) -> Html:
    """The command, the versions, and every option."""
    return join([_run_setup(run, alone=len(runs) == 1) for run in runs])


def _run_setup(run: Run, *, alone: bool) -> Html:
    versions = run.summary.get("versions")
    known = {"folder": run.name, "seconds": run.summary.get("seconds")}
    resumed = "; ".join(
        f"{row['time']} ({row['changed']})" if row["changed"] else row["time"]
        for row in run.resumed
    )
    facts = {**known, **(versions if isinstance(versions, dict) else {}), "resumed": resumed}
    pairs = [
        join([tag("dt", key), tag("dd", f"{value:,.0f}" if isinstance(value, float) else value)])
        for key, value in facts.items()
        if value
    ]
    command = run.summary.get("command")
    return tag(
        "div",
        None if alone else tag("h3", run.name),
        [tag("p", "The command that made it:"), tag("pre", tag("code", command), tabindex=0)]
        if command
        else None,
        tag("dl", pairs, class_="facts-list"),
        tag(
            "details",
            tag("summary", "Every option (config.toml)"),
            tag("pre", tag("code", run.config_text), tabindex=0),
            open=alone,
        ),
    )


# --- data for the charts -------------------------------------------------------------------------------------------


def _curve_data(one: Series) -> dict[str, Any]:
    rounds, _ = curves(one.result, "accuracy")
    kept, seconds = _thin(len(rounds), POINTS), elapsed(one.result)
    values = {name: curves(one.result, name)[1][:, kept] for name in columns(one.result)}
    return {
        "label": one.label,
        "rounds": [rounds[place] for place in kept],
        "seconds": _nested(seconds[kept]),
        "seeds": sorted({row.seed for row in one.result.history}),
        "values": {name: _nested(found) for name, found in values.items()},
        "speed": [
            _told(*found) for found in reaches(one.result, [target / 100 for target in range(101)])
        ],
    }


def _client_data(one: Series) -> list[float]:
    return [_short(value) for value in one.of_clients[:CLIENTS]]


def _split_data(run: Run) -> dict[str, Any]:
    counts, numbers, names = run.counts()
    kept = [_whole(row) for row in counts[:CLIENTS]]
    return {"classes": names, "counts": kept, "numbers": numbers[:CLIENTS], "clients": len(counts)}


def _weight_data(one: Series) -> dict[str, Any] | None:
    if one.spread is None:
        return None
    cube, (seeds, rounds, clients_, parameters) = one.spread
    shares = _over_clients(cube)[..., 1:]
    return {
        "label": one.label,
        "seeds": seeds,
        "rounds": rounds,
        "clients": clients_[:CLIENTS],
        "parameters": parameters,
        "mean": _nested(cube[:, :, :CLIENTS, :, 0]),  # [seed][round][client][parameter]
        "shares": _nested(shares),  # [seed][round][parameter][bin]
    }


def _nested(values: Array) -> Any:
    return [_nested(part) for part in values] if values.ndim else _short(float(values))


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _whole(values: Array) -> list[int]:
    return [int(value) for value in np.nan_to_num(values)]
