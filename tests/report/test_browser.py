"""The page in a real browser: it draws without errors, and its controls change the charts."""

import os
from pathlib import Path

import pytest
from browser import Browser, program
from folders import made_up

from fedala.report import page

pytestmark = pytest.mark.skipif(program() is None, reason="Chromium is not installed")

METHODS = ("fedala", "fedavg", "local", "ditto+ala")
WIDE, PHONE = 1100, 390


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Return a browser, and the page of a run."""
    place = tmp_path_factory.mktemp("page")
    path = page.write([made_up(place / "run", METHODS, seeds=3, rounds=12, clients=9).path])
    with Browser(place / "profile") as browser:
        yield browser, path


@pytest.fixture
def browser(opened):
    """Open the page; after the test, check that there was no error."""
    browser, path = opened
    browser.look(width=WIDE)
    browser.open(path)
    yield browser
    assert browser.errors == []


def list_methods(browser, chart):
    """Return the methods that a chart shows."""
    indices = browser.evaluate(
        f"[...document.querySelectorAll('#{chart} [data-series]')].map((e) => e.dataset.series)"
    )
    return sorted({int(index) for index in indices})


def click(browser, chooser):
    browser.evaluate(f"document.querySelector({chooser!r}).click()")


def choose(browser, identifier, value):
    browser.evaluate(
        f"(() => {{ const e = document.getElementById({identifier!r}); e.value = {str(value)!r};"
        " e.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def test_every_chart_is_drawn_and_nothing_is_loaded(browser, tmp_path):
    counts = browser.evaluate(
        "[...document.querySelectorAll('[data-chart]')]"
        ".map((e) => e.querySelectorAll('path, circle, rect.cell').length)"
    )
    assert len(counts) == 8
    assert all(counts)
    assert (
        list_methods(browser, "curves-accuracy")
        == list_methods(browser, "clients-chart")
        == [0, 1, 2, 3]
    )
    assert {address.split("/")[-1] for address in browser.requests} == {"report.html"}
    browser.screenshot(tmp_path / "page.png", whole=True)
    picture = (tmp_path / "page.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 50_000  # an empty page is much smaller
    if keep := os.environ.get("SCREENSHOTS"):
        Path(keep, "page.png").write_bytes(picture)


def test_a_method_can_be_switched_off_and_on(browser):
    click(browser, "#methods button:nth-child(2)")
    assert (
        list_methods(browser, "curves-accuracy")
        == list_methods(browser, "curves-loss")
        == list_methods(browser, "clients-chart")
        == [0, 2, 3]
    )
    assert (
        browser.evaluate(
            "document.querySelector('#methods button:nth-child(2)').getAttribute('aria-pressed')"
        )
        == "false"
    )
    click(browser, "#methods button:nth-child(2)")
    assert list_methods(browser, "curves-accuracy") == [0, 1, 2, 3]


def test_runs_show_as_a_band_or_as_lines(browser):
    def count(kind):
        return browser.evaluate(f"document.querySelectorAll('#curves-accuracy .{kind}').length")

    assert (count("band"), count("mean"), count("run")) == (4, 4, 0)
    choose(browser, "curves-accuracy-seeds", "each")
    assert (count("band"), count("mean"), count("run")) == (0, 0, 12)
    choose(browser, "curves-accuracy-seeds", "1")
    assert (count("band"), count("mean"), count("run")) == (0, 4, 0)


def test_pointer_and_keys_show_values(browser):
    left, top, width, height = browser.evaluate(
        "(() => { const e = document.querySelector('#curves-accuracy');"
        " e.scrollIntoView({block: 'center', behavior: 'instant'});"
        " const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; })()"
    )
    browser.move(left + width / 2, top + height / 2)
    text = browser.evaluate("document.getElementById('tip').textContent")
    assert text.startswith("Round 6")
    assert all(title in text for title in ("FedALA", "FedAvg", "Local", "Ditto+ALA"))
    browser.evaluate("document.getElementById('curves-accuracy').focus()")
    browser.key("ArrowRight")
    browser.key("ArrowRight")
    assert browser.evaluate("document.getElementById('live').textContent").startswith("Round 1: ")
    browser.key("End")
    assert browser.evaluate("document.getElementById('live').textContent").startswith("Round 12: ")
    browser.key("Escape")
    assert browser.evaluate("document.getElementById('tip').hidden")


def test_the_labels_of_an_axis_are_at_their_values(browser):
    """Equal distances on the screen are equal differences between labels, at any step."""
    for zoom in ("all", "late"):
        choose(browser, "curves-accuracy-zoom", zoom)
        heights, labels = browser.evaluate(
            "(() => { const selector = '#curves-accuracy text[text-anchor=end]';"
            " const texts = [...document.querySelectorAll(selector)];"
            " return [texts.map((e) => Number(e.getAttribute('y'))),"
            " texts.map((e) => Number(e.textContent))]; })()"
        )
        assert len(labels) > 2
        scale = [
            (a - b) / (x - y)
            for a, b, x, y in zip(heights, heights[1:], labels, labels[1:], strict=False)
        ]
        assert scale == pytest.approx([scale[0]] * len(scale), rel=1e-6)


def test_the_difference_to_fedavg_leaves_fedavg_out(browser):
    choose(browser, "clients-show", 1)
    assert list_methods(browser, "clients-chart") == [0, 2, 3]


def test_weights_by_round_method_and_seed(browser):
    assert browser.evaluate("document.querySelectorAll('#w-rounds .cell').length") == 9 * 13
    choose(browser, "w-round", 3)
    assert browser.evaluate("document.getElementById('w-round-shown').textContent") == "3"
    for identifier, value in (("w-method", 1), ("w-parameter", 1), ("w-seed", 2)):
        choose(browser, identifier, value)
        assert browser.evaluate("document.querySelectorAll('#w-histogram .cell').length") == 10 * 13


def test_the_target_accuracy_changes_the_table(browser):
    choose(browser, "speed-target", 1)
    first = browser.evaluate("document.querySelector('#speed tbody td').textContent")
    choose(browser, "speed-target", 80)
    later = browser.evaluate("document.querySelector('#speed tbody td').textContent")
    assert float(first) < float(later)
    choose(browser, "speed-target", 100)
    assert browser.evaluate("document.querySelector('#speed tbody td').textContent") == "–"


def lightness(browser):
    """Return the lightness of the page's background, from 0 to 1."""
    colour = browser.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    return sum(float(part) for part in colour.strip("rgb()").split(",")[:3]) / 765


