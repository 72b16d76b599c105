"""What users write: types, limits, spelling, and the article's names."""

import re
from pathlib import Path

import pytest

from kvfleet.core.findings import KvfleetError
from kvfleet.core.settings import HOST_OPTIONS, INSTANCE_OPTIONS, OTHER_NAMES, known_names, parse_settings

ROOT = Path(__file__).resolve().parents[2]


def parse(**values):
    return parse_settings({f"kvfleet_{name}": value for name, value in values.items()})


def refused(values, *names):
    with pytest.raises(KvfleetError) as caught:
        parse_settings(values, names)
    return caught.value.findings


def test_without_instances_there_is_one_over_all_gpus():
    settings = parse(model="/m", profile="cpu")
    (only,) = settings.instances
    assert (only.name, only.get("model"), only.get("gpus", "all"), only.get("profile")) == (
        "default",
        "/m",
        "all",
        "cpu",
    )
    assert settings.release == "auto"
    assert settings.host == "127.0.0.1"


def test_profile_defaults_to_disk():
    assert parse(model="/m").profile == "disk"


def test_host_wide_values_are_defaults_that_an_instance_overrides():
    settings = parse(
        model="/m",
        max_model_len="8192",
        enforce_eager="true",
        instances=[{"name": "a"}, {"name": "b", "model": "/n", "max_model_len": 1024, "enforce_eager": False}],
    )
    first, second = settings.instances
    assert (first.get("model"), first.get("max_model_len"), first.get("enforce_eager")) == ("/m", 8192, True)
    assert (second.get("model"), second.get("max_model_len"), second.get("enforce_eager", True)) == ("/n", 1024, False)


def test_a_quota_of_the_host_is_no_default_of_each_instance():
    settings = parse(model="/m", quota_gib=100, instances=[{"name": "a"}, {"name": "b", "quota_gib": 10}])
    assert settings.quota_gib == 100
    assert [one.get("quota_gib") for one in settings.instances] == [None, 10]


def test_words_from_the_command_line_become_numbers():
    settings = parse(model="/m", gpus="0, 1", port="8001", gpu_memory_utilization="0.75", lmcache_port="6000")
    (only,) = settings.instances
    assert (only.get("gpus"), only.get("port"), only.get("gpu_memory_utilization")) == (["0", "1"], 8001, 0.75)
    assert settings.lmcache_port == 6000


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("profile", "ssd", "gpu, cpu, disk"),
        ("port", 70000, "from 1 to 65535"),
        ("port", "http", "a whole number"),
        ("max_num_seqs", 1.5, "a whole number"),
        ("gpu_memory_utilization", 1.2, "from 0.05 to 0.99"),
        ("gpu_memory_utilization", "nan", "a number"),
        ("buffer_gib_per_gpu", 0, "cannot be empty"),
        ("quota_gib", -1, "at least 0"),
        ("enforce_eager", "perhaps", "true or false"),
        ("instances", "llama", "a list"),
        ("kv_pool_gib", True, "a number"),
    ],
)
def test_wrong_values_name_the_variable(name, value, says):
    (finding,) = refused({f"kvfleet_{name}": value})
    assert finding.code == "KVF-SET-002"
    assert f"kvfleet_{name}" in str(finding)
    assert says in str(finding)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("kvfleet_profil", "kvfleet_profile"),
        ("kvfleet_buffer_gb_per_gpu", "kvfleet_buffer_gib_per_gpu"),
        ("kvfleet_max_model_length", "kvfleet_max_model_len"),
        ("kvfleet_chunk_size_tokens", "kvfleet_chunk_tokens"),
    ],
)
def test_misspelt_names_are_refused_with_the_nearest(name, meant):
    for finding in (*refused({name: 1}), *refused({}, name)):
        assert finding.code == "KVF-SET-001"
        assert f"Did you mean {meant}?" in finding.fix


