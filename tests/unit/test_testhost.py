"""scripts/testhost: everything that can be decided without root, devices and a running host."""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS / "testhost.d"))

from testhost import access, cli, container, disks, image, lifecycle, machine, recipe, state, tools  # noqa: E402


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFLEET_TESTHOST_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("KVFLEET_CACHE", str(tmp_path / "cache"))
    return tmp_path


def make_host(**changes: object) -> state.Host:
    roles = ["system", "cache"]
    values: dict[str, object] = {
        "name": "node1",
        "backend": "nspawn",
        "port": 22001,
        "image": "bookworm-nspawn-0",
        "disks": [state.Disk(n, role, f"THNODE10{n}", 2**32) for n, role in enumerate(roles, 1)],
        "order": [1, 2],
        "loops": ["/dev/loop3", "/dev/loop7"],
    }
    return state.Host(**{**values, **changes})  # type: ignore[arg-type]


# ---------------------------------------------------------------- names and sizes
@pytest.mark.parametrize("name", ["a", "node1", "kv-demo", "a" * 20, "0"])
def test_good_names(name: str) -> None:
    assert state.checked_name(name) == name


@pytest.mark.parametrize("name", ["", "A", "a" * 21, "-a", "a-", "a.b", "../x", "a b", "ä", "a\n"])
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(tools.TesthostError, match="host name"):
        state.checked_name(name)


@pytest.mark.parametrize(
    ("text", "size"), [("64M", 67108864), ("4G", 4294967296), ("4GiB", 4294967296), ("1T", 1099511627776)]
)
def test_sizes_are_binary(text: str, size: int) -> None:
    assert state.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "4", "4g", "4GB", "-1G", "1.5G", "63M", "4 G", "G"])
def test_unclear_sizes_are_refused(text: str) -> None:
    with pytest.raises(tools.TesthostError, match="size"):
        state.parse_size(text)


@pytest.mark.parametrize(
    ("name", "number", "serial"),
    [("node1", 1, "THNODE101"), ("kv-demo", 12, "THKVDEMO12"), ("abcdefghij0123456789", 2, "THABCDEFGHIJ01234502")],
)
def test_serials_name_host_and_disk_within_nvme_limits(name: str, number: int, serial: str) -> None:
    assert state.disk_serial(name, number) == serial
    # NVM Express base specification: the serial number field has 20 bytes
    assert len(serial) <= 20


def test_disk_roles() -> None:
    assert state.disk_roles(0, False) == []
    assert state.disk_roles(1, False) == ["cache"]
    assert state.disk_roles(2, True) == ["system", "cache"]
    assert state.disk_roles(3, True) == ["system", "cache", "spare"]
    assert state.disk_roles(2, False) == ["cache", "spare"]


@pytest.mark.parametrize(("count", "system"), [(-1, False), (9, False), (1, True), (0, True)])
def test_impossible_disks_are_refused(count: int, system: bool) -> None:
    with pytest.raises(tools.TesthostError, match="disk"):
        state.disk_roles(count, system)


# ---------------------------------------------------------------- records
def test_a_record_comes_back_as_it_was() -> None:
    host = make_host(ready=True, memory_mib=4096)
    host.disks[0].system_sha256 = "ab" * 32
    host.save()
    assert state.load_host("node1") == host
    assert [found.name for found in state.all_hosts()] == ["node1"]
    assert list(host.folder.glob("*.new")) == []


def test_no_record_is_no_host() -> None:
    assert state.load_host("node1") is None
    assert state.all_hosts() == []
    with pytest.raises(tools.TesthostError, match="testhost up node1"):
        state.known_host("node1")


def test_a_record_of_another_version_is_named() -> None:
    host = make_host(schema=state.SCHEMA + 1)
    host.save()
    with pytest.raises(tools.TesthostError, match="another version of testhost"):
        state.load_host("node1")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', '{"schema": 99}'])
def test_an_unreadable_record_is_named(text: str) -> None:
    path = make_host().folder / "host.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(tools.TesthostError, match=r"host\.json"):
        state.load_host("node1")


