"""The report's three forms over a small fleet: complete, self-contained, and without anything secret."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
import sample_results

from kvfleet import report
from kvfleet.core import history
from kvfleet.core.findings import KvfleetError


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    for record in sample_results.fleet():
        history.store(folder, record)
    return folder


@pytest.fixture(scope="module")
def records(fleet):
    return history.load_records(fleet)


@pytest.fixture(scope="module")
def page(records):
    return report.html(records, now=1795984800)


class Outline(HTMLParser):
    """Tags in order, and whether every one that needs it is closed."""

    VOID = frozenset({"meta", "br", "link", "img", "hr"})

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.problems, self.links, self.anchors = [], [], [], [], set()

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        values = dict(attributes)
        if tag == "a":
            self.links.append(values.get("href"))
        if values.get("id"):
            if values["id"] in self.anchors:
                self.problems.append(f"id {values['id']} twice")
            self.anchors.add(values["id"])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append(tag)
        values = dict(attributes)
        if values.get("id"):
            self.anchors.add(values["id"])

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"stray </{tag}>")


def outline(page):
    parsed = Outline()
    parsed.feed(page)
    return parsed


def test_page_is_well_formed(page):
    parsed = outline(page)
    assert parsed.problems == []
    assert parsed.open == []


def test_page_needs_no_network_and_no_script(page):
    assert "script" not in outline(page).seen
    # the only addresses are names of XML namespaces
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert not re.search(r"@import|url\((?!#)", page)
    assert "default-src 'none'" in page


def test_every_link_of_the_hosts_table_has_its_section(page):
    parsed = outline(page)
    assert sorted(parsed.links) == ["#gpu-a01", "#gpu-a02", "#gpu-b01", "#gpu-b02"]
    assert {link[1:] for link in parsed.links} <= parsed.anchors


def test_charts_refer_only_to_their_own_parts(page):
    wanted = set(re.findall(r"(?:url\(#|xlink:href=\"#)([\w-]+)", page))
    assert wanted
    assert wanted <= outline(page).anchors


def test_worst_hosts_come_first(records):
    verdicts = [record["verdict"] for record in report.model(records)["rows"]]
    assert verdicts == ["fail", "degrade", "degrade", "pass"]


def test_article_tables_hold_every_figure_profile_and_concurrency(records):
    host = next(entry for entry in report.model(records)["hosts"] if entry["record"]["host"] == "gpu-a01")
    titles = {(table["load"], table["key"]) for table in host["matrix"]}
    keys = {"ttft_mean_ms", "ttft_tail_ms", "tpot_mean_ms", "requests_per_s", "output_tokens_per_s"}
    assert titles == {(load, key) for load in ("rag", "random") for key in keys}
    for table in host["matrix"]:
        assert [row["concurrency"] for row in table["rows"]] == [1, 4, 8, 16, 32]
        assert all(list(row["cells"]) == ["gpu", "cpu", "disk"] for row in table["rows"])
    throughput = next(t for t in host["matrix"] if (t["load"], t["key"]) == ("rag", "requests_per_s"))
    last = throughput["rows"][-1]["cells"]
    assert [last[profile]["value"] for profile in ("gpu", "cpu", "disk")] == [12.0, 18.81, 10.6]
    assert throughput["rows"][-1]["best"] == 18.81
    assert len(host["charts"]) == 6
    assert len(host["beside_article"]) == 8


def test_page_shows_reasons_figures_and_the_article(page):
    for text in (
        "KVF-BENCH-008",
        "wipe the tier",
        "28.45 (+57.7 %)",
        "Against the release before",
        "prefers-color-scheme",
    ):
        assert text in page


def test_previous_release_is_compared(records):
    host = next(entry for entry in report.model(records)["hosts"] if entry["record"]["host"] == "gpu-a02")
    assert host["previous"]["release"] == "cu13-0.31.0-0.5.6"
    faster = [entry for entry in host["differences"] if entry.figure == "requests"]
    assert faster
    # the older release was made 12 % slower
    assert all(entry.change == pytest.approx(0.12) and entry.better for entry in faster)


def test_nothing_secret_is_kept_or_shown(fleet, page):
    kept = "".join(path.read_text() for path in fleet.glob("*/*.json"))
    assert "canary" in json.dumps(sample_results.plan("cpu", "cu13-0.32.0-0.5.6"))
    assert "canary" not in kept
    assert "canary" not in page


def test_markdown_is_a_table_and_the_reasons(records):
    text = report.markdown(records)
    lines = text.splitlines()
    assert lines[0].startswith("| host |")
    assert len([line for line in lines if line.startswith("| gpu-")]) == 4
    assert "### gpu-b01: fail" in text
    assert "`KVF-BENCH-008`" in text


def test_markdown_cells_cannot_break_the_table(records):
    odd = {**records[-1], "deciding": {**records[-1]["deciding"], "message": "a | b\nc"}}
    assert "a \\| b c" in report.markdown([odd])


def test_junit_has_a_suite_a_host_and_a_failure_a_reason(records):
    root = ElementTree.fromstring(report.junit(records))  # noqa: S314 - our own text
    suites = {suite.get("name"): suite for suite in root}
    assert set(suites) == {"gpu-a01", "gpu-a02", "gpu-b01", "gpu-b02"}
    assert suites["gpu-a02"].get("failures") == "0"
    failing = [case.get("name") for case in suites["gpu-b01"] if case.find("failure") is not None]
    assert failing == ["answers are the same"]
    assert suites["gpu-b01"].get("failures") == "1"
    assert suites["gpu-b02"].find(".//failure").get("type") == "degrade"
    assert len(suites["gpu-b01"]) == int(suites["gpu-b01"].get("tests"))


def test_junit_holds_control_characters_of_a_journal(records):
    reason = {
        **records[0],
        "reasons": [{"level": "fail", "code": "KVF-BENCH-032", "message": "bell \x07 <&>", "fix": "\x1b[0m"}],
    }
    ElementTree.fromstring(report.junit([reason]))  # noqa: S314


def test_markup_in_a_result_stays_text(records):
    hostile = {
        **records[0],
        "host": "<script>alert(1)</script>",
        "deciding": {**records[0]["deciding"], "message": "<b>x</b>"},
    }
    page = report.html([hostile])
    assert "<script>alert" not in page
    assert "<b>x</b>" not in page


def test_a_big_fleet_keeps_a_line_for_all_and_sections_for_some(records):
    many = [{**records[-1], "host": f"h{i:03}"} for i in range(report.DETAILED_HOSTS + 3)]
    shown = report.model(many)
    assert len(shown["rows"]) == report.DETAILED_HOSTS + 3
    assert shown["omitted"] == 3


def test_the_same_results_give_the_same_page(records):
    assert report.html(records, now=1795984800) == report.html(records, now=1795984800)


def test_files_are_written_beside_each_other(fleet, tmp_path):
    paths = report.write(fleet, tmp_path / "out" / "x.html")
    assert {path.name for path in paths.values()} == {"x.html", "x.md", "x.junit.xml"}
    assert all(path.stat().st_size > 500 for path in paths.values())


def test_no_results_say_what_to_do(tmp_path):
    with pytest.raises(KvfleetError, match="KVF-BENCH-037"):
        report.write(tmp_path)


def test_module_call_prints_where_the_report_is(fleet, tmp_path):
    target = tmp_path / "r.html"
    command = [sys.executable, "-m", "kvfleet.report", "--results", str(fleet), "--output", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"report: {target}"
    failed = subprocess.run([*command[:4], str(tmp_path / "none")], capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "KVF-BENCH-037" in failed.stderr


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.883, "0.883"),
        (1234.5, "1,234"),
        (12.0, "12"),
        (0, "0"),
        (None, "–"),
        (float("nan"), "–"),
        (0.00012, "0.00012"),
    ],
)
def test_numbers_for_people(value, text):
    assert report.number(value) == text


@pytest.mark.parametrize(("value", "text"), [(41.23, "41.2 ms"), (1850, "1.85 s"), (153584.3, "154 s"), (None, "–")])
def test_milliseconds_for_people(value, text):
    assert report.milliseconds(value) == text


def test_timeline_shows_pool_tiers_disks_and_gpus(records):
    host = next(entry for entry in report.model(records)["hosts"] if entry["record"]["host"] == "gpu-a01")
    captions = [chart["caption"] for chart in host["timeline"]]
    assert captions == [
        "Use of the engine's KV pool",
        "Bytes in the tiers",
        "Traffic of the cache disk",
        "Busy disks, iowait",
        "GPU memory",
        "Busy GPUs",
    ]


def test_a_note_is_shown_and_fails_nothing():
    record = sample_results.record("h", "20261129T090000Z", "cpu")
    note = {
        "level": "note", "code": "KVF-BENCH-050", "figure": "time", "value": None, "limit": None,
        "message": "The clock says yesterday.", "fix": "Set it.",
    }  # fmt: skip
    record["reasons"] = [note]
    assert "<failure" not in report.junit([record])
    assert "The clock says yesterday." in report.markdown([record])
