"""`fedala.run` in programs and notebooks: progress, interruption, and the page."""

import signal
import sys
import threading

import pytest
import torch
from torch import nn

from fedala import RunWarning, UserError, run
from fedala.api import display
from fedala.api import run as run_module
from fedala.data import Dataset, Federation
from fedala.errors import printable
from fedala.report import page

RANDOM = torch.Generator().manual_seed(0)
TOY = Dataset("toy", torch.randn(120, 6, generator=RANDOM), torch.arange(120) % 3, 3)


def make_net():
    return nn.Linear(6, 3)


def run_toy(method="fedavg", **options):
    chosen = {"dataset": TOY, "model": make_net, "clients": 3, "partition": "iid", "rounds": 4}
    return run(method=method, **{**chosen, **options})


def list_scores(result):
    return [
        (row.seed, row.round, row.score, row.loss)
        for method in result.methods.values()
        for row in method.history
    ]


@pytest.fixture
def in_notebook(monkeypatch):
    monkeypatch.setattr(run_module, "is_interactive", lambda: True)


def press_ctrl_c(at_round, times=1):
    def on_row(method, row):
        if row.round == at_round:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    return on_row


def test_ctrl_c_returns_the_result_so_far_and_the_rest_is_as_if_undisturbed(
    in_notebook, tmp_path, capfd
):
    before = signal.getsignal(signal.SIGINT)
    result = run_toy("fedala,fedavg", out=tmp_path / "run", on_row=press_ctrl_c(1))
    assert signal.getsignal(signal.SIGINT) is before
    assert not result.is_complete
    assert result.message == (
        "Stopped after 2 rounds of FedALA; to resume it, use "
        f"fedala.run(resume={str(tmp_path / 'run')!r}, dataset=…, model=…)."
    )
    assert result.message in repr(result)
    assert [row.round for row in result.methods["fedala"].history] == [0, 1]
    assert "once more to stop at once" in capfd.readouterr().err
    resumed = run(resume=tmp_path / "run", dataset=TOY, model=make_net)
    assert resumed.is_complete
    assert list_scores(resumed) == list_scores(run_toy("fedala,fedavg"))


def test_without_a_folder_an_interrupted_run_cannot_be_resumed(in_notebook):
    result = run_toy(on_row=press_ctrl_c(0))
    assert result.message.endswith("without a folder (out=…), it cannot be resumed.")
    assert "fedavg" in repr(result).lower()


def test_a_program_gets_a_keyboard_interrupt_after_the_round(tmp_path):
    with pytest.raises(KeyboardInterrupt, match="Stopped after 2 rounds of FedAvg; to resume it"):
        run_toy(out=tmp_path / "run", on_row=press_ctrl_c(1))
    with pytest.raises(KeyboardInterrupt):  # in the last round, there is nothing to resume
        run_toy(on_row=press_ctrl_c(4))


def test_a_second_ctrl_c_interrupts_at_once(in_notebook):
    rows = []

    def on_row(method, row):
        press_ctrl_c(1, times=2)(method, row)
        rows.append(row.round)

    with pytest.raises(KeyboardInterrupt):
        run_toy(on_row=on_row)
    assert rows == [0]


def test_a_handler_of_the_program_stays(in_notebook):
    caught = []
    before = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        assert run_toy(rounds=2, on_row=press_ctrl_c(1)).is_complete
    finally:
        signal.signal(signal.SIGINT, before)
    assert caught == [signal.SIGINT]


def test_a_run_in_another_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(run_toy(rounds=1)))
    thread.start()
    thread.join()
    assert found[0].is_complete


def test_a_program_without_a_terminal_prints_nothing(capfd):
    run_toy(rounds=1)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("has_rich", [True, False])
def test_progress_is_lines_if_asked_for_and_the_page_is_announced(
    has_rich, tmp_path, capfd, monkeypatch
):
    if not has_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    result = run_toy(rounds=1, out=tmp_path / "run", progress=True, patience=3)
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert lines[0].startswith("toy: 120 samples of 3 classes")
    assert lines[1].startswith("Runs stop by their score on test samples")
    assert any(line.startswith("FedAvg: round 1/1  accuracy ") for line in lines)
    assert lines[-1] == f"Report: {tmp_path / 'run' / 'report.html'}"
    assert "FedAvg on toy" in (result.folder / "report.html").read_text(encoding="utf-8")