def test_two_state_folders_do_not_share_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = make_host().ident
    monkeypatch.setenv("KVFLEET_TESTHOST_STATE", str(tmp_path / "other"))
    assert make_host().ident != first
    # a network interface name or unit must be able to hold it; the kernel allows 64 characters for a host name
    assert len(make_host(name="a" * 20).ident) <= 30


# ---------------------------------------------------------------- access
def test_openssh_reads_the_configuration_as_meant() -> None:
    host = make_host()
    host.folder.mkdir(parents=True)
    host.ssh_config.write_text(access.ssh_config_text(host))
    out = subprocess.run(
        ["ssh", "-G", "-F", str(host.ssh_config), "node1"], capture_output=True, text=True, check=True
    ).stdout
    options = dict(line.split(" ", 1) for line in out.splitlines())
    assert options["hostname"] == "127.0.0.1"
    assert options["port"] == "22001"
    assert options["user"] == "root"
    assert options["stricthostkeychecking"] == "true"
    assert options["userknownhostsfile"] == str(host.folder / "known_hosts")
    assert options["globalknownhostsfile"] == "/dev/null"
    assert options["identitiesonly"] == "yes"


def test_ssh_keygen_finds_the_host_under_both_names(tmp_path: Path) -> None:
    host = make_host()
    public = access.make_key(tmp_path / "key", "test")
    known = tmp_path / "known_hosts"
    known.write_text(access.known_hosts_text(host, public))
    for name in (host.ident, "[127.0.0.1]:22001"):
        found = subprocess.run(["ssh-keygen", "-F", name, "-f", str(known)], capture_output=True, text=True, check=True)
        assert public.split()[1] in found.stdout


def test_a_key_is_made_once(tmp_path: Path) -> None:
    assert access.make_key(tmp_path / "key", "test") == access.make_key(tmp_path / "key", "test")


def test_the_inventory_entry_is_yaml_with_the_cache_disk() -> None:
    import yaml

    host = make_host()
    entry = yaml.safe_load(access.inventory_text(host))["node1"]
    assert entry["ansible_host"] == "127.0.0.1"
    assert entry["ansible_port"] == 22001
    assert entry["ansible_ssh_private_key_file"] == str(host.folder / "ssh_key")
    assert "-o StrictHostKeyChecking=yes" in entry["ansible_ssh_common_args"]
    assert f"-o UserKnownHostsFile={host.folder}/known_hosts" in entry["ansible_ssh_common_args"]
    assert entry["cache_disk_device"] == "/dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_THNODE102"
    assert entry["cache_disk_serial"] == "THNODE102"


def test_a_host_without_disks_names_no_cache_disk() -> None:
    assert "cache_disk" not in access.inventory_text(make_host(disks=[], order=[], loops=[]))


# ---------------------------------------------------------------- disks
def test_only_content_counts_for_the_digest(tmp_path: Path) -> None:
    holes, zeros, changed = (tmp_path / name for name in ("holes", "zeros", "changed"))
    for path in (holes, zeros, changed):
        with path.open("wb") as handle:
            handle.truncate(8 * 2**20)
            os.pwrite(handle.fileno(), b"data", 3 * 2**20 + 5)
    with zeros.open("r+b") as handle:
        os.pwrite(handle.fileno(), b"\0" * 2**20, 5 * 2**20)
    with changed.open("r+b") as handle:
        os.pwrite(handle.fileno(), b"D", 3 * 2**20 + 5)
    assert zeros.stat().st_blocks > holes.stat().st_blocks
    assert disks.content_sha256(zeros) == disks.content_sha256(holes)
    assert disks.content_sha256(changed) != disks.content_sha256(holes)