def test_light_and_dark(browser, opened):
    for dark in (False, True):
        browser.evaluate("localStorage.clear()")
        browser.look(width=WIDE, dark=dark)
        browser.open(opened[1])
        assert (lightness(browser) < 0.2) is dark
        assert (lightness(browser) > 0.8) is not dark
        click(browser, "#theme")
        assert (lightness(browser) < 0.2) is not dark
        click(browser, "#theme")
        assert (lightness(browser) < 0.2) is dark


def test_a_phone_scrolls_in_one_direction_only(browser):
    browser.look(width=PHONE, height=800)
    browser.until("document.querySelector('#curves-accuracy svg').clientWidth < 390")
    assert browser.evaluate("document.documentElement.scrollWidth") == PHONE


def test_several_folders_have_their_own_clients_runs_and_parameters(browser, tmp_path):
    folder = tmp_path / "a-folder-with-a-rather-long-name"
    made_up(folder / "cell-one" / "seeds", ("fedala", "fedavg"))
    made_up(
        folder / "cell-two" / "seeds",
        ("fedala", "fedavg"),
        seeds=1,
        clients=5,
        parameters=("head",),
    )
    made_up(folder / "cell-three" / "of-another-name", ("local",))  # like the first
    browser.open(page.write([folder], tmp_path / "all.html"))
    # By name: one, one, three, two, two.
    assert list_methods(browser, "clients-chart") == [0, 1, 2, 3, 4]
    choose(browser, "clients-show", 1)
    assert list_methods(browser, "clients-chart") == [0, 2]
    offered = (
        "[...document.querySelectorAll('#w-controls label:not([hidden]) option')]"
        ".map((e) => e.textContent)"
    )
    assert browser.evaluate(offered)[2:] == ["fc.weight", "fc.bias", "mean", "seed 0", "seed 1"]
    choose(browser, "w-seed", 1)
    choose(browser, "w-parameter", 1)
    choose(browser, "w-method", 1)
    assert browser.evaluate(offered)[2:] == []
    assert browser.evaluate("document.querySelectorAll('#w-rounds .cell').length") == 5 * 7
    browser.look(width=PHONE)
    assert browser.evaluate("document.documentElement.scrollWidth") == PHONE


def test_the_legend_of_many_methods_shows_them_all_and_no_two_alike(browser, tmp_path):
    methods = ("fedala", "fedavg", "local", "ditto", "fedprox", "fedrep", "pfedme", "fedphp")
    made_up(tmp_path / "one", (*methods, "fedamp", "fedfomo", "apple"))
    made_up(tmp_path / "two", ("fedala",), lr=0.5)
    browser.open(page.write([tmp_path / "one", tmp_path / "two"], tmp_path / "all.html"))
    for width in (WIDE, PHONE):
        browser.look(width=width)
        legend = "document.getElementById('methods')"
        assert browser.evaluate(f"{legend}.scrollWidth <= {legend}.clientWidth")
    looks = browser.evaluate(
        "[...document.querySelectorAll('#methods button')].map(b => b.className)"
    )
    assert len(set(looks)) == len(looks) == 12


def test_a_window_without_width_is_not_an_error(browser, opened):
    browser.call(
        "Emulation.setDeviceMetricsOverride", width=1, height=1, deviceScaleFactor=1, mobile=False
    )
    browser.open(opened[1])
    browser.look(width=WIDE)
    browser.until("document.querySelector('#curves-accuracy svg').clientWidth > 800")


def test_a_hostile_folder_runs_nothing(browser, tmp_path):
    attack = "document.title='hacked'"
    evil = f'</script><img src=x onerror="{attack}"><script>{attack}</script>'
    folder = made_up(
        tmp_path / "run",
        (f"a+ala{evil}", "fedavg"),
        parameters=(evil,),
        class_names=(evil, "b", "c"),
        dataset=evil,
    )
    browser.open(page.write([folder.path]))
    assert browser.evaluate("document.title") != "hacked"
    assert browser.evaluate("document.querySelectorAll('img, script:not(#data)').length") == 1


@pytest.mark.parametrize("width", [390, 700, 1200, 1600])
def test_the_caption_of_a_wide_table_is_within_its_frame(browser, width):
    browser.look(width=width)
    outside = browser.evaluate(
        "[...document.querySelectorAll('section > .scroll')].map((frame) => {"
        " const span = frame.querySelector('caption span');"
        " frame.querySelector('table').style.width = '3000px';"
        " span.textContent = 'a long caption '.repeat(40);"
        " const [own, all] = [span.getBoundingClientRect(), frame.getBoundingClientRect()];"
        " return Math.max(all.left - own.left, own.right - all.right); })"
    )
    assert len(outside) > 2
    assert max(outside) < 0
