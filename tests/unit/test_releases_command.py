"""The commands ``kvfleet releases``, ``lock`` and ``bundle`` as people and scripts call them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import engine_stubs as stubs
import pytest
import yaml

from kvfleet import bundles, cli
from kvfleet.commands import lock as lock_command
from kvfleet.core.lockfile import Lock, Pin, parse_lock


def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str, str]:
    """Exit status, output and error output of the command, as ``main`` gives them."""
    monkeypatch.setattr("sys.argv", ["kvfleet", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out, said.err


def test_a_good_pair_is_0_and_a_broken_one_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, _ = call(capsys, monkeypatch, "releases", "check", "--vllm", "0.32.0", "--lmcache", "0.5.6")
    assert status == 0
    assert "good" in out
    assert "cu13-0.32.0-0.5.6" in out
    status, out, _ = call(capsys, monkeypatch, "releases", "check", "--vllm", "0.33.0", "--lmcache", "0.5.6")
    assert status == 2
    assert "KVF-REL-040" in out
    assert "nearest good releases" in out


def test_json_holds_the_verdict(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = call(
        *(capsys, monkeypatch, "releases", "check", "--vllm", "0.32.0", "--lmcache", "0.5.6", "--format", "json"),
        *("--driver", "535.104.05", "--python", "3.10", "--glibc", "2.35"),
    )
    found = json.loads(out)
    assert status == 2
    assert found["ok"] is False
    assert [one["code"] for one in found["violations"]] == ["KVF-REL-021", "KVF-REL-024"]
    assert found["nearest"][0]["id"] == "cu12-0.19.1-0.4.4"


def test_weaknesses_are_warnings_unless_strict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = ("releases", "check", "--vllm", "0.19.1", "--lmcache", "0.4.4")
    status, out, _ = call(capsys, monkeypatch, *pair)
    assert status == 0
    assert "CVE-2026-48746" in out
    assert call(capsys, monkeypatch, *pair, "--strict")[0] == 2
    assert call(capsys, monkeypatch, "releases", "check", "--vllm", "0.32.0", "--lmcache", "0.5.6", "--strict")[0] == 0


def test_nonsense_and_wrong_usage_have_their_own_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, err = call(capsys, monkeypatch, "releases", "check", "--vllm", "newest", "--lmcache", "0.5.6")
    assert status == 2
    assert "KVF-REL-001" in err
    assert "--vllm" in err
    assert call(capsys, monkeypatch, "releases", "check", "--vllm", "0.32.0")[0] == 64
    assert call(capsys, monkeypatch, "releases", "check", "--nonsense")[0] == 64


def test_the_list_names_every_row_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut id cannot be copied: also in a narrow terminal every id stands there."""
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = call(capsys, monkeypatch, "releases", "list")
    rows = json.loads(call(capsys, monkeypatch, "releases", "list", "--format", "json")[1])
    for row in rows:
        assert (row["id"] in out) == (row["status"] != "forbidden")
    assert len(rows) > 10
    assert "forbidden: vLLM >=0.33.0,<0.34 with LMCache *" in out


def test_rows_of_ones_own_are_listed_and_judged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "own.yml"
    own.write_text(yaml.safe_dump({"kvfleet_releases_extra": [{**stubs.ROW, "id": "mine"}]}))
    assert "mine" in call(capsys, monkeypatch, "releases", "list", "--extra", str(own))[1]
    own.write_text("just text")
    status, _, err = call(capsys, monkeypatch, "releases", "list", "--extra", str(own))
    assert status == 2
    assert "KVF-REL-003" in err


