"""Bad input on a real host: one sentence that names the variable and the fix, and nothing was changed.

Each case runs the whole ``site.yml`` against a fresh throw-away host and must end at planning.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sparse import sparse_digest

pytestmark = pytest.mark.root

ROOT = Path(__file__).parents[3]
TESTHOST = ROOT / "scripts" / "testhost"
HOST = "badinput"
DISK = "/dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_THBADINPUT02"


def tool(*words, **options):
    return subprocess.run([str(TESTHOST), *words], text=True, capture_output=True, check=True, **options).stdout


def ssh(command):
    return tool("ssh", HOST, command)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A host with a model and an inventory that would deploy."""
    folder = tmp_path_factory.mktemp("inventory")
    tool("up", HOST, "--reuse", "--size", "1G")
    try:
        subprocess.run([sys.executable, ROOT / "scripts" / "tinymodel", "--size", "tiny", folder / "model"], check=True)
        with subprocess.Popen(["tar", "-C", folder / "model", "-cf", "-", "."], stdout=subprocess.PIPE) as archive:
            tool(
                "ssh", HOST, "mkdir -p /data/models/tiny && tar -C /data/models/tiny --no-same-owner -xf -",
                stdin=archive.stdout,
            )  # fmt: skip
        ssh("mkdir -p /data/models/empty")
        entry = tool("inventory", HOST)
        body = "all:\n  hosts:\n" + "".join(f"    {line}\n" for line in entry.splitlines())
        (folder / "hosts.yml").write_text(body)
        yield folder / "hosts.yml"
    finally:
        tool("down", HOST)


#: what a user writes for this host; each case replaces some of it
GOOD = {
    "kvfleet_profile": "disk",
    "kvfleet_dtype": "float32",
    "kvfleet_kv_pool_gib": 0.25,
    "kvfleet_buffer_gib_per_gpu": 1,
    "kvfleet_instances": [
        {"name": "tiny", "model": "/data/models/tiny", "port": 8000, "max_model_len": 8192, "max_num_seqs": 4}
    ],
    "cache_disk_format": True,
    "engine_source": "bundle",
}


def instance(**changes):
    return {"kvfleet_instances": [{**GOOD["kvfleet_instances"][0], **changes}]}


def state_of_host():
    """Everything that a deploy would change: our directories, units, users, packages, mounts, both disks' bytes."""
    inside = ssh(
        "ls -d /opt/kvfleet /etc/kvfleet /var/lib/kvfleet /var/cache/kvfleet 2>&1;"
        "ls /etc/systemd/system; getent passwd | sha256sum; dpkg-query -W | sha256sum; findmnt -rn | sha256sum;"
        "for d in /dev/disk/by-id/*; do blockdev --flushbufs $d; done"
    )
    disks = json.loads(tool("disk-usage", HOST, "--json"))
    assert len(disks) == 2
    return inside, [sparse_digest(Path(disk["file"])) for disk in disks]


def deploy(inventory, values, *arguments):
    environment = dict(os.environ, ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"), ANSIBLE_NOCOLOR="1", COLUMNS="400")
    playbook = Path(sys.executable).parent / "ansible-playbook"
    done = subprocess.run(
        [playbook, "-i", inventory, "-e", json.dumps(values), *arguments, "site.yml"],
        cwd=ROOT, env=environment, text=True, capture_output=True, check=False, timeout=300,
    )  # fmt: skip
    return done.returncode, re.sub(r"\s+", " ", done.stdout + done.stderr)


CASES = {
    "profile": ({"kvfleet_profile": "ssd"}, ["kvfleet_profile", "gpu", "cpu", "disk"]),
    "release": ({"kvfleet_release": "cpu-9.9.9"}, ["kvfleet_release", "cpu-0.32.0-0.5.6"]),
    "forbidden release": ({"kvfleet_release": "forbidden-vllm-0.33.0"}, ["kvfleet_release"]),
    "model directory missing": (instance(model="/data/models/none"), ["/data/models/none", "model"]),
    "model without config.json": (instance(model="/data/models/empty"), ["/data/models/empty", "config.json"]),
    "port taken": (instance(port=22), ["22", "port"]),
    "disk missing": ({"cache_disk_device": f"{DISK}X"}, ["cache_disk_device", f"{DISK}X"]),
    "disk by kernel name": ({"cache_disk_device": "/dev/loop0"}, ["cache_disk_device", "/dev/disk/by-id"]),
    "disk with another serial": ({"cache_disk_serial": "OTHER"}, ["cache_disk_serial", "THBADINPUT02"]),
    "no disk named": ({"cache_disk_device": ""}, ["cache_disk_device"]),
    "too little RAM": ({"kvfleet_buffer_gib_per_gpu": 4000}, ["kvfleet_buffer_gib_per_gpu", "4000"]),
    "misspelt variable": (
        {"kvfleet_bufer_gib_per_gpu": 1},
        ["kvfleet_bufer_gib_per_gpu", "kvfleet_buffer_gib_per_gpu"],
    ),
    "flag that was removed": (
        {"kvfleet_engine_flags": {"swap-space": 4}},
        ["--swap-space", "removed", "kvfleet_buffer_gib_per_gpu"],
    ),
    "flag that no release knows": (
        {"kvfleet_server_flags": {"chunk-sizes": 4}},
        ["--chunk-sizes", "kvfleet_server_flags", "KVF-SET-020"],
    ),
    "instance name with @": (instance(name="a@b"), ["a@b"]),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_before_any_change(host, case):
    changes, expected = CASES[case]
    before = state_of_host()
    status, text = deploy(host, {**GOOD, **{"cache_disk_device": DISK, "cache_disk_serial": "THBADINPUT02"}, **changes})
    assert status != 0
    for word in expected:
        assert word in text
    assert "changed=0" in text
    assert state_of_host() == before


@pytest.fixture
def old_system(host):
    """The host says of itself that it is a system which nobody tests."""
    ssh(
        "cp /etc/os-release /root/os-release;"
        "sed -i -e s/^VERSION_ID=.*/VERSION_ID=10/ -e s/bookworm/buster/ /etc/os-release"
    )
    yield
    ssh("cat /root/os-release > /etc/os-release")


def test_unsupported_system_is_refused(host, old_system):
    before = state_of_host()
    status, text = deploy(host, GOOD)
    assert status != 0
    assert "KVF-HOST-001" in text
    assert "Ubuntu 24.04" in text
    assert "changed=0" in text
    assert state_of_host() == before


def test_missing_interpreter_is_refused(host):
    before = state_of_host()
    status, text = deploy(host, {**GOOD, "ansible_python_interpreter": "/usr/bin/python3.7"})
    assert status != 0
    assert "ansible_python_interpreter" in text or "/usr/bin/python3.7" in text
    assert "changed=0" in text
    assert state_of_host() == before


def test_unreachable_host_is_named(host, tmp_path):
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(re.sub(r"ansible_port: \d+", "ansible_port: 9", host.read_text()))
    status, text = deploy(inventory, GOOD, "--ssh-common-args=-o ConnectTimeout=5")
    assert status != 0
    assert f"{HOST}" in text
    assert "unreachable=1" in text


def test_good_input_plans(host):
    """The cases above fail for their own reason only if the rest of their input is good."""
    environment = dict(os.environ, ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"))
    done = subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "-i", host, "-e", json.dumps(GOOD), "playbooks/plan.yml"],
        cwd=ROOT, env=environment, text=True, capture_output=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
