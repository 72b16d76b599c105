"""Stops and starts: in order, drained, and given up with an alert where a start cannot succeed."""

import json

import pytest
from failing import ENGINE, Outcome

pytestmark = pytest.mark.root


def test_restart_of_everything(ready, record):
    ready.begin()
    injected = ready.now()
    ready.sh("systemctl restart kvfleet.target")
    ready.wait("both back", ready.well)
    record(
        "restart of everything (`systemctl restart kvfleet.target`)",
        ready.end(injected),
        "server first, then the instance",
        90,
    )


def test_stop_under_load_drains(ready, record):
    """Requests that were accepted are answered; those after the stop are refused."""
    ready.begin()
    injected = ready.now()
    ready.sh(f"systemctl stop {ENGINE}")
    seconds = ready.now() - injected
    ready.sh(f"systemctl start {ENGINE}")
    ready.wait("back", ready.well)
    outcome = ready.end(injected)
    assert seconds < 60
    cut = [error for error in outcome.errors if "refused" not in error]
    record(
        "stop under load, then start", outcome,
        f"the stop took {seconds:.0f} s; errors of running requests: {', '.join(cut) or 'none, all were answered'}",
    )  # fmt: skip


def test_port_taken_at_start(ready, record):
    ready.sh(f"systemctl stop {ENGINE}")
    squat = "nohup python3 -m http.server 8000 --bind 127.0.0.1 </dev/null >/dev/null 2>&1 &"
    ready.sh(f"{squat} echo $! > /root/squatter; sleep 1")
    ready.sh(f"systemctl start --no-block {ENGINE}")
    ready.wait("the start fails", lambda: int(ready.show(ENGINE, "NRestarts")) >= 1)
    text = ready.sh(f"journalctl -u {ENGINE} -n 200 -o cat")
    assert "Address already in use" in text
    ready.sh("kill $(cat /root/squatter)")
    injected = ready.now()
    ready.wait("back without a hand", ready.well)
    seconds = round(ready.now() - injected, 1)
    record(
        "port taken at start",
        Outcome(0, 0, 0, 0, seconds),
        "each start fails with 'Address already in use'; served once it is free",
        90,
    )


def test_journal_down(ready, record):
    engine = ready.pid(ENGINE)
    ready.begin()
    injected = ready.now()
    sockets = "systemd-journald.socket systemd-journald-dev-log.socket systemd-journald-audit.socket"
    journal = f"{sockets} systemd-journald.service"
    ready.sh(f"systemctl stop {journal} 2>/dev/null; sleep 15; systemctl start {journal}", check=False)
    ready.wait("well", ready.well)
    outcome = ready.end(injected)
    seen = "kept running" if ready.pid(ENGINE) == engine else "was restarted"
    record("journald down for 15 s", outcome, f"the instance {seen}; what it logs is lost until its next start")


def test_start_limit_ends_a_restart_loop_with_an_alert(ready):
    """A unit that dies again and again stays down, and an alert file says so."""
    folder = f"/run/systemd/system/{ENGINE}.d"
    alert = f"/var/lib/kvfleet-watch/alerts/{ENGINE}.json"
    lines = ["[Unit]", "StartLimitBurst=2", "[Service]", "RestartSec=1", "ExecStartPre=/bin/false"]
    ready.sh(f"mkdir -p {folder}; printf '%s\\n' {' '.join(lines)} > {folder}/loop.conf; systemctl daemon-reload")
    try:
        ready.sh(f"systemctl kill -s KILL {ENGINE}")
        ready.wait("systemd gives up", lambda: ready.show(ENGINE, "ActiveState") == "failed")
        ready.wait("the alert", lambda: ready.sh(f"ls {alert}", check=False) != "")
        said = json.loads(ready.sh(f"cat {alert}"))
        assert said["state"] == "failed"
        assert "reset-failed" in said["fix"]
    finally:
        ready.sh(f"rm -r {folder}; systemctl daemon-reload; systemctl reset-failed {ENGINE}; systemctl start {ENGINE}")
    ready.wait("well", ready.well)
    ready.wait("the alert goes", lambda: ready.sh(f"ls {alert}", check=False) == "")