def test_the_digest_covers_every_byte(tmp_path: Path) -> None:
    content = bytes(range(256)) * 1024
    path = tmp_path / "full"
    path.write_bytes(content)
    # the definition, over a file that is small enough to read at once
    expected = hashlib.sha256(len(content).to_bytes(8, "big"))
    for position in range(0, len(content), 65536):
        expected.update(position.to_bytes(8, "big") + content[position : position + 65536])
    assert disks.content_sha256(path) == expected.hexdigest()
    for position in (0, 65535, 65536, len(content) - 1):
        with path.open("r+b") as handle:
            os.pwrite(handle.fileno(), bytes([content[position] ^ 1]), position)
        assert disks.content_sha256(path) != expected.hexdigest()
        path.write_bytes(content)


def test_size_counts_for_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    path.write_bytes(b"")
    os.truncate(path, 2**20)
    before = disks.content_sha256(path)
    os.truncate(path, 2**21)
    assert disks.content_sha256(path) != before


def test_a_system_disk_has_a_table_and_a_file_system_that_fsck_likes(tmp_path: Path) -> None:
    path = tmp_path / "disk1.img"
    with path.open("wb") as handle:
        handle.truncate(128 * 2**20)
    tools.extend_path()
    disks.fill_system_disk(path, 128 * 2**20, "node1")
    table = json.loads(tools.run(["sfdisk", "--json", path]).stdout)["partitiontable"]
    assert table["label"] == "gpt"
    assert [part["start"] for part in table["partitions"]] == [2048]
    partition = tmp_path / "partition"
    partition.write_bytes(path.read_bytes()[2048 * 512 : (2048 + table["partitions"][0]["size"]) * 512])
    assert tools.run(["e2fsck", "-f", "-n", partition], check=False).returncode == 0
    hostname = tools.run(["debugfs", "-R", "cat /etc/hostname", partition]).stdout
    assert hostname == "node1-system\n"


def test_a_touched_system_disk_is_named(tmp_path: Path) -> None:
    host = make_host()
    host.folder.mkdir(parents=True)
    host.disks[0].size_bytes = 64 * 2**20
    tools.extend_path()
    disks.make_disk(host, host.disks[0])
    assert disks.verify_system_disk(host) == host.disks[0].system_sha256
    with host.disk_file(host.disks[0]).open("r+b") as handle:
        os.pwrite(handle.fileno(), b"boot code", 0)
    with pytest.raises(tools.TesthostError, match="THNODE101 of node1 was changed"):
        disks.verify_system_disk(host)


def test_no_system_disk_is_said() -> None:
    with pytest.raises(tools.TesthostError, match="no system disk"):
        disks.verify_system_disk(make_host(disks=[state.Disk(1, "cache", "THX01", 2**26)], order=[1]))