def test_a_terminal_shows_progress_unless_it_is_off(monkeypatch, capfd):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert display.choose_progress(make_plan(), None) is not None
    assert display.choose_progress(make_plan(), False) is None
    monkeypatch.setattr(sys, "stderr", None)
    assert display.choose_progress(make_plan(), None) is None


def test_a_page_that_cannot_be_written_does_not_lose_the_run(tmp_path, monkeypatch, capfd):
    def fail(*_, **__):
        raise UserError("A page needs jinja2: pip install 'fedala[cli]'.")

    monkeypatch.setattr(page, "write", fail)
    assert run_toy(rounds=1, out=tmp_path / "run", progress=True).is_complete
    assert "The report could not be written (A page needs jinja2" in capfd.readouterr().err


def make_plan(title="FedAvg"):
    class Config:
        rounds, seed, seeds = 3, 0, 1

    class Member:
        label = "fedavg"

    Member.title = title

    class Group:
        members = (Member,)

    class Plan:
        config, groups, members = Config, (Group,), (Member,)

    return Plan


def test_a_notebook_shows_bars_and_sentences_as_text():
    class Handle:
        shown = None

        def update(self, progress):
            self.shown = progress._repr_html_(), repr(progress)

    watch = display.NotebookProgress(make_plan("<b>Mine</b>"))
    watch.handle = Handle()
    watch.show(0, 3, "round 3/3  <i>")
    for number in range(30):
        watch.say(f"<script>{number}")
    page_part, text = watch.handle.shown
    assert '<progress value="3" max="3">' in page_part
    assert not any(tag in page_part for tag in ("<b>", "<i>", "<script>"))
    assert "… 10 more sentences." in text
    assert "<script>29" in text
    assert "<script>9\n" not in text
    assert all(printable(line, 2000) == line for line in text.splitlines())


@pytest.mark.parametrize("option", ["label_column", "clients_by", "split"])
def test_options_of_reading_and_dividing_do_not_go_with_a_federation(option):
    data = Dataset("own", torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]), 2)
    rows = [[0, 1], [2]]
    federation = Federation(data, rows, [[], [3]], [[], []])
    with pytest.raises(UserError, match=f"do not give {option}"):
        run(dataset=federation, method="fedavg", **{option: "pooled"})


RAW = Dataset("costs", TOY.x, 5000 + 100 * torch.randn(120, generator=RANDOM), 1)


@pytest.mark.parametrize("progress", [False, True])
def test_what_is_likely_to_make_results_wrong_is_a_warning(progress, capfd):
    with pytest.warns(RunWarning, match=r"The targets of costs are large") as found:
        result = run_toy(
            dataset=RAW, model=lambda: nn.Linear(6, 1), rounds=1, lr=1e-9, progress=progress
        )
    assert [one.filename for one in found] == [__file__]
    assert [note.startswith("The targets of costs are large") for note in result.notes] == [True]
    assert "1 note on this run: result.notes." in repr(result)
    assert "1 note on this run: result.notes." in result._repr_html_()
    assert "are large" not in capfd.readouterr().err  # it is not said twice


def test_a_warning_that_is_made_an_error_ends_the_run_before_it_begins(tmp_path):
    with pytest.raises(RunWarning, match="are large"):  # as all warnings in the tests
        run_toy(dataset=RAW, model=lambda: nn.Linear(6, 1), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_result_has_what_was_said_of_data_and_methods():
    owners = torch.arange(120) % 3
    owners[0] = 3  # who has a single sample
    data = Dataset("wards", TOY.x, TOY.y, 3, clients=owners, client_names=("a", "b", "c", "d"))
    result = run_toy("fedala", dataset=data, clients=None, partition=None, rounds=1)
    assert any("d is left out" in note for note in result.notes)
    assert any(note.startswith("ALA blends") for note in result.notes)


def test_clients_that_diverged_are_counted_and_warned_of():
    huge = Dataset("huge", TOY.x * 1e30, TOY.y, 3)
    with pytest.warns(RunWarning, match="Some clients diverged") as found:
        result = run_toy(dataset=huge, normalize="none", lr=1e9, rounds=2)
    count = result.methods["fedavg"].diverged
    assert count > 1
    said = f"Some clients diverged (FedAvg: {count} client rounds): their updates in these rounds "
    assert str(found[0].message).startswith(said)
    assert said in repr(result)
    assert said in result._repr_html_()
    assert "diverged" not in repr(run_toy(rounds=1))
