"""Many folders and files in one call: contents, attributes, check mode, diffs, and what is refused before it writes."""

from __future__ import annotations

import grp
import json
import os
import pwd
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils import basic
from ansible.module_utils.testing import patch_module_args

import host_files
from kvfleet.core import filecheck
from kvfleet.core.findings import KvfleetError

ME = pwd.getpwuid(os.geteuid()).pw_name
MINE = grp.getgrgid(os.getegid()).gr_name

Call = Callable[..., dict[str, Any]]


def entry(path: Path | str, content: str | None = None, mode: str = "0644", **more: str) -> dict[str, Any]:
    """One folder, or one file when it has content, of this user."""
    made = {"path": str(path), "owner": ME, "group": MINE, "mode": mode, **more}
    return made if content is None else {**made, "content": content}


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Call:
    """Run the module; what it prints is its answer."""

    def run(
        folders: Any = (), files: Any = (), check: bool = False, diff: bool = False, rendered: bool = True
    ) -> dict[str, Any]:
        basic._ANSIBLE_ARGS = None
        # the remote folder stands on the same file system or not: a rename or a copy beside the target
        (tmp_path / "remote").mkdir(exist_ok=True)
        arguments = {
            "folders": list(folders),
            "files": list(files),
            "rendered": rendered,
            "_ansible_check_mode": check,
            "_ansible_diff": diff,
            "_ansible_remote_tmp": str(tmp_path / "remote"),
        }
        before = os.umask(0o022)
        try:
            with patch_module_args(arguments), pytest.raises(SystemExit):
                host_files.main()
        finally:
            os.umask(before)
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    return run


def mode(path: Path) -> str:
    return f"{stat.S_IMODE(path.lstat().st_mode):04o}"


def test_documentation_and_arguments_are_the_same() -> None:
    documented = yaml.safe_load(host_files.DOCUMENTATION)["options"]
    assert set(documented) == set(host_files.ARGUMENTS)
    for name, words in documented.items():
        argument = host_files.ARGUMENTS[name]
        assert {words["type"]: words["default"]} == {argument["type"]: argument["default"]}
        if name == "rendered":
            continue
        assert set(words["suboptions"]) == set(argument["options"])
        for option, sub in words["suboptions"].items():
            assert {key: sub.get(key) for key in ("type", "default", "required")} == {
                key: argument["options"][option].get(key) for key in ("type", "default", "required")
            }
    assert yaml.safe_load(host_files.EXAMPLES)
    assert yaml.safe_load(host_files.RETURN)


def test_a_template_that_nobody_rendered_is_refused(call: Call, tmp_path: Path) -> None:
    rest = entry(tmp_path / "a", mode="0644")
    # without the action plugin the first call of a run is refused, not the first one with a template
    assert "KVF-HOST-067" in call(files=[{**rest, "content": "x"}], rendered=False)["msg"]
    assert "KVF-HOST-067" in call(files=[{**rest, "template": "/x.j2"}])["msg"]
    assert not (tmp_path / "a").exists()
    assert "mutually exclusive" in call(files=[{**rest, "template": "/x.j2", "content": "x"}])["msg"]
    assert "one of the following is required" in call(files=[rest])["msg"]


def test_makes_all_and_then_changes_nothing(call: Call, tmp_path: Path) -> None:
    folder = tmp_path / "opt" / "kvfleet" / "libexec"
    folders = [entry(folder, mode="0750"), entry(tmp_path / "etc", mode="0755")]
    files = [
        entry(folder / "helper", "#!/bin/sh\n", "0755"),
        # bytes as they come: no newline at the end, one too many, none but ASCII
        entry(tmp_path / "etc" / "secret", "é\n\n", "0600"),
        entry(tmp_path / "etc" / "bare", "x"),
    ]
    answer = call(folders, files)
    assert answer["changed"]
    assert answer["changed_folders"] == [str(folder), str(tmp_path / "etc")]
    assert answer["changed_files"] == [file["path"] for file in files]
    assert (tmp_path / "etc" / "secret").read_bytes() == "é\n\n".encode()
    assert (tmp_path / "etc" / "bare").read_bytes() == b"x"
    # a folder that had to be made above it is like it, as with ansible.builtin.file
    assert [mode(one) for one in (folder, folder.parent, folder / "helper", tmp_path / "etc" / "secret")] == [
        "0750", "0750", "0755", "0600",
    ]  # fmt: skip
    seen = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*") if "remote" not in path.parts}
    again = call(folders, files, diff=True)
    assert (again["changed"], again["changed_folders"], again["changed_files"], again["diff"]) == (False, [], [], [])
    assert seen == {path: path.lstat().st_mtime_ns for path in seen}
    # the answer does not carry the contents back
    assert "#!/bin/sh" not in json.dumps(again)


