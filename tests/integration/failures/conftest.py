"""One throw-away host for all rows: deployed once, told to forget its start limits before each row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from failing import ENGINE, HERE, HOST, RECORD, ROOT, SERVER, START_S, Host, Outcome, tool, write_table


def describe(folder: Path) -> None:
    """The host as an inventory folder."""
    entry = tool("inventory", HOST).stdout
    (folder / "hosts.yml").write_text("all:\n  hosts:\n" + "".join(f"    {line}\n" for line in entry.splitlines()))
    (folder / "group_vars").mkdir()
    values = (HERE / "values.yml").read_text() + f"smoke_benchmark_results_dir: {folder.parent / 'results'}\n"
    (folder / "group_vars" / "all.yml").write_text(values)


def deploy(host: Host, cache: Path) -> None:
    """Bring model, wheels and services to the host."""
    model = cache / "models" / "tiny"
    subprocess.run([sys.executable, ROOT / "scripts" / "tinymodel", "--size", "tiny", model], check=True)
    with subprocess.Popen(["tar", "-C", model, "-cf", "-", "."], stdout=subprocess.PIPE) as archive:
        tool(
            "ssh", HOST, "mkdir -p /data/models/tiny && tar -C /data/models/tiny --no-same-owner -xf -",
            stdin=archive.stdout,
        )  # fmt: skip
    subprocess.run([Path(sys.executable).parent / "kvfleet", "bundle", "cpu-0.32.0-0.5.6"], check=True)
    host.play("site.yml")


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The host with both services up.

    KVFLEET_KEEP_HOST leaves it running, and KVFLEET_HOST_DEPLOYED then takes it as it is: for work on a row.
    """
    folder = tmp_path_factory.mktemp("inventory")
    cache = Path(os.environ.get("KVFLEET_CACHE") or Path.home() / ".cache" / "kvfleet")
    tool("up", HOST, "--reuse", "--size", "2G")
    try:
        describe(folder)
        found = Host(folder)
        if not os.environ.get("KVFLEET_HOST_DEPLOYED"):
            deploy(found, cache)
        with (HERE / "client.py").open() as client:
            tool("ssh", HOST, "cat > /root/client.py", stdin=client)
        found.sh("python3 /root/client.py expect /root/expect.json")
        yield found
        # nothing of ours ever wrote to the disk beside the cache disk
        assert "unchanged" in tool("verify-system-disk", HOST).stdout
    finally:
        if not os.environ.get("KVFLEET_KEEP_HOST"):
            tool("down", HOST)


@pytest.fixture
def ready(host: Host) -> Iterator[Host]:
    """The host, well, with its start limits forgotten: rows must not use up each other's.

    After the row nothing but the services themselves may be other than before.
    """
    host.sh(f"systemctl reset-failed {SERVER} {ENGINE}; systemctl start {SERVER} {ENGINE} kvfleet-watch.timer")
    host.wait("well before the row", host.well)
    before = host.harm()
    host.before = host.started()
    yield host
    after = host.harm()
    assert before["other services"] <= after["other services"], before["other services"] - after["other services"]
    assert after["failed units"] <= before["failed units"], after["failed units"]
    assert after["below the mount point"] == []
    grown = after["bytes"] - before["bytes"]
    assert abs(grown) < 64 * 2**20, f"the root file system changed by {grown} bytes"


@pytest.fixture
def record(request: pytest.FixtureRequest, ready: Host) -> Callable[..., None]:
    """Keep what a row showed, for docs/failures.md; ``limit_s`` holds for a machine with nothing else to do."""

    def keep(
        row: str, outcome: Outcome | None, seen: str, limit_s: float | None = 60, known_wrong: bool = False
    ) -> None:
        entries = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
        entries[request.node.name.removeprefix("test_")] = {
            "row": row,
            "seen": seen,
            "recovery_s": outcome.recovery_s if outcome else None,
            "requests": outcome.requests if outcome else None,
            "lost": outcome.lost if outcome else None,
            "refused": outcome.refused if outcome else None,
            "wrong": outcome.wrong if outcome else None,
            "errors": outcome.errors if outcome else [],
        }
        RECORD.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
        write_table(entries)
        if outcome:
            # a row may say openly that answers were wrong; no other may have any
            assert known_wrong or outcome.wrong == 0, f"{row}: {outcome.wrong} answers with wrong tokens"
            starts = sum(took for unit, (one, took) in ready.started().items() if one != ready.before[unit][0])
            slow = max(0.0, starts - START_S)
            assert limit_s is None or outcome.recovery_s <= limit_s + slow, (
                f"{row}: {outcome.recovery_s} s to recover, {starts:.0f} s of them for starts"
            )

    return keep
