"""The project's tests in named parts: what ``scripts/test`` runs, and the record that ``--all`` leaves."""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
STATUS = ROOT / "docs" / "test-status.md"
REPORTS = ROOT / ".cache" / "test-reports"
#: one part of --all must end within this, so that a session can resume between parts
PART_LIMIT_S = 3600

FAST, EVERYDAY, ALL = "fast", "everyday", "all"


@dataclass(frozen=True)
class Part:
    """One part: commands in order, stopped at the first failure; ``level`` is the shortest run that holds it."""

    name: str
    level: str
    commands: tuple[tuple[str, ...], ...]
    #: Debian commands that the part needs, by package
    packages: tuple[str, ...] = ()


def pytest(*paths: str, report: str, markers: str = "") -> tuple[str, ...]:
    """A pytest call that also writes its cases as JUnit XML."""
    mark = ("-m", markers) if markers else ()
    return (str(BIN / "pytest"), *paths, *mark, f"--junitxml={REPORTS / report}.xml")


def molecule(scenario: str) -> tuple[str, ...]:
    """A whole Molecule scenario."""
    return (str(BIN / "molecule"), "test", "-s", scenario)


DISKS = "tests/integration/disks"
RELEASES = "tests/integration/releases"
PROOF = "tests/integration/proof"
FLEET = "tests/integration/fleet"
#: what makes the foreign labels that a cache disk must refuse
DISK_PACKAGES = (
    "gdisk",
    "parted",
    "e2fsprogs",
    "xfsprogs",
    "btrfs-progs",
    "lvm2",
    "mdadm",
    "cryptsetup-bin",
    "dosfstools",
)

PARTS = (
    Part(
        "lint",
        FAST,
        (
            (str(BIN / "ruff"), "check"),
            (str(BIN / "ruff"), "format", "--check"),
            (str(BIN / "mypy"),),
            # an action plugin has the name of its module: the two cannot be checked in one go
            (str(BIN / "mypy"), "plugins/action"),
            (str(BIN / "yamllint"), "--strict", "."),
            (str(BIN / "ansible-lint"), "--offline"),
        ),
    ),
    Part("unit", FAST, (pytest("tests/unit", report="unit"),)),
    Part(
        "syntax",
        FAST,
        tuple(
            (str(BIN / "ansible-playbook"), "-i", str(inventory.relative_to(ROOT)), "site.yml", "--syntax-check")
            for inventory in sorted((ROOT / "inventories").iterdir())
            if inventory.is_dir()
        ),
    ),
    Part(
        "disk states",
        EVERYDAY,
        (pytest(f"{DISKS}/test_story.py", f"{DISKS}/test_states.py", report="disks", markers="root"),),
        DISK_PACKAGES,
    ),
    Part("deploy", EVERYDAY, (molecule("default"),)),
    # kill -9 after each step, each time on a new disk: longer than an everyday run may take
    Part(
        "disk interrupts",
        ALL,
        (pytest(f"{DISKS}/test_killed.py", f"{DISKS}/test_races.py", report="disk-interrupts", markers="root"),),
        DISK_PACKAGES,
    ),
    Part("bad input", ALL, (pytest("tests/integration/refusals", report="refusals", markers="root"),)),
    # one host for both: the second part goes on where the first ended, and deploys when there is nothing to go on from
    Part(
        "failing upgrades",
        ALL,
        (pytest(f"{RELEASES}/test_failures.py", "--keep-host", report="failing-upgrades", markers="root"),),
    ),
    Part("upgrade and rollback", ALL, (pytest(f"{RELEASES}/test_upgrade.py", report="upgrade", markers="root"),)),
    # each deploys a host of its own and injects faults into its running services
    Part(
        "proof truth faults",
        ALL,
        (pytest(f"{PROOF}/test_truth_faults.py", report="proof-truth-faults", markers="root"),),
    ),
    Part(
        "proof load faults",
        ALL,
        (pytest(f"{PROOF}/test_load_faults.py", report="proof-load-faults", markers="root"),),
    ),
    Part("proof trouble", ALL, (pytest(f"{PROOF}/test_trouble.py", report="proof-trouble", markers="root"),)),
    Part("proof fallback", ALL, (pytest(f"{PROOF}/test_fallback.py", report="proof-fallback", markers="root"),)),
    Part("proof article", ALL, (pytest(f"{PROOF}/test_article.py", report="proof-article", markers="root"),)),
    Part("proxy", ALL, (pytest("tests/integration/proxy", report="proxy", markers="root"),)),
    Part("test hosts", ALL, (pytest("tests/integration/testhost", report="testhost", markers="root"),)),
    Part(
        "fleet refused",
        ALL,
        (pytest(f"{FLEET}/test_refused.py", report="fleet-refused", markers="root"),),
    ),
    # three hosts with a real engine for all of these: each part goes on where the one before ended, and deploys when
    # there is nothing to go on from
    *(
        Part(
            f"fleet: {name}",
            ALL,
            (pytest(f"{FLEET}/test_{file}.py", "--keep-fleet", report=f"fleet-{file}", markers="root"),),
        )
        for name, file in (
            ("deploy", "deploy"),
            ("canary", "canary"),
            ("lost host", "lost"),
            ("killed controller", "killed"),
        )
    ),
    Part("fleet: traffic", ALL, (pytest(f"{FLEET}/test_traffic.py", report="fleet-traffic", markers="root"),)),
    Part("gpu proof", ALL, (pytest("tests/integration/gpu_proof", report="gpu-proof", markers="root"),)),
    Part("profiles", ALL, (molecule("profiles"),)),
    *(
        # each row breaks a real service and waits until it is back
        Part(
            f"failures: {name}",
            ALL,
            (pytest(f"tests/integration/failures/test_{name}.py", report=f"failures-{name}", markers="root"),),
            # the library that makes a service's clock jump
            ("gcc", "libc6-dev") if name == "host" else (),
        )
        for name in ("processes", "stops", "files", "partition", "requests", "host", "instances")
    ),
    Part("nvme virtual machine", ALL, (molecule("nvme"),)),
)