def test_allocated_bytes_count_blocks_not_length(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as handle:
        handle.truncate(2**30)
        os.pwrite(handle.fileno(), os.urandom(2**20), 2**29)
    du = int(subprocess.run(["du", "-B1", str(path)], capture_output=True, text=True, check=True).stdout.split()[0])
    assert disks.allocated_bytes(path) == du
    assert 2**20 <= du < 2**21


def test_loops_are_found_by_their_folder_even_when_the_file_is_gone() -> None:
    # lines of losetup --list --raw from util-linux 2.38
    listing = (
        "/dev/loop0 /cache/root.sqfs\n"
        "/dev/loop1 /var/tmp/t/node1/disk1.img\n"
        "/dev/loop2 /var/tmp/t/node1/disk2.img\\x20(deleted)\n"
        "/dev/loop3 /var/tmp/t/node11/disk1.img\n"
        "/dev/loop4 \n"
    )
    assert disks.loops_below(Path("/var/tmp/t/node1"), listing) == ["/dev/loop1", "/dev/loop2"]


# ---------------------------------------------------------------- container
def test_the_container_sees_the_disks_in_the_order_that_is_due() -> None:
    host = make_host()
    assert "--setenv=TESTHOST_DISKS=loop3=THNODE101 loop7=THNODE102" in container.nspawn_argv(host, 20000)
    lifecycle.swap(host)
    argv = container.nspawn_argv(host, 20000)
    assert "--setenv=TESTHOST_DISKS=loop3=THNODE102 loop7=THNODE101" in argv
    assert {"--bind=/dev/loop3", "--bind=/dev/loop7"} <= set(argv)
    # the whole of /dev would hand the machine's own disks over
    assert not [word for word in argv if word in ("--bind=/dev", "--private-users", "--privileged")]


@pytest.mark.parametrize(("hard", "limit"), [(-1, 524288), (1048576, 524288), (20000, 20000), (512, 512)])
def test_open_files_stay_within_the_machine(hard: int, limit: int) -> None:
    argv = container.nspawn_argv(make_host(), hard)
    assert f"--rlimit=RLIMIT_NOFILE={min(1024, limit)}:{limit}" in argv


def test_only_the_loopback_is_forwarded() -> None:
    request = json.loads(container.forward_request(22001))
    assert request["execute"] == "add_hostfwd"
    assert request["arguments"] == {
        "proto": "tcp",
        "host_addr": "127.0.0.1",
        "host_port": 22001,
        "guest_port": 22,
    }


def test_cgroups_are_found_and_removed(tmp_path: Path) -> None:
    host = make_host()
    for part, processes in (("", "11\n"), ("payload", "12\n13\n"), ("payload/system.slice", "")):
        (tmp_path / host.ident / part).mkdir(parents=True, exist_ok=True)
        (tmp_path / host.ident / part / "cgroup.procs").write_text(processes)
    assert container.cgroup_processes(host, [tmp_path]) == [11, 12, 13]
    for procs in (tmp_path / host.ident).glob("**/cgroup.procs"):
        # the kernel's files vanish with their folder
        procs.unlink()
    container.remove_cgroups(host, [tmp_path])
    assert not (tmp_path / host.ident).exists()


# ---------------------------------------------------------------- virtual machine
def test_kvm_needs_a_processor_that_has_it() -> None:
    plain, virtual = "flags\t: fpu sse2 avx512f", "flags\t: fpu vmx sse2"
    assert machine.accelerator(virtual, True)[1] == "kvm"
    assert machine.accelerator(virtual, False)[1].startswith("tcg")
    # /dev/kvm opens, but QEMU would hang
    assert machine.accelerator(plain, True)[1].startswith("tcg")


def test_the_machine_finds_its_disks_in_the_order_that_is_due() -> None:
    host = make_host(backend="qemu")

    def slots() -> dict[str, str]:
        argv = machine.qemu_argv(host, image.Image(Path("/cache/x")), ["-accel", "tcg"])
        devices = [dict(item.split("=") for item in word.split(",")[1:]) for word in argv if word.startswith("nvme,")]
        return {device["serial"]: device["addr"] for device in devices}

    before = slots()
    assert int(before["THROOT"], 16) < int(before["THNODE101"], 16) < int(before["THNODE102"], 16)
    lifecycle.swap(host)
    after = slots()
    assert int(after["THROOT"], 16) < int(after["THNODE102"], 16) < int(after["THNODE101"], 16)


def test_a_reboot_is_told_from_a_power_off() -> None:
    greeting = b'{"QMP": {"version": {}}}\n'
    answer = b'{"return": {}}\n'

    def event(reason: str) -> bytes:
        return json.dumps({"event": "SHUTDOWN", "data": {"guest": True, "reason": reason}}).encode() + b"\n"

    assert machine.ended_with_reset([greeting, answer, event("guest-reset")])
    assert not machine.ended_with_reset([greeting, answer, event("guest-shutdown")])
    assert not machine.ended_with_reset([greeting, answer])


def test_one_disk_cannot_be_swapped() -> None:
    with pytest.raises(tools.TesthostError, match="nothing to swap"):
        lifecycle.swap(make_host(disks=[state.Disk(1, "cache", "THX01", 2**26)], order=[1]))


def test_an_unplugged_disk_is_not_given_to_the_next_boot_and_comes_back() -> None:
    host = make_host()
    lifecycle.unplug(host)
    assert state.load_host("node1").order == [1]  # type: ignore[union-attr]
    host.loops = ["/dev/loop3"]
    assert "--setenv=TESTHOST_DISKS=loop3=THNODE101" in container.nspawn_argv(host, 20000)
    lifecycle.plug(host)
    assert state.load_host("node1").order == [1, 2]  # type: ignore[union-attr]


def test_what_is_not_there_cannot_be_unplugged() -> None:
    with pytest.raises(tools.TesthostError, match="no cache disk"):
        lifecycle.unplug(make_host(disks=[], order=[]))


# ---------------------------------------------------------------- image
DEBIAN_SOURCES = """\
Types: deb deb-src
# a mirror nearby
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates trixie
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main

Types: deb-src
URIs: http://source.only/debian
Suites: bookworm
Components: main

Enabled: no
Types: deb
URIs: http://switched.off/debian
Suites: bookworm
Components: main
"""


def test_the_machines_own_mirror_is_used() -> None:
    text = recipe.debian_sources({"/etc/apt/sources.list.d/debian.sources": DEBIAN_SOURCES})
    assert "URIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\nComponents: main contrib\n" in text
    assert "URIs: http://mirror.example/debian-security\nSuites: bookworm-security\n" in text
    assert "switched.off" not in text
    assert "source.only" not in text
    assert "trixie" not in text


def test_one_line_sources_are_read() -> None:
    text = recipe.debian_sources(
        {
            "/etc/apt/sources.list": "# old style\n"
            "deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://m.example/debian bookworm"
            " main # here\n"
            "deb-src http://m.example/debian bookworm main\n"
            "deb http://m.example/debian bullseye main\n"
        }
    )
    assert text.count("Types: deb\n") == 1
    assert "URIs: http://m.example/debian\nSuites: bookworm\nComponents: main\n" in text


def test_third_parties_stay_out_of_the_image() -> None:
    assert (
        recipe.debian_sources(
            {
                "a.sources": "Types: deb\nURIs: https://x.example\nSuites: bookworm\nComponents: main\n"
                "Signed-By: /etc/apt/keyrings/x.gpg\n",
                "b.list": "deb [signed-by=/etc/apt/keyrings/x.gpg] https://x.example bookworm main\n",
                "c.list.disabled": "deb http://m.example/debian bookworm main\n",
            }
        )
        == ""
    )


def test_apt_reads_the_sources_that_were_made(tmp_path: Path) -> None:
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    text = recipe.debian_sources({"/etc/apt/sources.list.d/debian.sources": DEBIAN_SOURCES})
    (parts / "machine.sources").write_text(text)
    shown = subprocess.run(
        ["apt-get", "update", "--print-uris", "-o", f"Dir::Etc::SourceParts={parts}",
         "-o", "Dir::Etc::SourceList=/dev/null", "-o", "APT::Architecture=amd64"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    found = set(re.findall(r"'http://mirror\.example/(\S+)/binary-amd64/Packages", shown))
    assert found == {
        "debian/dists/bookworm/main",
        "debian/dists/bookworm/contrib",
        "debian/dists/bookworm-updates/main",
        "debian/dists/bookworm-updates/contrib",
        "debian-security/dists/bookworm-security/main",
    }


def test_proxies_are_passed_on_as_the_guest_reaches_them() -> None:
    dump = (
        'APT::Architecture "amd64";\n'
        'Acquire "";\n'
        'Acquire::http "";\n'
        'Acquire::http::Proxy "http://localhost:3142/";\n'
        'Acquire::https::Proxy "http://127.0.0.1:3142";\n'
        'Acquire::https::CaInfo "/etc/ssl/own.pem";\n'
        'Acquire::Languages "none";\n'
        'Acquire::Check-Valid-Until "false";\n'
        'Acquire::http::Proxy::deb.example "DIRECT";\n'
    )
    assert recipe.apt_settings(dump).splitlines() == [
        'Acquire::http::Proxy "http://10.0.2.2:3142/";',
        'Acquire::https::Proxy "http://10.0.2.2:3142";',
        'Acquire::https::CaInfo "/etc/ssl/own.pem";',
        'Acquire::Check-Valid-Until "false";',
        'Acquire::http::Proxy::deb.example "DIRECT";',
    ]


def test_any_input_changes_the_stamp() -> None:
    parts = [b"packages", b"sources", b"key"]
    stamps = {
        image.image_stamp(parts),
        image.image_stamp([b"packages", b"sources", b"yek"]),
        image.image_stamp([b"packages", b"source", b"skey"]),
        image.image_stamp([b"packages", b"sources"]),
        image.image_stamp([]),
    }
    assert len(stamps) == 5
    assert image.image_stamp(parts) == image.image_stamp(list(parts))


def test_an_image_in_use_outlives_a_newer_one() -> None:
    old = image.Image(state.cache_folder() / "bookworm-nspawn-1")
    old.folder.mkdir(parents=True)
    host = make_host(image="another")
    assert not image.is_used(old)
    image.note_user(old, host)
    # noted, but the host was never made or is gone again
    assert not image.is_used(old)
    host.save()
    assert image.is_used(old)
    (old.folder / "users" / host.ident).unlink()
    assert not image.is_used(old)
    make_host(image=old.folder.name).save()
    assert image.is_used(old)


def test_the_image_holds_nothing_that_roles_must_install() -> None:
    # a role that forgets one of these must fail here as it would on a real host
    forbidden = {"gdisk", "parted", "xfsprogs", "nvme-cli", "libnuma1", "python3-venv", "python3-pip", "curl"}
    assert not forbidden & set(recipe.PACKAGES)


def test_guest_scripts_are_executable_and_valid_shell() -> None:
    files = recipe.guest_files("nspawn")
    scripts = [name for name, (_, content) in files.items() if content.startswith(b"#!/bin/sh")]
    assert sorted(scripts) == ["usr/local/lib/testhost/init", "usr/local/lib/testhost/udev-disk"]
    for name in scripts:
        assert files[name][0] == 0o755
        subprocess.run(["sh", "-n"], input=files[name][1], check=True)


def test_each_kind_of_host_gets_its_own_files() -> None:
    container_files, machine_files = recipe.guest_files("nspawn"), recipe.guest_files("qemu")
    assert "etc/systemd/system/testhost-hostkey.service" in machine_files.keys() - container_files.keys()
    assert "etc/udev/rules.d/01-testhost.rules" in container_files.keys() - machine_files.keys()
    assert "etc/resolv.conf" in container_files.keys() & machine_files.keys()


# ---------------------------------------------------------------- tools
def test_missing_tools_become_one_apt_line(tmp_path: Path) -> None:
    keyring = tmp_path / "keyring.gpg"
    have = {"mmdebstrap", "mke2fs", "sfdisk", "ssh", "ssh-keygen", "mount", "losetup", "ip"}

    def which(name: str) -> str | None:
        return f"/usr/bin/{name}" if name in have else None

    assert tools.missing_packages("nspawn", which, keyring) == [
        "debian-archive-keyring",
        "slirp4netns",
        "squashfs-tools",
        "systemd-container",
    ]
    keyring.touch()
    assert tools.missing_packages("qemu", which, keyring) == ["qemu-system-x86", "qemu-utils"]


def test_no_install_refuses_with_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "missing_packages", lambda _backend: ["slirp4netns"])
    with pytest.raises(tools.TesthostError, match="apt-get install slirp4netns"):
        tools.need_packages("nspawn", install=False)


def test_a_missing_command_names_its_package() -> None:
    with pytest.raises(tools.TesthostError, match="apt-get install slirp4netns"):
        tools.run(["slirp4netns", "--version"], env={"PATH": "/nonexistent"})


def test_a_failed_command_says_why() -> None:
    with pytest.raises(tools.TesthostError, match="status 3: the reason"):
        tools.run(["sh", "-c", "echo the reason >&2; exit 3"])


def test_mounts_are_found_innermost_first() -> None:
    # lines as proc_pid_mountinfo(5) describes them, blanks as \040
    mountinfo = (
        "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        "40 22 7:0 / /var/tmp/t/node1/lower ro - squashfs /dev/loop0 ro\n"
        "41 22 0:50 / /var/tmp/t/node1/root rw - overlay th-node1 rw\n"
        "42 41 0:51 / /var/tmp/t/node1/root/a\\040b rw - tmpfs tmpfs rw\n"
        "43 22 0:52 / /var/tmp/t/node11/root rw - overlay th-node11 rw\n"
    )
    assert tools.mounts_below(Path("/var/tmp/t/node1"), mountinfo) == [
        "/var/tmp/t/node1/root/a b",
        "/var/tmp/t/node1/root",
        "/var/tmp/t/node1/lower",
    ]


def test_processes_are_found_by_their_mark_and_end() -> None:
    marker = "KVFLEET_TESTHOST_HOST=/somewhere/node1"
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, "KVFLEET_TESTHOST_HOST": "/somewhere/node1"})
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, "KVFLEET_TESTHOST_HOST": "/somewhere/node11"})
    try:
        assert tools.wait_until(lambda: tools.processes_with(marker) == [child.pid], 5)

        def left() -> list[int]:
            child.poll()
            return tools.processes_with(marker)

        assert tools.kill_all(left, 5)
        assert child.wait(5) == -9
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        child.kill()
        child.wait()


