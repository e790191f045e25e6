"""The pictures and the page of goodput: complete, self-contained, readable on light and dark paper."""

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from tests.goodput_job import write_run
from uneven.draw import goodput_page, tables_of
from uneven.draw.goodput import KIND_COLOURS, MOST_ROWS, draw_bars, draw_timeline
from uneven.draw.palette import INK, PAPER
from uneven.draw.picture import inline_svg, save_picture
from uneven.goodput import KINDS, Account, Book, Event, Report, Timeline, Tokens, read_run

SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "br"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    return read_run(folder)


@pytest.fixture(scope="module")
def page(run):
    book, report = run
    return goodput_page(report, book, title="Goodput of <this> & that")


def titles_of(drawn):
    tree = ElementTree.fromstring(inline_svg(drawn[0], name="x", tips=drawn[1]))
    return {
        group.get("id"): group.findtext(f"{SVG}title")
        for group in tree.iter(f"{SVG}g")
        if group.find(f"{SVG}title") is not None
    }


def test_every_kind_has_a_colour_of_its_own():
    assert list(KIND_COLOURS) == list(KINDS)
    assert len(set(KIND_COLOURS.values())) == len(KINDS)


def test_bars_tell_every_kind_of_every_device(run):
    _, report = run
    titles = titles_of(draw_bars(report))
    kinds = [kind for kind in KINDS if report.seconds[kind]]
    assert set(titles) == {f"x-bar-{device.device}-{kind}" for device in report.devices for kind in kinds}
    device = report.devices[1]
    share = device.seconds["absent"] / device.wall_s
    assert titles["x-bar-1-absent"] == f"device 1, absent: {device.seconds['absent']:,.1f} s, {share:.1%}"


def test_timeline_tells_kinds_and_events(run):
    book, report = run
    titles = titles_of(draw_timeline(report, Timeline.of(book)))
    spent = {(device.device, kind) for device in report.devices for kind in KINDS if device.seconds[kind]}
    assert {f"x-row-{device}-{kind}" for device, kind in spent} <= set(titles)
    assert "x-row-0-absent" not in titles
    events = [titles[f"x-event-{index}"] for index in range(len(report.events))]
    assert events[0] == f"{report.events[0].time_s:,.1f} s: failure, of device 1"
    assert events[1].endswith("recovery, of device 1, noticed after 4.00 s, recovered in 3.00 s, 1.0 MB moved")
    assert events[-1].endswith("a word of its own")


def test_pictures_are_files_too(run, tmp_path):
    book, report = run
    for name, drawn in (("bars.png", draw_bars(report)), ("line.png", draw_timeline(report, Timeline.of(book)))):
        save_picture(drawn[0], tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_of_many_devices_the_worst_are_drawn():
    accounts = tuple(Account(n, 0, 0.0, 100.0, {"useful": float(n % 100), "idle": 100.0 - n % 100}) for n in range(80))
    report = Report.of(Book(100.0, 1, Tokens(), accounts), (Event(50.0, "failure", 79),))
    titles = titles_of(draw_bars(report))
    assert {int(name.split("-")[2]) for name in titles} == set(range(MOST_ROWS))
    figure, _ = draw_bars(report)
    assert figure.axes[0].get_title(loc="left") == "the 64 of 80 devices with the least goodput"
    draw_timeline(report, Timeline.of(Book(100.0, 1, Tokens(), accounts)))


def test_job_that_has_hardly_begun_is_drawn():
    book = Book(0.0, 1, Tokens(), ())
    assert "<svg" in goodput_page(Report.of(book), book, title="nothing")


class Page(HTMLParser):
    """Tags that are open, all text, and everything that a browser would fetch or run."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.fetched, self.num_tags = [], [], [], 0

    def handle_starttag(self, tag, attrs):
        self.num_tags += 1
        links = [
            value for name, value in attrs if name in ("src", "href", "xlink:href", "data") or name.startswith("on")
        ]
        self.fetched += [link for link in links if not link.startswith("#")] + (
            [tag] if tag in ("script", "link") else []
        )
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_page_is_whole_and_fetches_nothing(page, run):
    parsed = Page()
    parsed.feed(page)
    parsed.close()
    assert parsed.open == []
    assert parsed.fetched == []
    assert not re.search(r"@import|url\((?!#)", page)
    text = "\n".join(parsed.text)
    assert "Goodput of <this> & that" in text
    for table in tables_of(run[1]):
        for row in table.rows:
            assert all(cell in text for cell in row)


def test_ids_of_a_page_are_unique_and_references_lead_somewhere(page):
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', page)) <= set(ids)


def test_ink_and_paper_follow_the_reader_s_scheme(page):
    body = page[page.index("<body>") :]
    assert INK not in body
    assert PAPER not in body
    assert "prefers-color-scheme: dark" in page
    defined = set(re.findall(r"(--\w+):", page))
    assert set(re.findall(r"var\((--\w+)\)", page)) == defined
    unstyled = [text for text in re.findall(r"<text [^>]*>", body) if "fill: var(--" not in text]
    assert unstyled == []


def test_page_is_the_same_for_the_same_report(page, run):
    assert goodput_page(run[1], run[0], title="Goodput of <this> & that") == page


def test_doubtful_numbers_are_called_so():
    accounts = (Account(0, 0, 0.0, 100.0, {"useful": 98.9}),)
    results = tables_of(Report.of(Book(100.0, 1, Tokens(), accounts)))[0]
    assert ("unaccounted", "1.10 device-seconds, 1.10%, above 1%: don't rely on all this") in results.rows