def test_a_lock_is_shown_written_and_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = Lock("cpu-0.32.0-0.5.6", "cp311-x86_64", "2.31", (Pin("a", "1", ("a" * 64,), "a.whl", 10),))
    monkeypatch.setattr(lock_command, "resolve_lock", lambda *_args, **_options: made)
    words = ("lock", "cpu-0.32.0-0.5.6", "--output", str(tmp_path))
    path = tmp_path / "cpu-0.32.0-0.5.6-cp311-x86_64.txt"
    status, out, _ = call(capsys, monkeypatch, *words, "--check")
    assert status == 2
    assert "+ a==1" in out
    assert not path.exists()
    assert call(capsys, monkeypatch, *words)[0] == 0
    assert parse_lock(path.read_text(), path.name).digest == made.digest
    assert "unchanged" in call(capsys, monkeypatch, *words)[1]
    assert call(capsys, monkeypatch, *words, "--check")[0] == 0
    path.write_text("damaged")
    status, out, _ = call(capsys, monkeypatch, *words)
    assert status == 0
    assert "cannot be read and is made anew" in out
    assert call(capsys, monkeypatch, "lock", "nothing")[0] == 2
    assert "KVF-REL-025" in call(capsys, monkeypatch, *words, "--machine", "aarch64")[2]


@pytest.fixture
def stub_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A matrix with one stub release, its locks and its wheels in the cache."""
    cache = tmp_path / "cache"
    wheels = stubs.make_release(cache / "wheels")
    stubs.write_locks(tmp_path / "locks", wheels, stubs.make_uv(cache / "wheels"), "stub-1")
    matrix = tmp_path / "releases.yml"
    matrix.write_text(yaml.safe_dump({"releases": [stubs.ROW]}))
    monkeypatch.setenv("KVFLEET_CACHE", str(cache))
    real = bundles.build
    monkeypatch.setattr(bundles, "build", lambda *args, **options: real(*args, locks=tmp_path / "locks", **options))
    return {"matrix": str(matrix), "cache": cache}


def test_a_bundle_is_built_found_again_and_verified(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stub_checkout: dict[str, Any]
) -> None:
    words = ("bundle", "stub-1", "--releases", stub_checkout["matrix"])
    index = stub_checkout["cache"] / "bundles" / f"kvfleet-bundle-stub-1-{stubs.PLATFORM}.json"
    status, out, _ = call(capsys, monkeypatch, *words)
    assert status == 0
    assert f"{index}: built" in out
    assert "already complete" in call(capsys, monkeypatch, *words)[1]
    assert call(capsys, monkeypatch, "bundle", index.name, "--verify")[0] == 0
    part = index.parent / stubs.load_json(index)["parts"][0]["name"]
    shutil.copy(part, part.with_suffix(".kept"))
    part.write_bytes(part.read_bytes()[:-1])
    status, _, err = call(capsys, monkeypatch, "bundle", str(index), "--verify")
    assert status == 2
    assert f"KVF-REL-061  Bundle part {part.name} has" in err
    assert call(capsys, monkeypatch, "bundle", str(part), "--verify")[0] == 2


@pytest.mark.parametrize("split", ["much", "-1", "1K", ""])
def test_a_split_that_is_no_size_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stub_checkout: dict[str, Any], split: str
) -> None:
    status, _, err = call(
        capsys, monkeypatch, "bundle", "stub-1", "--releases", stub_checkout["matrix"], f"--split={split}"
    )
    assert status == 2
    assert "KVF-REL-063" in err
    assert "--split" in err


def test_the_installed_command_is_this_one() -> None:
    done = subprocess.run(
        [stubs.UV.with_name("kvfleet"), "releases", "--help"], capture_output=True, text=True, check=True
    )
    assert "check" in done.stdout


@pytest.mark.parametrize("option", ["--releases", "--extra"])
@pytest.mark.parametrize("content", [b"\x00\xff", b"x: [", b"", b"5", b"releases: 5"])
def test_a_damaged_file_of_rows_is_refused_by_its_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str, content: bytes
) -> None:
    path = tmp_path / "rows.yml"
    path.write_bytes(content)
    status, _, err = call(capsys, monkeypatch, "releases", "list", option, str(path))
    assert status == 2
    assert "KVF-REL-003" in err
