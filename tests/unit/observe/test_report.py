"""The page of a report: one safe, accessible file; and the command that writes it."""

from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from run_directories import BEGIN_NS, HOSTS, RunDirectory, write_run
from typer.testing import CliRunner

from ringfold.cli import build
from ringfold.observe.records import read_directory
from ringfold.observe.report import page_of
from ringfold.observe.report.svg import log_ticks, ticks, time_label, time_ticks
from ringfold.observe.summary import Summary, summarise
from ringfold.units import MS, S
from ringfold.wire.events import EpochRuns, OpEnded, PeerJoined, StatusSampled, StepEnded
from ringfold.wire.notices import EpochRecorded, PeerGone, PeerRegistered
from ringfold.wire.status import LinkStatus, Status, World

HOSTILE = "<script>alert('x')</script>\"'&</title><img src=x onerror=alert(1)>"
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Structure(HTMLParser):
    """The elements of a page, and whether they are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs), tuple(self.open)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs), tuple(self.open)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes, _ in self.seen if name == tag]


def html_of(directory: Path) -> str:
    return page_of(summarise(read_directory(directory)))


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("report") / "run", 100)


def test_the_page_is_one_file_without_scripts_or_requests(disturbed: Path) -> None:
    page = Structure(html_of(disturbed))
    elements = {tag for tag, _, _ in page.seen}
    assert not elements & {"script", "link", "img", "iframe", "object", "form", "base", "foreignobject", "image", "use"}
    for _, attributes, _ in page.seen:
        assert not any(name.startswith("on") or name in ("src", "xlink:href") for name in attributes)
        assert (attributes.get("href") or "#").startswith("#")
    [policy] = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "url(" not in html_of(disturbed)
    assert "@import" not in html_of(disturbed)


def test_everything_that_was_asked_for_is_there_from_top_to_bottom(disturbed: Path) -> None:
    page = Structure(html_of(disturbed))
    anchors = [attributes["id"] for attributes in page.all("section")]
    assert anchors == ["happened", "cost", "timeline", "progress", "slow", "ops", "links", "clocks", "records"]
    text = " ".join(page.text)
    for piece in ("Peer 3 (c) was lost: its connection closed.", "the lease of m1 has expired", "Peer 4 (d)", "loss"):
        assert piece in text
    assert [attributes["href"] for attributes in page.all("a")] == [f"#{anchor}" for anchor in anchors]


def test_charts_have_a_sentence_and_tables_a_caption_and_headings(disturbed: Path) -> None:
    page = Structure(html_of(disturbed))
    charts = page.all("svg")
    assert len(charts) >= 12, "each in a wide and in a narrow version"
    assert all(chart["role"] == "img" and len(chart["aria-label"] or "") > 30 for chart in charts)
    assert len(page.all("table")) == len(page.all("caption")) >= 6
    assert all(heading.get("scope") == "col" for heading in page.all("th"))
    headings = [int(tag[1]) for tag, _, _ in page.seen if tag in ("h1", "h2", "h3")]
    assert headings[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(headings))


def test_names_and_reasons_of_others_are_text(tmp_path: Path) -> None:
    files = RunDirectory(tmp_path / "run", HOSTILE)
    master, at = files.record("master", HOSTILE), HOSTS[0].monotonic
    record = files.record("peer", HOSTILE)
    for each in (master, record):
        each.clock(BEGIN_NS)
    for peer in (1, 2):
        master.add(BEGIN_NS, PeerRegistered(peer, HOSTILE, 0, HOSTILE))
    master.add(BEGIN_NS, EpochRecorded(0, 1, [1, 2], 0, 0))
    record.add(BEGIN_NS, PeerJoined(1, 0, 1), peer=1)
    for number in range(30):
        end = BEGIN_NS + (number + 1) * S
        op = OpEnded(
            "all_reduce", 0, number, 1 + number // 15, "committed", 64, at(end - MS), at(end - MS), step=number
        )
        record.add(end, op, peer=1, with_wall=False)
        logged: dict[str, float | None] = {HOSTILE: float(number), "loss": 1.0 / (1 + number)}
        record.add(end, StepEnded(number, 1, 2, at(end - S), logged=logged), peer=1, with_wall=False)
    master.add(BEGIN_NS + 15 * S, PeerGone(2, HOSTILE, "evicted", HOSTILE))
    master.add(BEGIN_NS + 15 * S, EpochRecorded(0, 2, [1], 0, 0))
    html = html_of(files.write())
    assert "<script" not in html
    assert "<img" not in html
    page = Structure(html)
    text = " ".join(page.text)
    assert text.count(HOSTILE) >= 6, "it is shown as it is"
    assert not {tag for tag, _, _ in page.seen} & {"script", "img"}
    assert all(not name.startswith("on") for _, attributes, _ in page.seen for name in attributes)


def test_the_page_of_256_peers_over_a_day_is_below_a_megabyte(tmp_path: Path) -> None:
    files = RunDirectory(tmp_path / "run")
    master, at = files.record("master", "m"), HOSTS[0].monotonic
    peers = list(range(1, 257))
    master.clock(BEGIN_NS)
    for peer in peers:
        master.add(BEGIN_NS, PeerRegistered(peer, f"worker-{peer:03}", 0, "10.0.0.1:48149"))
    master.add(BEGIN_NS, EpochRecorded(0, 1, peers, 0, 0))
    for peer in peers:
        record = files.record("peer", f"worker-{peer:03}", HOSTS[peer % 2])
        record.add(BEGIN_NS, EpochRuns(0, 1, 1, peers), peer=peer)
        record.add(BEGIN_NS, PeerJoined(peer, 0, 1), peer=peer)
        record.clock(BEGIN_NS)
        host = record.host.monotonic
        for number in range(12):
            end = BEGIN_NS + (number + 1) * 7_200 * S
            began = host(end - (2 + peer % 5) * S)
            op = OpEnded("all_reduce", 0, number, 1, "committed", 1 << number + 8, began, began, step=number)
            record.add(end, op, peer=peer, with_wall=False)
            logged: dict[str, float | None] = {f"value {name}": float(number * name) for name in range(20)}
            record.add(end, StepEnded(number, 1, 256, host(end - 9 * S), logged=logged), peer=peer, with_wall=False)
    links = [LinkStatus(a, b, 1e9 / (a + b), 100.0, 1, "probed", 0.0) for a in peers[:64] for b in peers[:64] if a != b]
    master.add(BEGIN_NS + S, StatusSampled(Status(1, 0, 256, 1, World(256, 1, 256), links=links)))
    for peer in range(200, 232):
        when = BEGIN_NS + (peer - 199) * 2_000 * S
        master.add(when, PeerGone(peer, f"worker-{peer}", "lost", "its connection closed"))
        master.add(when, EpochRecorded(0, peer - 198, [one for one in peers if not 200 <= one <= peer], 0, 1))
    assert at(BEGIN_NS)
    html = html_of(files.write())
    assert len(html.encode()) < 1_000_000
    page = Structure(html)
    assert "192 processes more were members from the begin to the end" in " ".join(page.text)
    rows = [text for text in page.text if text.startswith("worker-2")]
    assert any("(201)" in text for text in rows), "peers with incidents have rows"


def test_a_page_without_any_times_or_peers_is_written(tmp_path: Path) -> None:
    files = RunDirectory(tmp_path / "run")
    record = files.record("master", "m")
    record.lines[0] = record.lines[0].replace(b'"wall":', b'"_wall":')
    page = Structure(html_of(files.write()))
    assert "no event that has a place in time" in " ".join(page.text)
    assert [attributes["id"] for attributes in page.all("section")] == ["happened", "clocks", "records"]


# The command


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build(["report"]), ["report", *arguments])
    return result.exit_code, result.output


def test_the_command_writes_the_page_into_the_directory_or_where_it_is_told(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", 40)
    assert run(str(directory)) == (0, f"wrote {directory / 'report.html'}\n")
    assert (directory / "report.html").read_text().startswith("<!doctype html>")
    assert run(str(directory), "-o", str(tmp_path / "other.html"))[0] == 0
    assert (tmp_path / "other.html").read_bytes() == (directory / "report.html").read_bytes()
    code, output = run(str(directory), "-o", "-")
    assert (code, output) == (0, (directory / "report.html").read_text())


def test_json_has_the_whole_summary(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", 40)
    code, output = run(str(directory), "--json")
    assert code == 0
    assert msgspec.json.decode(output, type=Summary) == summarise(read_directory(directory))
    assert not (directory / "report.html").exists()


# Axes


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 19.7), (-3.0, 4.5), (0.61, 4.08), (1e6, 1.2e6)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high, 5)
    assert 2 <= len(found) <= 7
    assert low - 1e-9 <= found[0]
    assert found[-1] <= high + 1e-9 * abs(high)


@pytest.mark.parametrize(("low", "high"), [(8.0, 70.0), (1.0, 1e6), (0.3, 0.9), (90.0, 1e9)])
def test_logarithmic_ticks_are_few_and_inside(low: float, high: float) -> None:
    found = log_ticks(low, high, 5)
    assert len(found) <= 5
    assert all(low <= tick <= high * 1.0001 for tick in found)


@pytest.mark.parametrize(
    ("seconds", "last"),
    [(24.0, "20 s"), (90.0, "1 min 30 s"), (5_400.0, "1 h 30 min"), (86_400.0, "1 d"), (0.004, "4 ms")],
)
def test_the_time_axis_has_round_times(seconds: float, last: str) -> None:
    found = time_ticks(seconds, 10)
    assert found[0] == 0
    assert 3 <= len(found) <= 11
    assert time_label(found[-1]) == last
