"""The three engine modules as Ansible calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import engine_stubs as stubs
import pytest
from ansible.module_utils import basic
from ansible.module_utils.testing import patch_module_args

import engine_check
import engine_install
import engine_switch
from kvfleet import bundles
from kvfleet.core.lockfile import render_lock


def call(module: Any, capsys: pytest.CaptureFixture[str], **arguments: Any) -> dict[str, Any]:
    """What a module prints; it ends the process in every case."""
    basic._ANSIBLE_ARGS = None
    with patch_module_args(arguments), pytest.raises(SystemExit):
        module.main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def place(tmp_path: Path) -> dict[str, Any]:
    """Arguments of an installation from a bundle of stub wheels."""
    cache = tmp_path / "cache"
    lock = stubs.write_locks(tmp_path / "locks", stubs.make_release(cache), stubs.make_uv(cache), "stub-1")
    made = bundles.build(stubs.ROW, output=tmp_path / "out", cache=cache, locks=tmp_path / "locks")
    return {
        "arguments": {
            "root": str(tmp_path / "opt"),
            "release": stubs.ROW,
            "lock": render_lock(lock, "x"),
            "lock_name": "stub-1.txt",
        },
        "bundle": made.index.as_dict(),
        "folder": tmp_path / "out",
        "root": tmp_path / "opt",
    }


def test_from_nothing_to_switched_to_unchanged(place: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = place["arguments"]
    install = {**arguments, "bundle": place["bundle"], "bundle_folder": str(place["folder"])}

    found = call(engine_check, capsys, **arguments)
    assert (found["changed"], found["install"], found["path"], found["current"]) == (False, True, None, None)
    assert not place["root"].exists()

    would = call(engine_install, capsys, **install, _ansible_check_mode=True)
    assert would["changed"]
    assert not place["root"].exists()

    done = call(engine_install, capsys, **install)
    assert done["changed"]
    assert {gate["gate"] for gate in done["gates"]} == {"versions", "torch", "abi", "connector", "vllm", "lmcache"}
    assert not (place["root"] / "current").exists()

    would = call(
        engine_switch, capsys, root=str(place["root"]), path=done["path"], _ansible_check_mode=True, _ansible_diff=True
    )
    assert would["changed"]
    assert would["diff"] == {"before": "current: \n", "after": "current: stub-1\n"}
    assert not (place["root"] / "current").exists()

    switched = call(engine_switch, capsys, root=str(place["root"]), path=done["path"], keep=2)
    assert (switched["changed"], switched["switched"], switched["previous"], switched["pruned"]) == (
        True,
        True,
        None,
        [],
    )

    found = call(engine_check, capsys, **arguments)
    assert (found["install"], found["prove"], found["current"]) == (False, False, "stub-1")
    assert found["bundle_sha256"] == place["bundle"]["manifest_sha256"]
    assert call(engine_install, capsys, **install)["changed"] is False
    again = call(engine_switch, capsys, root=str(place["root"]), release="stub-1", keep=2)
    assert (again["changed"], again["previous"]) == (False, done["path"])


def test_only_packages_leaves_the_release_for_later(place: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    install = {
        **place["arguments"],
        "bundle": place["bundle"],
        "bundle_folder": str(place["folder"]),
        "packages": ["kvfleet-no-such-package"],
        "packages_only": True,
    }
    would = call(engine_install, capsys, **install, _ansible_check_mode=True)
    assert (would["changed"], place["root"].exists()) == (True, False)
    # the bundle brings no such package, so nothing was installed
    assert call(engine_install, capsys, **install)["changed"] is False
    assert (place["root"] / "bundles" / "stub-1" / "manifest.json").is_file()
    assert not list((place["root"] / "releases").iterdir())
    assert "bundle" in call(engine_install, capsys, **place["arguments"], packages_only=True)["msg"]


def test_a_failing_gate_fails_the_task_with_its_finding(
    place: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    broken = {**stubs.ROW, "abi_probe": "lmcache.cuda_ops"}
    arguments = {
        **place["arguments"],
        "release": broken,
        "bundle": place["bundle"],
        "bundle_folder": str(place["folder"]),
    }
    failed = call(engine_install, capsys, **arguments)
    assert failed["failed"]
    assert "KVF-ENG-020" in failed["msg"]
    assert failed["findings"][0]["numbers"] == {"gate": "abi"}
    assert not list((place["root"] / "releases").iterdir())


def test_a_part_that_did_not_arrive_fails_with_its_name(
    place: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    failed = call(engine_install, capsys, **place["arguments"], bundle=place["bundle"])
    assert "KVF-REL-061" in failed["msg"]
    assert place["bundle"]["parts"][0]["name"] in failed["msg"]


def test_a_tampered_lock_fails_with_its_name(place: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("torch==1.0\n", place["arguments"]["lock"].replace("--hash=sha256:", "--hash=md5:", 1)):
        for module in (engine_check, engine_install):
            failed = call(module, capsys, **{**place["arguments"], "lock": text})
            assert failed["failed"]
            assert "KVF-REL-050: Lock stub-1.txt, line" in failed["msg"]


def test_a_lock_that_is_not_there_fails_with_the_command(
    place: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    failed = call(engine_check, capsys, **{**place["arguments"], "lock": ""})
    assert "KVF-REL-056: There is no lock stub-1.txt" in failed["msg"]
    assert "kvfleet lock" in failed["msg"]


def test_a_lock_of_another_release_fails_before_anything(
    place: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    failed = call(engine_check, capsys, **{**place["arguments"], "release": {**stubs.ROW, "vllm": "9"}})
    assert "KVF-ENG-003" in failed["msg"]
    assert "kvfleet lock stub-1" in failed["msg"]


def test_a_release_that_is_not_there_cannot_be_switched_to(
    place: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    failed = call(engine_switch, capsys, root=str(place["root"]), release="stub-9")
    assert "KVF-ENG-030" in failed["msg"]
    failed = call(engine_switch, capsys, root=str(place["root"]), path=str(place["root"] / "releases" / "x"))
    assert "KVF-ENG-030" in failed["msg"]