def test_only_what_differs_is_written(call: Call, tmp_path: Path) -> None:
    files = [entry(tmp_path / name, f"{name}\n") for name in "abc"]
    call(files=files)
    (tmp_path / "b").write_text("old\n")
    (tmp_path / "c").chmod(0o600)
    inode = (tmp_path / "c").stat().st_ino
    answer = call(files=files, diff=True)
    assert answer["changed_files"] == [str(tmp_path / "b"), str(tmp_path / "c")]
    assert (tmp_path / "b").read_text() == "b\n"
    # wrong attributes alone are no reason to write it
    assert ((tmp_path / "c").stat().st_ino, mode(tmp_path / "c")) == (inode, "0644")
    content, attributes = answer["diff"]
    assert (content["before"], content["after"], content["after_header"]) == ("old\n", "b\n", str(tmp_path / "b"))
    assert (attributes["before"]["mode"], attributes["after"]["mode"]) == ("0600", "0644")


def test_a_file_is_replaced_in_one_step_and_keeps_no_reader_of_the_old_one_waiting(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "unit"
    call(files=[entry(path, "old\n")])
    with path.open() as reader:
        call(files=[entry(path, "new\n")])
        assert reader.read() == "old\n"
    assert path.read_text() == "new\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["remote", "unit"]


def test_check_mode_says_the_same_and_writes_nothing(call: Call, tmp_path: Path) -> None:
    present = tmp_path / "present"
    call(files=[entry(present, "old\n")])
    folders = [entry(tmp_path / "new" / "deep", mode="0755")]
    files = [
        entry(present, "old\n", "0600"),
        entry(tmp_path / "new" / "deep" / "file", "x\n"),
        # a folder and a user that a task before would have made
        entry(tmp_path / "announced" / "file", "x\n", owner="nobody-has-this-name"),
        entry(present.parent / "same", "x\n"),
    ]
    answer = call(folders, files, check=True, diff=True)
    assert answer["changed_folders"] == [folders[0]["path"]]
    assert answer["changed_files"] == [file["path"] for file in files]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["present", "remote"]
    assert (present.read_text(), mode(present)) == ("old\n", "0644")
    unchanged = call(files=[entry(present, "old\n")], check=True)
    assert (unchanged["changed"], unchanged["changed_files"]) == (False, [])
    # owners that are not there yet cannot be those of a file that is
    assert call(files=[entry(present, "old\n", owner="nobody-has-this-name")], check=True)["changed"]


def test_a_new_file_is_never_readable_for_more_than_its_mode_says(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, str] = {}
    real = Path.rename

    def look(path: Path, target: str) -> Path:
        seen[target] = f"{mode(path)} {path.read_text()}"
        return real(path, target)

    monkeypatch.setattr(host_files.Path, "rename", look)
    key = tmp_path / "folder" / "key"
    call([entry(tmp_path / "folder", mode="0750")], [entry(key, "k\n", "0640")])
    # a file that everybody may read today
    key.chmod(0o666)
    answer = call(files=[entry(key, "new\n", "0640")], diff=True)
    # whole, and with its mode, before anybody can open it under its name; so there is one difference, not two
    assert seen[str(key)] == "0640 new\n"
    assert [diff["after"] for diff in answer["diff"]] == ["new\n"]
    assert mode(key) == "0640"


def test_new_folders_have_their_mode_from_the_start(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(host_files.os, "chown", lambda path, *_: seen.append(mode(Path(path))))
    call([entry(tmp_path / "a" / "b", mode="0755")])
    assert seen == ["0755", "0755"]


def test_all_is_checked_before_the_first_write(call: Call, tmp_path: Path) -> None:
    (tmp_path / "is-folder").mkdir()
    (tmp_path / "is-file").write_text("")
    (tmp_path / "to-nothing").symlink_to(tmp_path / "nothing")
    answer = call(
        [entry(tmp_path / "fine", mode="0755"), entry(tmp_path / "is-file", mode="0755"),
         entry(tmp_path / "is-file" / "below", mode="0755"), entry(tmp_path / "to-nothing", mode="0755")],
        [entry(tmp_path / "fine" / "file", "x"), entry(tmp_path / "is-folder", "x"),
         entry(tmp_path / "absent" / "file", "x")],
    )  # fmt: skip
    assert answer["failed"]
    assert not answer["changed"]
    assert [finding["code"] for finding in answer["findings"]] == [
        "KVF-HOST-061", "KVF-HOST-061", "KVF-HOST-062", "KVF-HOST-063",
    ]  # fmt: skip
    for words in (
        "is-file has to be a folder but is a file",
        "to-nothing has to be a folder but is a link to nothing",
        "is-folder has to be a file but is a folder",
        f"The folder of {tmp_path}/absent/file is missing",
        f"Make {tmp_path}/absent first",
    ):
        assert words in answer["msg"]
    assert not (tmp_path / "fine").exists()


def test_unknown_owners_are_refused_before_the_first_write(call: Call, tmp_path: Path) -> None:
    files = [entry(tmp_path / "a", "x"), entry(tmp_path / "b", "x", owner="nobody-has-this-name")]
    answer = call(files=files)
    assert [finding["code"] for finding in answer["findings"]] == ["KVF-HOST-065"]
    assert "nobody-has-this-name" in answer["msg"]
    assert not (tmp_path / "a").exists()
    # a number needs no name
    assert call(files=[entry(tmp_path / "a", "x", owner=str(os.geteuid()))])["changed"]


def test_a_failure_names_the_file_and_what_was_done_before(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.rename

    def full(path: Path, target: str) -> Path:
        if target.endswith("second"):
            raise OSError(28, "No space left on device")
        return real(path, target)

    monkeypatch.setattr(host_files.Path, "rename", full)
    answer = call(files=[entry(tmp_path / name, "secret") for name in ("first", "second", "third")])
    assert answer["failed"]
    assert answer["msg"].startswith(f"KVF-HOST-066: {tmp_path}/second could not be written: No space left on device.")
    assert (answer["changed"], answer["changed_files"]) == (True, [str(tmp_path / "first")])
    assert "secret" not in json.dumps(answer)
    # neither the third nor anything half
    assert sorted(one.name for one in tmp_path.iterdir()) == ["first", "remote"]


def test_an_owner_that_cannot_be_set_is_a_failure_of_that_file(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: str, *_: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    (tmp_path / "second").write_text("x")
    (tmp_path / "second").chmod(0o600)
    monkeypatch.setattr(host_files.os, "chown", refused)
    answer = call(files=[entry(tmp_path / name, "x") for name in ("first", "second")])
    assert answer["msg"].startswith(f"KVF-HOST-066: {tmp_path}/second could not be written: Operation not permitted.")
    assert answer["changed_files"] == [str(tmp_path / "first")]
    assert answer["invocation"] == {
        "module_args": {"folders": [], "files": [f"{tmp_path}/first", f"{tmp_path}/second"]}
    }


def test_what_cannot_be_looked_at_is_one_sentence(call: Call, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    answer = call(files=[entry(tmp_path / "loop" / "a", "x")])
    assert answer["msg"].startswith("KVF-HOST-069: ")
    assert "Too many levels of symbolic links" in answer["msg"]


@pytest.mark.parametrize("check", [True, False])
def test_below_a_file_there_will_never_be_a_folder(call: Call, tmp_path: Path, check: bool) -> None:
    (tmp_path / "key").write_text("x")
    answer = call(files=[entry(tmp_path / "key" / "sub" / "f", "x")], check=check)
    assert [finding["code"] for finding in answer["findings"]] == ["KVF-HOST-061"]
    assert f"{tmp_path}/key has to be a folder but is a file" in answer["msg"]


@pytest.mark.parametrize("wrong", ["u=rw", "644x", "9", ""])
def test_modes_are_octal_digits(call: Call, tmp_path: Path, wrong: str) -> None:
    assert call(files=[entry(tmp_path / "a", "x", wrong)])["msg"].startswith("KVF-HOST-068: ")
    assert not (tmp_path / "a").exists()


def test_the_journal_gets_no_contents(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(basic.AnsibleModule, "log", lambda _, text, **__: logged.append(str(text)))
    call(files=[entry(tmp_path / "a", "every line of it\n")])
    assert "every line of it" not in "".join(logged)


def test_a_link_is_replaced_and_not_written_through(call: Call, tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("same\n")
    target.chmod(0o600)
    link.symlink_to(target)
    # even where the content behind it is the wanted one
    assert call(files=[entry(link, "same\n")], check=True)["changed_files"] == [str(link)]
    assert link.is_symlink()
    assert call(files=[entry(link, "same\n")])["changed_files"] == [str(link)]
    assert not link.is_symlink()
    assert (mode(link), mode(target)) == ("0644", "0600")
    link.unlink()
    link.symlink_to(tmp_path / "nothing")
    call(files=[entry(link, "x\n")])
    assert (link.read_text(), (tmp_path / "nothing").exists()) == ("x\n", False)


def test_a_folder_may_be_a_link_of_root_and_of_nobody_else(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "state").symlink_to(tmp_path / "data")
    assert call([entry(tmp_path / "state", mode="0750")])["changed_folders"] == [str(tmp_path / "state")]
    assert (mode(tmp_path / "data"), (tmp_path / "state").is_symlink()) == ("0750", True)
    assert not call([entry(tmp_path / "state", mode="0750")])["changed"]
    # a link that the service user made, which can let it lead anywhere
    if os.geteuid() == 0:
        os.lchown(tmp_path / "state", 4711, -1)
    else:
        monkeypatch.setattr(host_files.os, "geteuid", lambda: 4711)
    answer = call([entry(tmp_path / "state", mode="0755")])
    assert [finding["code"] for finding in answer["findings"]] == ["KVF-HOST-064"]
    assert mode(tmp_path / "data") == "0750"


@pytest.mark.parametrize("path", ["relative", "/a/../b", "/a//b", "/a/"])
def test_only_plain_absolute_paths(path: str) -> None:
    with pytest.raises(KvfleetError, match="KVF-HOST-060"):
        filecheck.check_targets([], [path], lambda _: "folder", lambda _: "absent", announced=False)


def test_a_path_twice_is_refused() -> None:
    with pytest.raises(KvfleetError, match="/a is asked for twice"):
        filecheck.check_targets(["/a"], ["/a"], lambda _: "folder", lambda _: "absent", announced=False)
