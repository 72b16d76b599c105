"""The host itself: a reboot, a boot without the cache disk, a clock that jumps, shared memory that is full."""

import shlex
import subprocess
import time

import pytest
from failing import ENGINE, HERE, HOST, SERVER, Outcome, tool

pytestmark = pytest.mark.root

ALERT = f"/var/lib/kvfleet-watch/alerts/{SERVER}.json"
ANSWERS = "python3 /root/client.py expect /tmp/again.json && cmp /tmp/again.json /root/expect.json"


def answers(host):
    """Whether every prompt gets its right answer now."""
    return host.sh(f"({ANSWERS}) >/dev/null 2>&1 && echo right", check=False).strip() == "right"


def test_reboot(ready, record):
    began = time.monotonic()
    tool("reboot", HOST)
    ready.wait("right answers after the boot", lambda: answers(ready))
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
        ready.wait("the alert", lambda: ready.sh(f"cat {ALERT}", check=False) != "")
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
    ready.wait("right answers with the disk", lambda: answers(ready))
    seconds = round(time.monotonic() - began, 1)
    ready.wait("well and no alert", lambda: ready.well() and ready.sh(f"ls {ALERT}", check=False) == "")
    record(
        "disk missing at boot", Outcome(0, 0, 0, 0, seconds),
        f"the host boots, the services stay down rather than fill the root file system; status: {said}; by hand: bring"
        " the disk back, or deploy with `kvfleet_profile: cpu`; the figure is the boot with the disk", 90,
    )  # fmt: skip


@pytest.fixture(scope="module")
def clock(host, tmp_path_factory):
    """A library on the host that makes whoever loads it see another time of day; returns its path."""
    library = tmp_path_factory.mktemp("clock") / "clock_jump.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, HERE / "clock_jump.c", "-ldl"], check=True)
    with library.open("rb") as content:
        tool("ssh", HOST, "cat > /usr/local/lib/clock_jump.so", stdin=content)
    return "/usr/local/lib/clock_jump.so"


def test_clock_jumps(clock, ready, record):
    """Only the services' own clocks jump: a day forward, then two days back; the machine's clock is never set."""
    offset = "/run/kvfleet-clock"
    lines = ["[Service]", f"Environment=LD_PRELOAD={clock}", f"Environment=CLOCK_OFFSET_FILE={offset}"]
    folders = [f"/run/systemd/system/{unit}.d" for unit in (SERVER, ENGINE)]

    def jump(seconds):
        # in place: the services have the file mapped
        write = f"open('{offset}', 'r+b').write(int({seconds}).to_bytes(8, 'little', signed=True))"
        ready.sh(f'test -e {offset} || head -c 8 /dev/zero > {offset}; python3 -c "{write}"')

    jump(0)
    for folder in folders:
        ready.sh(f"mkdir -p {folder}; printf '%s\\n' {shlex.join(lines)} > {folder}/clock.conf")
    try:
        ready.sh(f"systemctl daemon-reload; systemctl restart {SERVER} {ENGINE}")
        ready.wait("well with a clock of their own", ready.well)
        pids = [ready.pid(SERVER), ready.pid(ENGINE)]
        ready.begin()
        injected = ready.now()
        for seconds in (86400, -86400):
            jump(seconds)
            ready.sh("sleep 15")
            ready.wait(f"well after {seconds}", ready.well)
        outcome = ready.end(injected)
        assert [ready.pid(SERVER), ready.pid(ENGINE)] == pids
        # each process writes its own date, so its clock did jump
        yesterday = ready.sh("date -d yesterday +%m-%d").strip()
        for unit in (SERVER, ENGINE):
            assert f"{yesterday} " in ready.sh(f"journalctl -u {unit} -n 100 -o cat --no-pager")
    finally:
        ready.sh(f"rm -rf {' '.join(folders)}; systemctl daemon-reload; systemctl restart {SERVER} {ENGINE}")
        ready.sh(f"rm -f {offset}")
        ready.wait("well with the machine's clock", ready.well)
    assert outcome.lost == outcome.refused == 0
    record(
        "clock of the services jumps a day forward, then two days back",
        outcome,
        "nothing restarts, nothing is lost",
        30,
    )


@pytest.fixture
def small_shared_memory(host):
    """``/dev/shm`` of 2 GiB."""
    size = host.sh("findmnt -no SIZE --bytes /dev/shm").strip()
    host.sh("mount -o remount,size=2G /dev/shm")
    yield
    host.sh(f"rm -f /dev/shm/filler; mount -o remount,size={size} /dev/shm")


def test_shared_memory_is_full(small_shared_memory, ready, record):
    ready.sh(f"systemctl restart {SERVER} {ENGINE}")
    ready.wait("well in 2 GiB", ready.well)
    server, engine = ready.pid(SERVER), ready.pid(ENGINE)
    ready.begin()
    ready.sh("dd if=/dev/zero of=/dev/shm/filler bs=1M 2>/dev/null; sleep 10")
    assert "100%" in ready.sh("df /dev/shm")
    freed = ready.now()
    ready.sh("rm /dev/shm/filler")
    ready.wait("well", ready.well)
    outcome = ready.end(freed)
    # all of the buffer was reserved at its start
    assert ready.pid(SERVER) == server
    # seen both ways: it dies when it touches a page that it had not touched before
    seen = "goes on" if ready.pid(ENGINE) == engine else "dies (SIGBUS) and starts again when there is room"
    record(
        "`/dev/shm` of 2 GiB full while serving", outcome,
        f"the LMCache server goes on, its buffer is reserved; the instance {seen}; the figure counts from there on", 60,
    )  # fmt: skip
