"""Clients that misbehave, and what is on the host while all is well: sockets, modes, the key, the units' exposure."""

import pytest
from failing import ENGINE, KEY, SERVER, tool

pytestmark = pytest.mark.root


def status_of(host, body, key=KEY):
    """HTTP status of one completion."""
    return host.completion(8000, {"model": "tiny", "prompt": "x", "max_tokens": 1, **body}, key)


def test_bad_salt_and_oversized_prompt(ready, record):
    engine = ready.pid(ENGINE)
    ready.begin()
    injected = ready.now()
    salt = [status_of(ready, {"cache_salt": bad}) for bad in ("a@b", "../../etc", "s" * 200)]
    long = status_of(ready, {"prompt": [300] * 5000})
    outcome = ready.end(injected)
    assert salt == [400, 400, 400]
    assert long == 400
    assert ready.pid(ENGINE) == engine
    assert outcome.lost == 0
    record("bad `cache_salt`, prompt longer than the model allows", outcome, "refused with 400, the engine goes on", 5)


def test_a_thousand_aborted_connections(ready, record):
    engine = ready.pid(ENGINE)
    abort = """
import json, socket
body = json.dumps({"model": "tiny", "prompt": [400] * 300, "max_tokens": 64, "stream": True}).encode()
lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Authorization: Bearer KEY", "Content-Type: application/json"]
head = "".join(line + "\\r\\n" for line in [*lines, f"Content-Length: {len(body)}", ""]).encode()
for number in range(1000):
    with socket.create_connection(("127.0.0.1", 8000), timeout=30) as connection:
        connection.sendall(head + (body if number % 2 else body[:20]))
""".replace("KEY", KEY)
    ready.begin()
    injected = ready.now()
    ready.sh(f"python3 - <<'END'\n{abort}END")
    ready.wait("well", ready.well)
    outcome = ready.end(injected)
    assert ready.pid(ENGINE) == engine
    assert outcome.lost == 0
    descriptors = int(ready.sh(f"ls /proc/{engine}/fd | wc -l"))
    assert descriptors < 300
    record("1000 aborted connections", outcome, "each aborted request is dropped; file descriptors come back", 30)


def test_exposure_is_printed_and_low(ready, capsys):
    for unit in (SERVER, ENGINE, "kvfleet-watch.service"):
        done = tool("ssh", "failures", f"systemd-analyze security --no-pager {unit} | tail -1")
        with capsys.disabled():
            print(done.stdout.strip())
        exposure = float(done.stdout.split(": ")[1].split()[0])
        assert exposure <= 3.0


def test_key_is_nowhere_but_where_it_belongs(ready):
    assert status_of(ready, {}) == 200
    assert status_of(ready, {}, "") == 401
    assert status_of(ready, {}, "wrong") == 401
    # a pattern that its own command line does not match
    pattern = f"'canary-[5]{KEY.removeprefix('canary-5')}'"
    assert ready.sh(f"grep -la {pattern} /proc/[0-9]*/cmdline 2>/dev/null; true") == ""
    assert KEY not in ready.sh(f"systemctl show {ENGINE} {SERVER} kvfleet-watch.service")
    assert ready.sh(f"journalctl --no-pager | grep -c {pattern}; true").strip() == "0"
    places = "/etc /opt/kvfleet/libexec /var/lib/kvfleet /var/lib/kvfleet-watch /run/kvfleet /run/kvfleet-watch"
    found = ready.sh(f"grep -rl {pattern} {places} 2>/dev/null; true").split()
    assert found == ["/etc/kvfleet/credentials/api_key"]
    assert ready.sh("stat -c '%a %U' /etc/kvfleet/credentials/api_key").split() == ["600", "root"]


def test_nothing_of_ours_is_for_everybody(ready):
    """Another user can write nothing of ours, and read neither settings nor state nor cache."""
    private = "/etc/kvfleet /var/lib/kvfleet /var/cache/kvfleet/data /run/kvfleet-watch /var/lib/kvfleet-watch"
    reachable = f"find {private} /opt/kvfleet /run/kvfleet -writable ! -type l 2>/dev/null; true"
    assert ready.sh(f"cd /; runuser -u nobody -- {reachable}") == ""
    for folder in private.split():
        assert ready.sh(f"runuser -u nobody -- ls {folder} 2>&1; true").strip().endswith("Permission denied"), folder


def test_leftovers_of_a_killed_run_go_and_those_of_others_stay(ready):
    make = """
import mmap, os, time
for name in ("psm_left", "psm_mapped"):
    with open(f"/dev/shm/{name}", "wb") as file:
        file.write(b"x" * 4096)
with open("/dev/shm/psm_mapped", "r+b") as file:
    kept = mmap.mmap(file.fileno(), 4096)
time.sleep(600)
"""
    ready.sh(f"cat > /tmp/make.py <<'END'\n{make}END\nchmod 644 /tmp/make.py")
    ready.sh(
        "nohup setpriv --reuid kvfleet --regid kvfleet --clear-groups python3 /tmp/make.py"
        " </dev/null >/dev/null 2>&1 & echo $! > /root/maker"
    )
    ready.sh("echo root > /dev/shm/psm_root; sleep 7")
    try:
        ready.sh(f"systemctl restart {ENGINE}")
        ready.wait("well", ready.well)
        left = ready.sh("ls /dev/shm").split()
        assert "psm_left" not in left
        assert {"psm_mapped", "psm_root"} <= set(left)
    finally:
        ready.sh("kill $(cat /root/maker); rm -f /dev/shm/psm_mapped /dev/shm/psm_root")


def test_listeners_are_those_of_the_plan(ready):
    """``ss`` shows the planned sockets on loopback, and nothing of ours that another host could reach."""
    lines = ready.sh("ss -Hltnp").splitlines()
    ours = [line.split() for line in lines if any(name in line for name in ("vllm", "VLLM", "lmcache", "python"))]
    addresses = {words[3] for words in ours}
    assert {"127.0.0.1:8000", "127.0.0.1:5555", "127.0.0.1:8080"} <= addresses
    assert all(address.startswith(("127.", "[::1]")) for address in addresses)