def missing_packages(part: Part) -> list[str]:
    """Debian packages of ``part`` that are not installed."""
    if not part.packages:
        return []
    shown = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${Status}\n", *part.packages],
        capture_output=True,
        text=True,
        check=False,
    )
    installed = {line.split()[0] for line in shown.stdout.splitlines() if line.endswith("install ok installed")}
    return [name for name in part.packages if name not in installed]


def install(part: Part) -> None:
    """Install what ``part`` needs; a clear sentence when that cannot be done."""
    missing = missing_packages(part)
    if not missing:
        return
    if os.geteuid() != 0:
        sys.exit(f"test: '{part.name}' needs root and these Debian packages: {' '.join(missing)}")
    print(f"test: installing {' '.join(missing)}", flush=True)
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-qq", "--no-install-recommends", *missing]):
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def run(part: Part) -> tuple[bool, float]:
    """Run one part; return whether all its commands passed and the seconds it took."""
    REPORTS.mkdir(parents=True, exist_ok=True)
    install(part)
    started = time.monotonic()
    environment = dict(
        os.environ, PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}", ANSIBLE_CONFIG=str(ROOT / "ansible.cfg")
    )
    for command in part.commands:
        print(
            f"\n=== {part.name}: {' '.join(command).replace(str(BIN) + '/', '').replace(str(ROOT) + '/', '')}",
            flush=True,
        )
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, timeout=PART_LIMIT_S, check=False).returncode
        except subprocess.TimeoutExpired:
            print(f"test: '{part.name}' ran past {PART_LIMIT_S} s", file=sys.stderr)
            done = 124
        if done:
            return False, time.monotonic() - started
    return True, time.monotonic() - started


def cases(part: Part) -> list[tuple[str, str]]:
    """The cases of a part that wrote JUnit XML, each with its result."""
    found = []
    for command in part.commands:
        for word in command:
            if word.startswith("--junitxml=") and Path(word.split("=", 1)[1]).is_file():
                for case in ElementTree.parse(word.split("=", 1)[1]).iter("testcase"):  # noqa: S314 - our own file
                    failed = any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
                    name = f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}"
                    found.append((name, "failed" if failed else "passed"))
    return found


