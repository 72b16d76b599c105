"""The module's own part: arguments, check mode, diff, failures; the decisions behind it are tested elsewhere."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from ansible.module_utils import basic
from ansible.module_utils.testing import patch_module_args

cache_disk = importlib.import_module("cache_disk")
from ansible.module_utils.kvfleet.disk_actions import DiskRun  # noqa: E402
from ansible.module_utils.kvfleet.findings import refuse  # noqa: E402

RESULT = {
    "changed": True,
    "steps": ["make ext4"],
    "before": {"content": "blank"},
    "after": {"content": "ours"},
    "warnings": [{"code": "KVF-DISK-046", "message": "old.", "fix": "Replace.", "numbers": {}}],
}


class Left(Exception):
    """What the module left with."""


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, dict[str, Any], list[DiskRun]]]:
    def run(arguments: dict[str, Any], result: Any = None) -> tuple[str, dict[str, Any], list[DiskRun]]:
        runs: list[DiskRun] = []

        def act(disk_run: DiskRun) -> dict[str, Any]:
            runs.append(disk_run)
            if isinstance(result, Exception):
                disk_run.steps.append("partition nvme1n1")
                raise result
            return dict(result or RESULT)

        def leave(how: str) -> Callable[..., None]:
            def exits(_module: Any, **values: Any) -> None:
                raise Left(how, values)

            return exits

        for name in ("report", "present", "unmounted"):
            monkeypatch.setattr(cache_disk, name, act)
        monkeypatch.setattr(cache_disk, "list_candidates", lambda *_words: [{"device": "x"}])
        monkeypatch.setattr(basic.AnsibleModule, "exit_json", leave("exit"))
        monkeypatch.setattr(basic.AnsibleModule, "fail_json", leave("fail"))
        with patch_module_args(arguments), pytest.raises(Left) as left:
            cache_disk.main()
        how, values = left.value.args
        return how, values, runs

    return run


def test_documentation_and_arguments_are_the_same() -> None:
    documented = yaml.safe_load(cache_disk.DOCUMENTATION)["options"]
    assert set(documented) == set(cache_disk.ARGUMENTS)
    for name, words in documented.items():
        argument = cache_disk.ARGUMENTS[name]
        assert argument["type"] == words["type"], name
        assert argument.get("default") == words.get("default"), name
        assert argument.get("choices") == words.get("choices"), name
    assert yaml.safe_load(cache_disk.EXAMPLES)
    assert {"partition_uuid", "filesystem_uuid", "steps", "before", "after"} <= set(yaml.safe_load(cache_disk.RETURN))


def test_report_without_a_device_lists_candidates(call: Callable[..., Any]) -> None:
    how, values, runs = call({})
    assert (how, values["changed"], values["candidates"], runs) == ("exit", False, [{"device": "x"}], [])


@pytest.mark.parametrize("value", ["yes", "true", "false", 1, "no"])
def test_texts_do_not_arm_the_formatter(call: Callable[..., Any], value: Any) -> None:
    _how, _values, (run,) = call({"state": "present", "device": "/dev/disk/by-id/x", "serial": "x", "format": value})
    assert run.settings.format is False


def test_a_boolean_does(call: Callable[..., Any]) -> None:
    _how, _values, (run,) = call({"state": "present", "device": "/dev/disk/by-id/x", "serial": "x", "format": True})
    assert run.settings.format is True
    assert run.check_mode is False


def test_check_mode_reaches_the_run(call: Callable[..., Any]) -> None:
    arguments = {"state": "present", "device": "/dev/disk/by-id/x", "serial": "x", "_ansible_check_mode": True}
    assert call(arguments)[2][0].check_mode is True


def test_diff_shows_disk_and_steps(call: Callable[..., Any]) -> None:
    _how, values, _runs = call(
        {"state": "present", "device": "/dev/disk/by-id/x", "serial": "x", "_ansible_diff": True}
    )
    assert json.loads(values["diff"]["before"]) == {"content": "blank"}
    assert json.loads(values["diff"]["after"]) == {"content": "ours", "steps": ["make ext4"]}


def test_findings_that_do_not_stop_anything_are_returned(call: Callable[..., Any]) -> None:
    _how, values, _runs = call({"state": "present", "device": "/dev/disk/by-id/x", "serial": "x"})
    assert values["warnings_found"] == RESULT["warnings"]
    assert "warnings" not in values


def test_failure_says_what_was_done_before(call: Callable[..., Any]) -> None:
    error = refuse("KVF-DISK-050", "The step 'x' failed: y.", "Repair it.")
    how, values, _runs = call({"state": "present", "device": "/dev/disk/by-id/x", "serial": "x"}, error)
    assert how == "fail"
    assert values["msg"] == "KVF-DISK-050: The step 'x' failed: y. Repair it."
    assert values["findings"][0]["code"] == "KVF-DISK-050"
    assert (values["changed"], values["steps"]) == (True, ["partition nvme1n1"])
