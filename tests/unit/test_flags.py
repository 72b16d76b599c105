"""The table of flags against what the programs print themselves, and what becomes of a user's own flags."""

import re
from pathlib import Path

import pytest
import yaml

from kvfleet.core import flags, services
from kvfleet.core.flag_table import LMCACHE_SERVER, LMCACHE_SETTINGS, VLLM

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "flags"
ROWS = [row for row in yaml.safe_load((ROOT / "releases.yml").read_text())["releases"] if row["status"] != "forbidden"]


def printed(name):
    """Flags in the option lines that ``--help`` printed."""
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", (DATA / name).read_text()))


def test_vllm_table_is_what_its_help_prints():
    assert flags.engine_flags("0.32.0") == printed("vllm-serve-0.32.0.txt") - {"--help"}


def test_lmcache_table_is_what_its_help_prints():
    # the command line's own, for every lmcache command
    shared = {"--help", "--format", "--output", "--quiet"}
    assert flags.server_flags("0.5.6") == printed("lmcache-server-0.5.6.txt") - shared


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_every_release_is_in_the_table(row):
    assert row["vllm"] in VLLM
    assert row["lmcache"] in (LMCACHE_SERVER if row["mode"] == "mp" else LMCACHE_SETTINGS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
@pytest.mark.parametrize("profile", ["gpu", "cpu", "disk"])
def test_every_rendered_flag_exists_in_its_release(row, profile):
    """What the units run is understood by the parser of each release that may be deployed."""
    from test_services import plan

    made = plan(profile=profile, mode=row["mode"], accelerator=row["accelerator"])
    made["release"].update({key: row[key] for key in ("vllm", "lmcache", "connector", "connector_module_path")})
    services.attach_commands(made)
    for instance in made["instances"]:
        used = {word for word in instance["command"] if word.startswith("--")}
        assert used <= flags.engine_flags(row["vllm"])
        if instance["lmcache_config"]:
            assert set(instance["lmcache_config"]) <= flags.known(LMCACHE_SETTINGS, row["lmcache"])
    for server in made["servers"]:
        used = {word for word in server["command"] if word.startswith("--")}
        assert used <= flags.server_flags(row["lmcache"])


def check(given, version="0.32.0"):
    errors, warnings = flags.check(given, flags.engine_flags(version), f"vllm serve {version}", "engine_flags")
    return [(error.code, error.fix) for error in errors], [warning.code for warning in warnings]


@pytest.mark.parametrize(
    ("flag", "fix"),
    [
        ("--swap-space", "kvfleet_buffer_gib_per_gpu"),
        ("num_scheduler_steps", "leave it out"),
        ("--task", "--runner"),
        ("--max-num-batched-token", "did you mean --max-num-batched-tokens?"),
    ],
)
def test_unknown_and_removed_flags_are_refused_with_the_replacement(flag, fix):
    errors, _ = check({flag: 1})
    assert len(errors) == 1
    assert errors[0][0] == "KVF-SET-020"
    assert fix in errors[0][1]


def test_a_flag_of_another_release_is_refused():
    only_new = sorted(flags.engine_flags("0.32.0") - flags.engine_flags("0.19.1"))
    assert "--aux-output-config" in only_new
    assert check({"aux-output-config": True}) == ([], [])
    assert check({"aux-output-config": True}, "0.19.1")[0][0][0] == "KVF-SET-020"


@pytest.mark.parametrize("flag", ["--port", "kv_transfer_config", "--no-enforce-eager", "--api-key"])
def test_what_the_plan_renders_cannot_be_set_twice(flag):
    assert check({flag: "x"})[0][0][0] == "KVF-SET-021"


def test_false_needs_a_no_form():
    assert check({"enable-prefix-caching": False}) == ([], [])
    assert check({"max-num-batched-tokens": False})[0][0][0] == "KVF-SET-022"


@pytest.mark.parametrize(
    "flags_given", [{"chat-template": "a\nb"}, {"chat-template\n": 1, "allowed-origins": ["x\ty"]}]
)
def test_control_characters_are_refused_before_a_unit_is_rendered(flags_given):
    assert {code for code, _ in check(flags_given)[0]} >= {"KVF-SET-002"}


def test_an_unknown_release_warns():
    errors, warnings = flags.check({"x": 1}, None, "vllm serve 9.9", "engine_flags")
    assert errors == []
    assert [warning.code for warning in warnings] == ["KVF-SET-023"]


def test_values_become_words():
    assert flags.words(
        {"enable-prefix-caching": False, "enable_lora": True, "hf-overrides": {"a": 1}, "allowed-origins": ["x", "y"]}
    ) == [
        "--allowed-origins", "x", "y", "--enable-lora", "--no-enable-prefix-caching", "--hf-overrides", '{"a":1}',
    ]  # fmt: skip
