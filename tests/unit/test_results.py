"""Choosing and comparing results, and the command around them."""

import json

import pytest
import sample_results
from typer.testing import CliRunner

from kvfleet import results
from kvfleet.cli import app
from kvfleet.core import history
from kvfleet.core.findings import KvfleetError

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    for record in sample_results.fleet():
        history.store(folder, record)
    return folder


@pytest.fixture(scope="module")
def records(fleet):
    return history.load_records(fleet)


def test_a_result_is_found_by_id_part_file_and_host(records):
    wanted = records[0]
    assert results.find(records, results.record_id(wanted)) is wanted
    assert results.find(records, wanted["path"]) is wanted
    assert results.find(records, wanted["time"]) is wanted
    newest = results.find(records, "gpu-a02")
    assert (newest["host"], newest["release"]) == ("gpu-a02", "cu13-0.32.0-0.5.6")


@pytest.mark.parametrize(("name", "count"), [("20261129T09", "3"), ("nobody", "0")])
def test_a_vague_name_is_refused_with_what_it_fits(records, name, count):
    with pytest.raises(KvfleetError, match=f"names {count} results"):
        results.find(records, name)


def test_setups_are_the_three_profiles_of_one_load(records):
    disk = next(r for r in records if r["host"] == "gpu-a01" and r["plan_profile"] == "disk")
    assert list(results.setups(records, disk)) == ["gpu", "cpu", "disk"]
    other = next(r for r in records if r["host"] == "gpu-b02" and r["plan_profile"] == "cpu")
    assert {r["host"] for r in results.setups(records, other).values()} == {"gpu-b02"}


def test_compare_knows_which_direction_is_better(records):
    old, new = [r for r in records if r["host"] == "gpu-a02"]
    differences, notes = results.compare(old, new)
    assert notes == ["different releases: cu13-0.31.0-0.5.6 and cu13-0.32.0-0.5.6"]
    assert all(entry.better for entry in differences if entry.figure in ("requests", "output tokens"))
    back, _ = results.compare(new, old)
    assert not any(entry.better for entry in back if entry.figure == "requests")


def test_unequal_loads_are_named(records):
    article = next(r for r in records if r["profile"] == "article")
    smoke = next(r for r in records if r["profile"] == "smoke")
    _, notes = results.compare(article, smoke)
    assert any("different load profiles" in note for note in notes)
    assert any("different sizes" in note for note in notes)


def test_list_shows_every_result_as_json(fleet):
    done = RUNNER.invoke(app, ["results", "list", "--results", str(fleet), "--json"])
    assert done.exit_code == 0
    rows = json.loads(done.stdout)
    assert len(rows) == 8
    assert {row["verdict"] for row in rows} == {"pass", "degrade", "fail"}


@pytest.mark.parametrize("columns", ["50", "160"])
def test_list_cuts_no_id_in_any_window(fleet, columns):
    ids = [
        row["id"]
        for row in json.loads(RUNNER.invoke(app, ["results", "list", "--results", str(fleet), "--json"]).stdout)
    ]
    shown = RUNNER.invoke(app, ["results", "list", "--results", str(fleet)], env={"COLUMNS": columns}).stdout
    assert [name for name in ids if name not in shown] == []
    assert "\u2026" not in shown


def test_list_of_one_host_and_of_none(fleet, tmp_path):
    done = RUNNER.invoke(app, ["results", "list", "--results", str(fleet), "--host", "gpu-a02"])
    assert "gpu-a02" in done.stdout
    assert "gpu-b01" not in done.stdout
    assert "No results" in RUNNER.invoke(app, ["results", "list", "--results", str(tmp_path)]).stdout


def test_show_prints_reasons(fleet):
    done = RUNNER.invoke(app, ["results", "show", "gpu-b01", "--results", str(fleet)])
    assert "KVF-BENCH-008" in done.stdout
    whole = RUNNER.invoke(app, ["results", "show", "gpu-b01", "--results", str(fleet), "--json"])
    assert json.loads(whole.stdout)["verdict"] == "fail"


def test_compare_prints_changes(fleet):
    arguments = ["results", "compare", "gpu-a02/20261120", "gpu-a02/20261129", "--results", str(fleet)]
    done = RUNNER.invoke(app, arguments)
    assert done.exit_code == 0
    assert "+12.0%" in done.stdout
    rows = json.loads(RUNNER.invoke(app, [*arguments, "--json"]).stdout)
    assert any(row["better"] for row in rows["differences"])