def test_all_errors_come_at_once():
    codes = [finding.code for finding in refused({"kvfleet_profil": 1, "kvfleet_port": 0, "kvfleet_max_num_seqs": "x"})]
    assert codes == ["KVF-SET-001", "KVF-SET-002", "KVF-SET-002"]


@pytest.mark.parametrize("name", ["a@b", "a/b", "A", "", "a b", "x" * 64, "-a"])
def test_names_that_no_unit_can_have(name):
    findings = refused({"kvfleet_instances": [{"name": name, "model": "/m"}, {"name": "ok", "model": "/m"}]})
    assert [finding.code for finding in findings] == ["KVF-SET-005"]


@pytest.mark.parametrize(
    ("instances", "code"),
    [
        ([{"name": "a"}, {"name": "a"}], "KVF-SET-004"),
        (["a"], "KVF-SET-003"),
        ([{"name": "a", "max_len": 1}], "KVF-SET-001"),
        ([{"name": "a", "port": "x"}], "KVF-SET-002"),
    ],
)
def test_bad_instances(instances, code):
    assert [finding.code for finding in refused({"kvfleet_instances": instances})] == [code]


@pytest.mark.parametrize(
    ("name", "value", "variable", "advice"),
    [
        ("LMCACHE_CPU_OFFLOAD_BUFFER_SIZE", 20, "kvfleet_buffer_gib_per_gpu", "20"),
        ("LMCACHE_DISK_OFFLOAD_ENABLED", 1, "kvfleet_profile", "disk"),
        ("LMCACHE_DISK_OFFLOAD_DIR", "/ssd_cache/lmcache", "cache_disk_device", "by-id"),
        ("LMCACHE_MAX_DISK_SIZE", 200, "kvfleet_quota_gib", "200"),
        ("LMCACHE_ENABLED", 1, "kvfleet_profile", "cpu"),
        ("LMCACHE_CHUNK_SIZE", 16, "kvfleet_chunk_tokens", "256"),
        ("lmcache_chunk_size", 32, "kvfleet_chunk_tokens", "256"),
        ("LMCACHE_MAX_LOCAL_CPU_SIZE", 5, "kvfleet_buffer_gib_per_gpu", "5"),
        ("LMCACHE_SOMETHING", 5, "", "Remove it"),
    ],
)
def test_the_articles_names_warn_and_name_the_real_one(name, value, variable, advice):
    for values in (
        {name: value, "kvfleet_model": "/m"},
        {"kvfleet_instances": [{"name": "a", "model": "/m", name: value}]},
    ):
        (note,) = parse_settings(values).notes
        assert note.code == "KVF-SET-010"
        assert f"{name}={value}" in note.message
        assert variable in note.fix
        assert advice in note.fix


def test_every_public_variable_of_the_roles_is_known():
    """A variable that another role adds must not be refused here as misspelt."""
    found = set()
    for path in [*ROOT.glob("roles/*/meta/argument_specs.yml"), *ROOT.glob("roles/*/defaults/main.yml")]:
        found |= set(re.findall(r"^\s*(kvfleet_(?!_)\w+):", path.read_text(), re.MULTILINE))
    assert found
    assert found - known_names() == set()


def test_the_role_passes_every_setting_that_the_planner_reads():
    words = set(re.findall(r"^  - (\w+)$", (ROOT / "roles/host_plan/vars/main.yml").read_text(), re.MULTILINE))
    host = {name[len("kvfleet_") :] for name in HOST_OPTIONS if name.startswith("kvfleet_")} - {"releases_extra"}
    assert words == host | set(INSTANCE_OPTIONS)
    spec = (ROOT / "roles/host_plan/meta/argument_specs.yml").read_text()
    described = set(re.findall(r"^      (kvfleet_\w+):", spec, re.MULTILINE))
    assert {f"kvfleet_{word}" for word in words} <= described
    assert "kvfleet_plan" in OTHER_NAMES
