"""Damaged files among the results: left out by name, never a traceback, never in silence."""

import copy
import json

import pytest
from sample_results import record
from typer.testing import CliRunner

from kvfleet.cli import app
from kvfleet.core.history import damaged_files, load_records

TIME = "20261129T090000Z"


@pytest.fixture(scope="module")
def good():
    return record("h", TIME, "cpu")


def store(folder, content, name=f"{TIME}-x.json"):
    path = folder / "h" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    return path


@pytest.mark.parametrize("content", ["", "{", "null", "[]", "[" * 100_000, '{"schema": 1}', '{"schema": 99}'])
def test_a_file_that_is_no_result_is_left_out_and_said(tmp_path, content):
    path = store(tmp_path, content)
    store(tmp_path, content, "notes.json")
    assert load_records(tmp_path) == []
    assert damaged_files(tmp_path) == [path]
    done = CliRunner().invoke(app, ["results", "list", "--results", str(tmp_path)], standalone_mode=False)
    assert done.return_value == 0
    assert str(path) in done.stderr


@pytest.mark.parametrize(
    "path",
    [
        ("host",), ("time",), ("release",), ("verdict",), ("plan_profile",), ("profile",), ("reasons",), ("deciding",),
        ("deciding", "message"), ("plan",), ("plan", "release"), ("plan", "host"), ("plan", "instances"),
        ("plan", "instances", 0), ("truth", "instances"), ("truth", "instances", 0), ("load", "instances"),
        ("load", "instances", 0), ("load", "instances", 0, "runs"), ("truth", "instances", 0, "ttft_ms"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", [5, True, [5]])
def test_a_part_of_a_wrong_kind_makes_a_damaged_result(tmp_path, good, path, value):
    broken = copy.deepcopy(good)
    inner = broken
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    store(tmp_path, json.dumps(broken))
    if path == ("reasons",) and value == [5]:
        return
    assert load_records(tmp_path) == []


def test_a_whole_result_is_read(tmp_path, good):
    store(tmp_path, json.dumps(good))
    assert len(load_records(tmp_path)) == 1
    assert damaged_files(tmp_path) == []
