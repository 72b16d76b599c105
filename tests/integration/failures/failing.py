"""The host that the rows break, and what its clients saw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
TESTHOST = ROOT / "scripts" / "testhost"
HOST = "failures"
#: both services start within this on a quiet machine; what a start takes longer is the machine's, not the row's
START_S = 25
ENGINE = "kvfleet-vllm@tiny.service"
SERVER = "kvfleet-lmcache@0.service"
KEY = "canary-5f2c9b41d7e84a06"
MOUNT = "/var/cache/kvfleet"
DATA = f"{MOUNT}/data"
RECORD = ROOT / "docs" / "failures.json"

#: prints the HTTP status of one completion; 0 when nobody answers
ASK = """
import json, sys, urllib.error, urllib.request
port, body, key = sys.argv[1], sys.argv[2], sys.argv[3]
headers = {"Content-Type": "application/json", **({"Authorization": "Bearer " + key} if key else {})}
request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body.encode(), headers)
try:
    print(urllib.request.urlopen(request, timeout=60).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError:
    print(0)
"""
#: empties the tier in RAM
CLEAR = "import urllib.request as u; u.urlopen(u.Request('http://127.0.0.1:8080/cache/clear', method='POST'))"
#: prints how many tokens the disk tier has served
HITS = (
    "import urllib.request as u; print(int(sum(float(l.rsplit(' ', 1)[1]) for l in"
    " u.urlopen('http://127.0.0.1:8080/metrics').read().decode().splitlines()"
    " if l.startswith('lmcache_mp_lookup_hit_l2_tokens_total'))))"
)


def tool(*words: str, check: bool = True, **options: object) -> subprocess.CompletedProcess[str]:
    """The test host's own command."""
    return subprocess.run([str(TESTHOST), *words], text=True, capture_output=True, check=check, **options)  # type: ignore[call-overload,no-any-return]


@dataclass
class Outcome:
    """What clients saw around one injection."""

    requests: int
    #: requests that were accepted and ended in an error
    lost: int
    #: attempts that found nobody listening
    refused: int
    wrong: int
    recovery_s: float
    errors: list[str] = field(default_factory=list)


class Host:
    """The host under test; ``inventory`` is the folder that describes it to Ansible."""

    def __init__(self, inventory: Path) -> None:
        self.inventory = inventory
        #: the starts that served before the row
        self.before: dict[str, tuple[str, float]] = {}

    def play(self, playbook: str, check: bool = True, **variables: object) -> str:
        """The output of a playbook on the host."""
        done = subprocess.run(
            [Path(sys.executable).parent / "ansible-playbook", "-i", self.inventory, "-e", json.dumps(variables),
             ROOT / playbook],
            cwd=ROOT, env=dict(os.environ, ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"), ANSIBLE_NOCOLOR="1"),
            text=True, capture_output=True, check=False, timeout=1500,
        )  # fmt: skip
        assert not check or done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        return done.stdout

    def sh(self, command: str, check: bool = True) -> str:
        """Output of a shell command on the host, as root."""
        done = tool("ssh", HOST, command, check=False, timeout=540)
        if check and done.returncode:
            raise AssertionError(f"{command!r} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def completion(self, port: int, body: dict[str, object], key: str = KEY) -> int:
        """HTTP status of one completion; 0 when nobody answers."""
        self.sh(f"cat > /root/ask.py <<'END'\n{ASK}END")
        return int(self.sh(f"python3 /root/ask.py {port} '{json.dumps(body)}' '{key}'"))

    def show(self, unit: str, name: str) -> str:
        """One property of a unit."""
        return self.sh(f"systemctl show {unit} -p {name} --value").strip()

    def pid(self, unit: str, pattern: str = "") -> int:
        """The main process of a unit, or the one of its processes whose name matches ``pattern``."""
        if not pattern:
            return int(self.show(unit, "MainPID"))
        found = self.sh(
            f"for p in $(grep -l '{unit}' /proc/[0-9]*/cgroup 2>/dev/null | cut -d/ -f3); do"
            f" grep -q '{pattern}' /proc/$p/comm && echo $p; done; true"
        ).split()
        assert found, f"{unit} has no process {pattern}"
        return int(found[0])

    def health(self, unit: str) -> dict[str, object]:
        """What the watcher says of a unit."""
        text = self.sh("cat /run/kvfleet-watch/health.json", check=False)
        entries = json.loads(text)["units"] if text else []
        return next((entry for entry in entries if entry["unit"] == unit), {})

    def wait(self, what: str, ask: Callable[[], bool], limit_s: float = 300) -> float:
        """Seconds until ``ask()`` is true."""
        began = time.monotonic()
        while time.monotonic() - began < limit_s:
            if ask():
                return time.monotonic() - began
            time.sleep(1)
        raise AssertionError(f"{what}: not within {limit_s} s\n{self.journal()}")

    def journal(self) -> str:
        """The last lines of our units."""
        return self.sh("journalctl -u 'kvfleet-*' -n 60 -o short-iso --no-pager", check=False)

    def well(self) -> bool:
        """Whether both units are active and the watcher, in a look after now, finds both well."""
        return self.sh(f"systemctl is-active {SERVER} {ENGINE}", check=False).split() == ["active", "active"] and all(
            self.health(unit).get("state") == "ok" for unit in (SERVER, ENGINE)
        )

    def begin(self, seconds: float = 1200) -> None:
        """Start the load."""
        self.sh(
            "rm -f /root/load.jsonl*; nohup python3 /root/client.py load /root/expect.json"
            f" {seconds} /root/load.jsonl </dev/null >/root/load.out 2>&1 & sleep 3"
        )

    def end(self, injected: float, *, recovers: bool = True) -> Outcome:
        """Stop the load; count what was lost and wrong since ``injected`` (the host's clock).

        With ``recovers`` an answer has to follow the last error.
        """
        self.sh("touch /root/load.jsonl.stop; while test ! -e /root/load.jsonl.done; do sleep 0.2; done")
        lines = [json.loads(line) for line in self.sh("cat /root/load.jsonl").splitlines()]
        assert lines, "no request was answered"
        failed = [line for line in lines if line["error"]]
        after = [
            line["ended"] for line in lines if not line["error"] and failed and line["began"] >= failed[-1]["began"]
        ]
        assert after or not failed or not recovers, f"no answer after the last error: {failed[-1]}"
        recovery = min(after) - injected if after else 0.0
        slow = [line["ended"] - line["began"] for line in lines if not line["error"]]
        if not failed and slow:
            # nothing failed: what a client felt is the longest wait beyond a usual one
            recovery = max(0.0, max(slow) - sorted(slow)[len(slow) // 2])
        refused = sum("refused" in line["error"] for line in failed)
        return Outcome(
            len(lines) - refused, len(failed) - refused, refused, sum(line["wrong"] for line in lines),
            round(recovery, 1), sorted({line["error"] for line in failed}),
        )  # fmt: skip

    def status(self) -> list[dict[str, str]]:
        """What ``kvfleet status`` says of the host, item by item."""
        kvfleet = Path(sys.executable).parent / "kvfleet"
        done = subprocess.run(
            [kvfleet, "status", "-i", self.inventory, "--format", "json"],
            cwd=ROOT, text=True, capture_output=True, check=False, timeout=300,
        )  # fmt: skip
        try:
            host = json.loads(done.stdout)["hosts"][HOST]
            return [dict(item) for item in host["status"]["items"]]
        except (ValueError, KeyError, TypeError) as error:
            raise AssertionError(f"kvfleet status: {error!r}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}") from error

    def degraded(self, unit: str, words: str) -> str:
        """The reason that ``kvfleet status`` gives for ``unit``, which must hold ``words``."""
        found = [item for item in self.status() if item["area"] == "health" and item["name"] == unit]
        assert [item["state"] for item in found] == ["drift"], found
        assert words in found[0]["note"], found
        return f"{found[0]['found']}: {found[0]['note']}"

    def harm(self) -> dict[str, object]:
        """What no failure of a row may change: other services, and the root file system."""
        # under the mount point, seen without what is mounted on it; new namespaces go with their last process
        below = "unshare -m sh -c 'mount --bind / /mnt && find /mnt/var/cache/kvfleet -mindepth 1'"
        running = self.sh("systemctl list-units --type=service --state=running --plain --no-legend").splitlines()
        return {
            "other services": {
                line.split()[0] for line in running if not line.startswith(("kvfleet-", "user", "systemd-journald"))
            },
            "failed units": {
                line.split()[0] for line in self.sh("systemctl list-units --failed --plain --no-legend").splitlines()
            },
            "below the mount point": self.sh(below).split(),
            "bytes": int(self.sh("du -sxbc /etc /var/lib /var/cache /var/tmp /tmp /home | tail -1").split()[0]),
        }

    def started(self) -> dict[str, tuple[str, float]]:
        """For each unit the identity of its last start, and the seconds which that took until a token came back."""
        found = {}
        for unit in (SERVER, ENGINE):
            identity = self.show(unit, "InvocationID")
            first, ready = (
                int(self.show(unit, f"{name}TimestampMonotonic")) for name in ("InactiveExit", "ActiveEnter")
            )
            found[unit] = (identity, max(0, ready - first) / 1e6)
        return found

    def now(self) -> float:
        """The host's clock."""
        return float(self.sh("date +%s.%N"))


def fill(host: Host) -> None:
    """Bring every prompt to the disk tier and see that it is served from there; then nothing of it is in RAM."""

    def answers() -> None:
        host.sh("python3 /root/client.py expect /tmp/again.json && cmp /tmp/again.json /root/expect.json")

    def written() -> bool:
        # six prompts of two chunks; a file that still grows is not done
        sizes = f"find {DATA} -name '*.data' -printf '%s\\n' | sort"
        before, _, after = host.sh(f"{sizes}; echo then; sleep 1; {sizes}").partition("then\n")
        return before == after and len(after.split()) >= 12

    # a damaged file of an earlier row stays until the server starts again
    host.sh(f"systemctl restart {SERVER}")
    host.wait("both back", host.well)
    answers()
    host.wait("files on the disk tier", written)
    host.sh(f'sleep 2; python3 -c "{CLEAR}"')
    before = int(host.sh(f'python3 -c "{HITS}"'))
    answers()
    # six prompts of two chunks of 256 tokens
    host.wait("hits of the disk tier", lambda: int(host.sh(f'python3 -c "{HITS}"')) >= before + 6 * 512, 20)
    host.sh(f'sleep 2; python3 -c "{CLEAR}"')


def write_table(entries: dict[str, dict[str, object]]) -> None:
    """Put the rows into docs/failures.md."""
    lines = ["| what breaks | seen | lost | refused | wrong | back after |", "|---|---|---|---|---|---|"]
    for entry in sorted(entries.values(), key=lambda entry: str(entry["row"])):
        sent = f"{entry['lost']} of {entry['requests']}" if entry["requests"] else "no load"
        words = (entry["row"], entry["seen"], sent, entry["refused"], entry["wrong"], f"{entry['recovery_s']} s")
        lines.append(f"| {' | '.join(str(word) for word in words)} |")
    page = ROOT / "docs" / "failures.md"
    before, rest = page.read_text().split("<!-- table: written by the tests -->")
    after = rest.split("<!-- end of table -->")[1]
    table = "\n".join(lines)
    page.write_text(f"{before}<!-- table: written by the tests -->\n{table}\n<!-- end of table -->{after}")
