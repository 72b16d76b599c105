"""A rolling change under constant requests, and what all runs so far left behind."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest
from balancer import Balancer
from fleet_hosts import ROOT, ssh
from serving_fleet import FOLDER, HOSTS, SECRETS, ServingFleet, verdicts

from kvfleet import fleet

pytestmark = pytest.mark.root


def test_a_rolling_change_loses_no_request(three: ServingFleet) -> None:
    before = three.all_seen()
    seqs = three.change()
    with Balancer(HOSTS, three.certificate, SECRETS["key"].read_text()) as balancer:
        done = three.run(fleet.Action.DEPLOY)
        # at least one round after the last host is back
        balancer.wait_until_all_serve()
    assert done.exit == 0
    assert verdicts(done) == dict.fromkeys(HOSTS, "proved")
    failed = [request for request in balancer.requests if request.error]
    assert failed == []
    after = three.all_seen()
    windows = {}
    for name in HOSTS:
        assert after[name]["seqs"] == seqs
        assert after[name]["start"] != before[name]["start"], "every host has to be restarted, or nothing was shown"
        ((begin, end),) = balancer.out_of_traffic(name)
        windows[name] = (begin, end)
        own = [request for request in balancer.requests if request.host == name]
        assert min(request.begin for request in own) < begin
        assert max(request.begin for request in own) > end
        print(f"{name}: out of traffic {end - begin:.0f} s, {len(own)} requests")
    # one host at a time, so that two of three always serve
    spans = sorted(windows.values())
    assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(spans))


def found_on_the_host(name: str, secret: str) -> list[str]:
    """Every file of the host, journal, environments and command lines included, that holds the secret."""
    places = "/etc /opt /var /run /root /home /tmp /usr/local /data /dev/shm"
    text = ssh(
        name,
        f"grep -rlIaF -s --exclude-dir=site-packages --devices=skip -e {secret} {places};"
        f"journalctl -o export --no-pager | grep -qaF -e {secret} && echo journal;"
        "for file in /proc/[0-9]*/cmdline /proc/[0-9]*/environ; do"
        # grep's own command line and the shell's hold it
        f'  [ -r $file ] && grep -qaF -e {secret} $file && ! grep -qaF -e "grep -rl" -e "--devices=skip" $file'
        "   && echo $file; done; true",
    )
    return [line for line in text.splitlines() if "/proc/" not in line or "/proc/self" not in line]


def test_no_secret_stands_where_it_does_not_belong(three: ServingFleet) -> None:
    # what the controller keeps of all runs: results, events, Ansible's text, plans, reports, support bundles, facts
    temporary = [path for name in ("ansible", "kvfleet", "tmp") for path in Path("/tmp").glob(f"{name}*")]
    places = [FOLDER, ROOT / "results", ROOT / ".cache", Path("/dev/shm"), Path.home() / ".ansible", *temporary]
    bundles = sorted(three.runs.glob("*/support-*.tar.gz"))
    for what, file in SECRETS.items():
        secret = file.read_text().strip()
        found = subprocess.run(
            ["grep", "-rlaF", "-s", "--devices=skip", "--exclude-dir=pytest-of-root", "-e", secret,
             *map(str, filter(Path.exists, places))],
            capture_output=True, text=True, check=False,
        ).stdout.splitlines()  # fmt: skip
        assert found == [str(file)]
        for bundle in bundles:
            text = subprocess.run(["tar", "-xzOf", bundle], capture_output=True, check=True).stdout
            assert secret.encode() not in text
        for name in HOSTS:
            found_there = found_on_the_host(name, secret)
            if what == "key":
                # systemd's copies in memory for the units, and the engine's own environment, where vLLM takes it from
                user = ssh(name, "ps -u kvfleet -o pid=").split()
                units = [path for path in found_there if path.startswith("/run/credentials/kvfleet-")]
                assert {path.rsplit("/", 1)[1] for path in units} == {"api_key"}
                own = [path for path in found_there if path in [f"/proc/{pid}/environ" for pid in user]]
                found_there = sorted(set(found_there) - {*units, *own})
            assert found_there == (["/etc/kvfleet/credentials/api_key"] if what == "key" else [])