def test_locks_are_exclusive_and_end_with_the_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    script = (
        f"import sys; sys.path.insert(0, {str(SCRIPTS / 'testhost.d')!r})\n"
        "from pathlib import Path; from testhost import tools\n"
        f"with tools.locked(Path({str(path)!r}), 'it'):\n    print('in', flush=True); sys.stdin.read()\n"
    )
    argv = [sys.executable, "-c", script]
    first = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    assert first.stdout.readline() == "in\n"
    second = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert second.stderr is not None
    assert "waiting for another run" in second.stderr.readline()
    assert second.stdout is not None
    assert select.select([second.stdout], [], [], 0.5)[0] == []
    first.kill()
    first.wait()
    assert second.stdout.readline() == "in\n"
    second.communicate("")
    assert second.returncode == 0


# ---------------------------------------------------------------- lifecycle and command line
def test_a_free_port_is_free_and_below_the_ephemeral_ones() -> None:
    port = lifecycle.free_port()
    assert 20000 <= port < 30000
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert not lifecycle.port_is_free(port)
    assert lifecycle.port_is_free(port)


def up(**changes: object) -> state.Host:
    values: dict[str, object] = {
        "backend": "nspawn",
        "disks": 2,
        "size_bytes": 2**32,
        "port": None,
        "system_disk": None,
        "memory_mib": None,
        "reuse": False,
        "install": False,
    }
    return lifecycle.up("node1", **{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def existing(monkeypatch: pytest.MonkeyPatch) -> state.Host:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(lifecycle, "is_running", lambda _host: True)
    done = subprocess.CompletedProcess(["ssh"], 0, "", "")
    monkeypatch.setattr(lifecycle, "ssh", lambda _host, _command: done)
    host = make_host(ready=True)
    host.save()
    return host


def test_an_existing_host_is_not_replaced(existing: state.Host) -> None:
    with pytest.raises(tools.TesthostError, match="node1 is running already: add --reuse"):
        up()
    assert state.load_host("node1") == existing


def test_reuse_leaves_a_running_host_alone(existing: state.Host, capsys: pytest.CaptureFixture[str]) -> None:
    assert up(reuse=True) == existing
    assert "nothing to do" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change", [{"disks": 3}, {"size_bytes": 2**31}, {"system_disk": False}, {"backend": "qemu"}, {"port": 22002}]
)
def test_reuse_with_other_disks_is_refused(existing: state.Host, change: dict[str, object]) -> None:
    with pytest.raises(tools.TesthostError, match="another backend, port, memory or other disks"):
        up(reuse=True, **change)


def test_reuse_accepts_the_same_port(existing: state.Host) -> None:
    assert up(reuse=True, port=22001) == existing


def test_a_network_without_its_host_is_not_a_running_host(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {11: "slirp4netns"}
    monkeypatch.setattr(lifecycle, "processes_with", lambda _mark: list(names))
    monkeypatch.setattr(lifecycle, "process_name", names.__getitem__)
    assert not lifecycle.is_running(make_host())
    names[12] = "systemd-nspawn"
    assert lifecycle.is_running(make_host())


def test_reuse_starts_a_stopped_host_again(existing: state.Host, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(lifecycle, "is_running", lambda _host: False)
    monkeypatch.setattr(lifecycle, "stop", lambda _host: calls.append("stop"))
    monkeypatch.setattr(lifecycle, "start", lambda _host: calls.append("start"))
    assert up(reuse=True).name == existing.name
    # what a crash left is given back first
    assert calls == ["stop", "start"]


def test_a_half_made_host_is_removed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    removed: list[str] = []
    monkeypatch.setattr(lifecycle, "remove", removed.append)

    def stop_here(_backend: str, *, install: bool) -> None:
        raise tools.TesthostError(f"enough {install}")

    monkeypatch.setattr(lifecycle, "need_packages", stop_here)
    make_host(ready=False).save()
    with pytest.raises(tools.TesthostError, match="enough"):
        up()
    assert removed == ["node1"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_mib": 4096}, "--memory is for --backend qemu"),
        ({"port": 70000}, "--port 70000 is not a port"),
        ({"disks": 9}, "--disks 9"),
        ({"disks": 1, "system_disk": True}, "--system-disk needs"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_made(
    change: dict[str, object], message: str, folders: Path
) -> None:
    with pytest.raises(tools.TesthostError, match=message):
        up(**change)
    assert not (folders / "state").exists()


def test_a_taken_port_is_refused(monkeypatch: pytest.MonkeyPatch, folders: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(tools.TesthostError, match="is taken on this machine"):
            up(port=taken.getsockname()[1])
    assert state.load_host("node1") is None


def test_containers_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    # nothing is ever started from here
    monkeypatch.setattr(lifecycle, "build_image", lambda _backend: pytest.fail("went on without root"))
    with pytest.raises(tools.TesthostError, match="needs root"):
        up()


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["frobnicate"],
        ["up"],
        ["up", "a", "--disks", "many"],
        ["up", "a", "--backend", "podman"],
        ["up", "a", "b"],
        ["down"],
        ["list", "a"],
        ["up", "a", "--reus"],
        ["_frobnicate"],
    ],
)
def test_wrong_usage_is_one_sentence(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 64
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_refusal_is_one_sentence_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ssh-config", "node1"]) == 1
    assert cli.main(["up", "NODE"]) == 1
    assert cli.main(["up", "node1", "--size", "4"]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 3
    assert all(line.startswith("testhost: ") for line in lines)


def test_removing_nothing_is_fine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["down", "node1"]) == 0
    assert "nothing to do" in capsys.readouterr().err


def test_list_as_json_holds_what_a_script_needs(existing: state.Host, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown["state"] == "running"
    assert shown["port"] == 22001
    assert shown["known_hosts"] == str(existing.known_hosts)
    assert [(disk["role"], disk["serial"]) for disk in shown["disks"]] == [
        ("system", "THNODE101"),
        ("cache", "THNODE102"),
    ]
    assert shown["disks"][1]["by_id"] == "/dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_THNODE102"


def test_doctor_names_each_missing_thing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli, "missing_packages", lambda backend: ["slirp4netns"] if backend == "nspawn" else [])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "apt-get install --no-install-recommends slirp4netns" in out
    assert "needs root" in out


def test_the_script_runs_from_anywhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(SCRIPTS / "testhost"), "list", "--json"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == []
