"""The unit files that plans turn into, rendered as Ansible does it, and read again line by line."""

import json
import re
from pathlib import Path

import jinja2
import pytest
import yaml
from test_services import plan

from kvfleet.core import services

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "templates"


def defaults(role):
    return yaml.safe_load((ROOT / "roles" / role / "defaults/main.yml").read_text())


def render(name, made, **variables):
    environment = jinja2.Environment(  # noqa: S701 - unit files, no HTML
        loader=jinja2.FileSystemLoader(TEMPLATES), trim_blocks=True, keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.globals["lookup"] = lambda _, path: Path(path).read_text().rstrip("\n")
    environment.filters["regex_replace"] = lambda value, pattern, new: re.sub(pattern, new, value)
    environment.filters["to_nice_json"] = lambda value: json.dumps(value, indent=4)
    values = {
        **defaults("lmcache_server"), **defaults("vllm_instance"), "vllm_instance_api_key": "", "kvfleet_plan": made,
        "ansible_managed": "managed", "kvfleet_templates_dir": str(TEMPLATES), **variables,
    }  # fmt: skip
    return environment.get_template(name).render(values)


def instance_unit(made, **variables):
    return render("vllm_instance/kvfleet-vllm.service.j2", made, instance=made["instances"][0], **variables)


def server_unit(made):
    return render("lmcache_server/kvfleet-lmcache.service.j2", made, server=made["servers"][0])


def attached(**options):
    made = plan(**options)
    services.attach_commands(made)
    return made


def values(text, key):
    """All values of ``key``; comments are no lines."""
    return [line.split("=", 1)[1] for line in text.splitlines() if line.startswith(f"{key}=")]


def test_key_reaches_the_engine_as_a_credential_only():
    text = instance_unit(attached(), vllm_instance_api_key="canary")
    assert "canary" not in text
    assert values(text, "LoadCredential") == ["api_key:/etc/kvfleet/credentials/api_key"]
    assert values(text, "ExecStart")[0].startswith(
        "/opt/kvfleet/libexec/kvfleet-unit exec -- /opt/kvfleet/current/bin/vllm"
    )
    plain = instance_unit(attached())
    assert values(plain, "LoadCredential") == []
    assert values(plain, "ExecStart")[0].startswith("/opt/kvfleet/current/bin/vllm serve")


def test_watcher_loads_the_key_too_and_names_every_unit():
    made = attached()
    watched = [{**entry, "user": "kvfleet"} for entry in made["watch"]]
    text = render("vllm_instance/kvfleet-watch.service.j2", made, vllm_instance_api_key="canary")
    assert "canary" not in text
    assert values(text, "LoadCredential") == ["api_key:/etc/kvfleet/credentials/api_key"]
    # the last assignment would empty the set again
    assert values(text, "CapabilityBoundingSet") == ["CAP_DAC_READ_SEARCH"]
    settings = json.loads(render("vllm_instance/kvfleet-watch.json.j2", made, __vllm_instance_watched=watched))
    assert [entry["unit"] for entry in settings["units"]] == [
        "kvfleet-lmcache@0.service",
        "kvfleet-vllm@llama8b.service",
    ]


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_a_start_waits_for_gpu_memory_where_there_are_gpus(accelerator):
    made = attached(accelerator=accelerator)
    if accelerator == "cpu":
        made["instances"][0]["gpus"] = []
    text = instance_unit(made)
    waits = [line for line in values(text, "ExecStartPre") if "wait-gpus" in line]
    assert len(waits) == (accelerator == "cuda")
    seconds = int(values(text, "TimeoutStartSec")[0])
    # every wait of the start fits into the start's own limit
    assert seconds > services.DEFAULT_STARTUP_DEADLINE_S + (180 if accelerator == "cuda" else 0)


def test_both_units_clean_before_and_after():
    made = attached(accelerator="cpu")
    for text, own in (
        (instance_unit(made), "vllm_offload_kvfleet-llama8b.mmap"),
        (server_unit(made), "lmcache_l1_pool_kvfleet-0"),
    ):
        for key in ("ExecStartPre", "ExecStopPost"):
            assert [line for line in values(text, key) if line.endswith(f"clean {own}")]


@pytest.mark.parametrize("name", ["kvfleet-0", None])
def test_the_buffer_in_shared_memory_is_reserved_where_there_is_one(name):
    made = attached(accelerator="cpu" if name else "cuda")
    made["servers"][0]["shm_name"] = name
    lines = values(server_unit(made), "ExecStartPost")
    assert "ready-server" in lines[0]
    wanted = ["reserve lmcache_l1_pool_kvfleet-0"] if name else []
    assert [line.split(" ", 1)[1] for line in lines[1:]] == wanted


def test_stop_timeout_exceeds_the_drain():
    made = attached()
    assert int(values(instance_unit(made), "TimeoutStopSec")[0]) > made["instances"][0]["shutdown_timeout_s"] + 30
    assert values(instance_unit(made), "KillMode") == ["mixed"]


@pytest.mark.parametrize("profile", ["gpu", "cpu", "disk"])
def test_only_the_disk_profile_needs_the_cache_partition(profile):
    made = attached(profile=profile)
    texts = [instance_unit(made), *([server_unit(made)] if made["servers"] else [])]
    assert any("RequiresMountsFor=/var/cache/kvfleet" in text for text in texts) is (profile == "disk")


@pytest.mark.parametrize("profile", ["gpu", "cpu", "disk"])
def test_nothing_that_needs_the_partition_is_pulled_in_by_it(profile):
    """In such a ring systemd 252 lets the start of any service undo a stop of the partition that is under way."""
    assert values(render("vllm_instance/kvfleet.target.j2", attached(profile=profile)), "WantedBy") == [
        "multi-user.target"
    ]


def test_in_process_units_have_their_own_directory_and_settings():
    made = attached(mode="in_process")
    text = instance_unit(made)
    assert "RequiresMountsFor=/var/cache/kvfleet" in text
    assert [line for line in values(text, "ExecStartPre") if "prepare-tier /var/cache/kvfleet/data/llama8b/" in line]
    directory = made["instances"][0]["lmcache_config"]["local_disk"]
    assert directory.startswith("file:///var/cache/kvfleet/data/llama8b/")
    assert 'Environment="LMCACHE_CONFIG_FILE=/etc/kvfleet/kvfleet-vllm@llama8b.lmcache.yaml"' in text
    assert "--kv-transfer-config" in text


def test_numa_and_order_stand_in_the_units():
    made = plan()
    made["host"]["numa_nodes"] = 2
    made["servers"][0]["numa_nodes"] = made["instances"][0]["numa_nodes"] = [1]
    made["instances"].append({**made["instances"][0], "name": "second"})
    services.attach_commands(made)
    assert values(server_unit(made), "NUMAPolicy") == ["bind"]
    text = render("vllm_instance/kvfleet-vllm.service.j2", made, instance=made["instances"][1])
    assert values(text, "NUMAMask") == ["1"]
    assert "kvfleet-vllm@llama8b.service" in values(text, "After")
