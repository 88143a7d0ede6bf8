"""How `fedala.run` shows its progress: bars on a terminal, a few lines in a notebook."""

import html
import sys
import time
from collections.abc import Mapping
from typing import Any

from fedala.errors import printable
from fedala.lanes.normalization import is_standard
from fedala.report.progress import RunProgress
from fedala.runs.observer import write_to_stderr
from fedala.runs.plan import Plan


def is_interactive() -> bool:
    """Tell whether somebody types the program as it runs: in IPython, Jupyter or Python's shell."""
    return find_shell() is not None or hasattr(sys, "ps1") or bool(sys.flags.interactive)


def find_shell() -> Any:
    """Return IPython's shell if this is one, in a terminal or a notebook; else None."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def is_notebook() -> bool:
    """Tell whether this is a kernel of Jupyter, which shows what is displayed below a cell."""
    return getattr(find_shell(), "kernel", None) is not None


def announce(sentence: str) -> None:
    """Print a sentence in the middle of a round. A notebook shows what Python's stream gets."""
    if is_notebook():
        print(sentence, file=sys.stderr)
    else:
        write_to_stderr(sentence)


def choose_progress(plan: Plan, progress: bool | None) -> RunProgress | None:
    """Return what shows the progress of a run; None if nothing shall be shown.

    If `progress` is None, it is shown on a terminal and in IPython.
    """
    shell = find_shell()
    has_terminal = sys.stderr is not None and sys.stderr.isatty()
    if not (shell is not None or has_terminal if progress is None else progress):
        return None
    if is_notebook():
        return NotebookProgress(plan)
    try:
        from rich.console import Console

        from fedala.report.progress_bars import ProgressBars
    except ImportError:
        return RunProgress(plan)
    return ProgressBars(Console(stderr=True), plan)


def describe_plan(plan: Plan, options: Mapping[str, Any]) -> str:
    """Say what is run, and which values are defaults; `options` are those that were given."""
    config = plan.config
    rate = plan.describe_rate(is_default=bool(options) and "lr" not in options)
    scaling = ""
    if is_standard(config.normalize):
        scaling = "; features standardised by the training samples"
        scaling += "" if "normalize" in options else ' (default; normalize="none": as is)'
    return (
        f"{plan.federation.describe()}, {config.partition} over {config.clients} clients; "
        f"{config.model}, {rate}, rounds: {config.rounds}, runs of each method: {config.seeds}, "
        f"on {plan.device}{scaling}"
    )


class NotebookProgress(RunProgress):
    """Show a bar for each method below the cell of a notebook, with the sentences under them."""

    _MOST_SENTENCES = 20
    _SECONDS_BETWEEN = 0.2

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.states: dict[int, tuple[int, str]] = {}
        self.sentences: list[str] = []
        self.handle: Any = None
        self.draw_time = 0.0

    def __enter__(self) -> "NotebookProgress":
        ipython: Any = sys.modules["IPython"]
        self.handle = ipython.display.display(self, display_id=True)
        return self

    def __exit__(self, *_: Any) -> None:
        self._draw()

    def show(self, group: int, round: int, text: str) -> None:
        """Show what is known after a round of a group, a few times a second."""
        self.states[group] = round, text
        if round == self.rounds or time.monotonic() - self.draw_time >= self._SECONDS_BETWEEN:
            self._draw()

    def say(self, sentence: str) -> None:
        """Show a sentence below the bars."""
        self.sentences.append(printable(sentence, 2000))
        self._draw()

    def _draw(self) -> None:
        self.draw_time = time.monotonic()
        if self.handle is not None:
            self.handle.update(self)

    def _list_sentences(self) -> list[str]:
        hidden = len(self.sentences) - self._MOST_SENTENCES
        first = [f"… {hidden} more sentences."] if hidden > 0 else []
        return [*first, *self.sentences[-self._MOST_SENTENCES :]]

    def __repr__(self) -> str:
        lines = [f"{self.names[group]}: {text}" for group, (_, text) in self.states.items()]
        return "\n".join([*lines, *self._list_sentences()]) or "Starting …"

    def _repr_html_(self) -> str:
        parts = []
        for group, name in enumerate(self.names):
            round, text = self.states.get(group, (0, ""))
            bar = f'<progress value="{round}" max="{self.rounds}"></progress>'
            parts.append(f"<div>{bar} {html.escape(name)}  {html.escape(text)}</div>")
        parts += [f"<div>{html.escape(sentence)}</div>" for sentence in self._list_sentences()]
        return f"<div>{''.join(parts)}</div>"
