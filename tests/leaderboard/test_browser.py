"""The leaderboard in a real browser: headings sort, and links choose the setting."""

import pytest
from board_results import call, make_result, write_table
from browser import Browser, program

pytestmark = pytest.mark.skipif(program() is None, reason="Chromium is not installed")


@pytest.fixture
def browser(tmp_path):
    results = [
        make_result(method="fedavg", best=0.31, final=0.3),
        make_result(),
        make_result(method="ditto", best=0.53),
        make_result(setting="digits", best=0.9),
        make_result(setting="digits", method="fedavg", best=0.7),
    ]
    write_table(tmp_path / "x" / "x.csv", *results)
    assert call("report", tmp_path / "x").exit_code == 0
    with Browser(tmp_path / "profile") as browser:
        browser.open(tmp_path / "x" / "report" / "leaderboard" / "index.html")
        yield browser
        assert browser.errors == []


def list_rows(browser, setting="cifar100-dir", count=3):
    rows = f"#{setting} table.board tbody tr th"
    return browser.evaluate(f"[...document.querySelectorAll('{rows}')].map((e) => e.textContent)")[
        :count
    ]


def press(browser, place, setting="cifar100-dir"):
    """Focus the button of a heading, and press it with the keyboard."""
    button = f"document.querySelectorAll('#{setting} table.board thead th')[{place}].firstChild"
    browser.evaluate(f"{button}.focus()")
    browser.evaluate(f"{button}.click()")
    return browser.evaluate(f"{button}.parentElement.getAttribute('aria-sort')")


def test_headings_sort_and_empty_cells_stay_last(browser):
    assert list_rows(browser) == ["FedALA", "Ditto", "FedAvg"]
    assert press(browser, 2) == "ascending"
    assert list_rows(browser) == ["FedAvg", "Ditto", "FedALA"]
    assert press(browser, 5) == "descending"
    assert list_rows(browser) == ["FedDBE", "GPFL", "FedCP"]
    assert press(browser, 0) == "ascending"
    assert list_rows(browser)[0] == "APFL"


def test_a_link_shows_its_setting_and_its_curves(browser):
    hidden = "[...document.querySelectorAll('[data-setting]')].filter((e) => !e.hidden)"
    names = f"{hidden}.map((e) => e.id).join()"
    assert browser.evaluate(names) == "cifar100-dir"
    browser.evaluate("document.querySelector('#settings a[href=\"#digits\"]').click()")
    browser.until(f"{names} === 'digits'")
    chips = "[...document.querySelectorAll('#methods button')].filter((e) => !e.hidden)"
    assert browser.evaluate(f"{chips}.map((e) => e.textContent).join()") == "FedALA,FedAvg"
    assert browser.evaluate("document.querySelectorAll('#curves-digits path.mean').length") == 2