def git(*arguments: str) -> str:
    """One line from git."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def commit() -> str:
    """The commit under test, marked when the tree differs from it; what tests themselves write does not count."""
    written = (":!docs/test-status.md", ":!docs/failures.json", ":!docs/failures.md")
    dirty = "+" if git("status", "--porcelain", "--untracked-files=no", "--", ".", *written) else ""
    return git("rev-parse", "--short", "HEAD") + dirty


Row = tuple[str, str, str, str, str]


def read_status() -> dict[tuple[str, str], Row]:
    """Rows of the record by part and case."""
    rows: dict[tuple[str, str], Row] = {}
    if STATUS.is_file():
        for line in STATUS.read_text().splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if line.startswith("| ") and len(cells) == 5 and re.match(r"\d{4}-", cells[3]):
                rows[cells[0], cells[1]] = (cells[0], cells[1], cells[2], cells[3], cells[4])
    return rows


def write_status(part: Part, passed: bool, seconds: float) -> None:
    """Put the part's result, and each of its cases, into docs/test-status.md."""
    rows = {key: row for key, row in read_status().items() if key[0] != part.name}
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M")
    result = f"{'passed' if passed else 'FAILED'} ({seconds:.0f} s)"
    rows[part.name, "(whole part)"] = (part.name, "(whole part)", commit(), now, result)
    if part.level != FAST:
        for name, outcome in cases(part):
            rows[part.name, name] = (part.name, name, commit(), now, outcome)
    order = {known.name: index for index, known in enumerate(PARTS)}
    lines = [
        "# Test status",
        "",
        "Written by `./scripts/test --all`; one row a case. `+` after a commit means uncommitted changes.",
        "",
        "| part | case | commit | date (UTC) | result |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {' | '.join(row)} |" for row in sorted(rows.values(), key=lambda row: (order.get(row[0], 99), row[1]))
    ]
    STATUS.write_text("\n".join(lines) + "\n")


def chosen(arguments: argparse.Namespace) -> list[Part]:
    """The parts that the command line asks for."""
    if arguments.part:
        known = [part for part in PARTS if part.name == arguments.part]
        if not known:
            sys.exit(f"test: no part '{arguments.part}'; there are: {', '.join(part.name for part in PARTS)}")
        return known
    levels = {FAST} if arguments.fast else {FAST, EVERYDAY, ALL} if arguments.all else {FAST, EVERYDAY}
    parts = [part for part in PARTS if part.level in levels]
    if arguments.resume:
        rows, now = read_status(), commit()
        parts = [
            part
            for part in parts
            if (row := rows.get((part.name, "(whole part)"))) is None
            or row[2] != now
            or not row[4].startswith("passed")
        ]
    return parts


def main() -> None:
    """Run the chosen parts; exit 1 when one failed."""
    parser = argparse.ArgumentParser(prog="scripts/test", description=__doc__)
    parser.add_argument("--fast", action="store_true", help="lint, unit tests, syntax: about two minutes")
    parser.add_argument("--all", action="store_true", help="every state, fault and VM case; writes docs/test-status.md")
    parser.add_argument("--resume", action="store_true", help="leave out parts that passed at this commit")
    parser.add_argument("--part", metavar="NAME", help="one part alone")
    parser.add_argument("--list", action="store_true", help="name the parts")
    arguments = parser.parse_args()
    if arguments.list:
        for part in PARTS:
            print(f"{part.name:24} {part.level}")
        return
    results: list[tuple[Part, bool, float]] = []
    for part in chosen(arguments):
        passed, seconds = run(part)
        results.append((part, passed, seconds))
        if arguments.all or arguments.part:
            write_status(part, passed, seconds)
        if not passed and not arguments.all:
            break
    print()
    for part, passed, seconds in results:
        print(f"{'passed' if passed else 'FAILED':7} {seconds:6.0f} s  {part.name}")
    failed = sum(not passed for _, passed, _ in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
