"""The host itself: a reboot, a boot without the cache disk, a clock that jumps, shared memory that is full."""

import time

import pytest
from failing import ENGINE, HOST, SERVER, Outcome, tool

pytestmark = pytest.mark.root

ALERT = f"/var/lib/kvfleet-watch/alerts/{SERVER}.json"
ANSWERS = "python3 /root/client.py expect /tmp/again.json && cmp /tmp/again.json /root/expect.json"


def answers(host):
    """Whether every prompt gets its right answer now."""
    return host.sh(f"({ANSWERS}) >/dev/null 2>&1 && echo right", check=False).strip() == "right"


def test_reboot(ready, record):
    began = time.monotonic()
    tool("reboot", HOST)
    ready.wait("right answers after the boot", lambda: answers(ready), 180)
    seconds = round(time.monotonic() - began, 1)
    ready.wait("well", ready.well)
    record(
        "host reboot", Outcome(0, 0, 0, 0, seconds),
        "everything starts by itself in order; the figure counts from the command to the right answers", 90,
    )  # fmt: skip


def test_disk_is_missing_at_boot(ready, record):
    tool("unplug", HOST)
    try:
        tool("reboot", HOST)
        ready.wait("the alert", lambda: ready.sh(f"cat {ALERT}", check=False) != "", 120)
        alert = ready.sh(f"cat {ALERT}")
        assert "var-cache-kvfleet.mount" in alert
        assert ready.sh(f"systemctl is-active {SERVER} {ENGINE}", check=False).split() == ["inactive"] * 2
        said = ready.degraded(SERVER, "var-cache-kvfleet.mount")
        # nothing was started on the bare directory, so nothing lies there
        assert ready.harm()["below the mount point"] == []
    finally:
        tool("plug", HOST)
    began = time.monotonic()
    tool("reboot", HOST)
    ready.wait("right answers with the disk", lambda: answers(ready), 180)
    seconds = round(time.monotonic() - began, 1)
    ready.wait("well and no alert", lambda: ready.well() and ready.sh(f"ls {ALERT}", check=False) == "")
    record(
        "disk missing at boot", Outcome(0, 0, 0, 0, seconds),
        f"the host boots, the services stay down rather than fill the root file system; status: {said}; by hand: bring"
        " the disk back, or deploy with `kvfleet_profile: cpu`; the figure is the boot with the disk", 90,
    )  # fmt: skip


@pytest.fixture(scope="module")
def faketime(host):
    """The library that lies about the time to whom is told to load it."""
    host.sh(
        "apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends libfaketime"
    )
    return host.sh("ls /usr/lib/*/faketime/libfaketimeMT.so.1").strip()


def test_clock_jumps(faketime, ready, record):
    """Only the services' own clocks jump: a day forward, then two days back; the machine's clock is never set."""
    now = "/run/kvfleet-clock"
    lines = [
        f"LD_PRELOAD={faketime}",
        f"FAKETIME_TIMESTAMP_FILE={now}",
        "FAKETIME_CACHE_DURATION=1",
        "FAKETIME_DONT_RESET=1",
        "FAKETIME_DONT_FAKE_MONOTONIC=1",
    ]
    text = "\n".join(["[Service]", *(f"Environment={line}" for line in lines)])
    folders = [f"/run/systemd/system/{unit}.d" for unit in (SERVER, ENGINE)]
    ready.sh(f"echo +0 > {now}")
    for folder in folders:
        ready.sh(f"mkdir -p {folder}; printf '%s\n' '{text}' > {folder}/clock.conf")
    try:
        ready.sh(f"systemctl daemon-reload; systemctl restart {SERVER} {ENGINE}")
        ready.wait("well with a clock of their own", ready.well)
        pids = [ready.pid(SERVER), ready.pid(ENGINE)]
        logged = f"journalctl -u {ENGINE} -n 40 -o cat --no-pager"
        ready.begin()
        injected = ready.now()
        for jump in ("+1d", "-1d"):
            ready.sh(f"echo {jump} > {now}; sleep 15")
            ready.wait(f"well after {jump}", ready.well)
        outcome = ready.end(injected)
        assert [ready.pid(SERVER), ready.pid(ENGINE)] == pids
        # the engine writes the date of its own clock, so it did jump
        yesterday = ready.sh("date -d yesterday +%m-%d").strip()
        assert f" {yesterday} " in ready.sh(logged)
    finally:
        ready.sh(f"rm -rf {' '.join(folders)} {now}; systemctl daemon-reload; systemctl restart {SERVER} {ENGINE}")
        ready.wait("well with the machine's clock", ready.well)
    record("clock of the services jumps a day forward, then two days back", outcome, "nothing restarts", 10)


@pytest.fixture
def small_shared_memory(host):
    """``/dev/shm`` of 2 GiB."""
    size = host.sh("findmnt -no SIZE --bytes /dev/shm").strip()
    host.sh("mount -o remount,size=2G /dev/shm")
    yield
    host.sh(f"rm -f /dev/shm/filler; mount -o remount,size={size} /dev/shm")


def test_shared_memory_is_full(small_shared_memory, ready, record):
    engine = ready.pid(ENGINE)
    ready.sh(f"systemctl restart {SERVER} {ENGINE}")
    ready.wait("well in 2 GiB", ready.well)
    engine = ready.pid(ENGINE)
    ready.begin()
    injected = ready.now()
    ready.sh("dd if=/dev/zero of=/dev/shm/filler bs=1M 2>/dev/null; true")
    ready.sh("sleep 15; df -h /dev/shm; ls -la /dev/shm")
    ready.sh("rm /dev/shm/filler")
    ready.wait("well", ready.well)
    outcome = ready.end(injected)
    seen = "kept running" if ready.pid(ENGINE) == engine else "was restarted"
    record("`/dev/shm` of 2 GiB full while serving", outcome, f"the instance {seen}")
