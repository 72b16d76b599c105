#!/usr/bin/python
# Copyright: kvfleet contributors
# Apache License 2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host_files
short_description: Make many folders and files of a host right in one call
description:
  - Creates folders, then writes every file whose content differs, and sets owner, group and mode where they differ.
  - One call does what a C(copy) or C(template) task does in two or three calls a file; in a fleet that is most of what
    a run without changes costs the controller.
  - All targets are checked before the first one is written. Each file is replaced in one step, and a new one is never
    readable for more users than its mode says.
  - A link in a file's place is replaced by the file; nothing is written through it.
  - Contents are in the module's arguments, so a file with a secret needs a task of its own with C(no_log).
options:
  folders:
    description: Folders to make, in this order; missing ones above them get the same owner, group and mode.
    type: list
    elements: dict
    default: []
    suboptions: &attributes
      path:
        description: Absolute path.
        type: str
        required: true
      owner:
        description: User that owns it.
        type: str
        default: root
      group:
        description: Group that owns it.
        type: str
        default: root
      mode:
        description: Permissions, as octal text such as C("0644").
        type: str
        required: true
  files:
    description: Files to write, in this order.
    type: list
    elements: dict
    default: []
    suboptions:
      <<: *attributes
      content:
        description: The whole text of the file; this or O(files[].template).
        type: str
      template:
        description:
          - Path of a template on the controller, rendered as C(ansible.builtin.template) does it.
          - The action plugin of the same name does that; the module itself gets the content.
        type: str
      variables:
        description: Variables for the template, beside all others.
        type: dict
  rendered:
    description: Set by the action plugin of the same name, without which no template would be rendered.
    type: bool
    default: false
attributes:
  check_mode:
    description: Says what would change. Folders and users that are missing count as announced by a task before.
    support: full
  diff_mode:
    description: Shows every changed file and every changed attribute.
    support: full
author: kvfleet
"""

EXAMPLES = r"""
- name: Write the units of the servers
  host_files:
    folders:
      - {path: /etc/kvfleet, group: kvfleet, mode: "0750"}
    files:
      - path: /etc/systemd/system/kvfleet.target
        template: "{{ role_path }}/templates/kvfleet.target.j2"
        mode: "0644"
"""

RETURN = r"""
changed_folders:
  description: Paths of the folders that were made or whose attributes changed.
  returned: always
  type: list
  elements: str
changed_files:
  description: Paths of the files whose content or attributes changed.
  returned: always
  type: list
  elements: str
"""

import grp
import os
import pwd
import re
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvfleet import filecheck
from ansible.module_utils.kvfleet.findings import Finding, KvfleetError, refuse

_ATTRIBUTES: dict[str, Any] = {
    "path": {"type": "str", "required": True},
    "owner": {"type": "str", "default": "root"},
    "group": {"type": "str", "default": "root"},
    "mode": {"type": "str", "required": True},
}
ARGUMENTS: dict[str, Any] = {
    "rendered": {"type": "bool", "default": False},
    "folders": {"type": "list", "elements": "dict", "default": [], "options": _ATTRIBUTES},
    "files": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            **_ATTRIBUTES,
            "content": {"type": "str"},
            "template": {"type": "str"},
            "variables": {"type": "dict"},
        },
        "mutually_exclusive": [("content", "template")],
        "required_one_of": [("content", "template")],
    },
}


def file_at(path: str) -> str:
    """What lies at ``path`` itself, in the words of :mod:`filecheck`."""
    kind: str = filecheck.ABSENT
    try:
        mode = Path(path).lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return kind
    if stat.S_ISLNK(mode):
        kind = filecheck.LINK
    elif stat.S_ISREG(mode):
        kind = filecheck.FILE
    else:
        kind = filecheck.FOLDER if stat.S_ISDIR(mode) else filecheck.OTHER
    return kind


def folder_at(path: str) -> str:
    """What ``path`` leads to, in the words of :mod:`filecheck`."""
    kind = file_at(path)
    if kind == filecheck.LINK:
        if Path(path).lstat().st_uid not in (0, os.geteuid()):
            kind = filecheck.FOREIGN_LINK
        elif Path(path).exists():
            kind = file_at(os.path.realpath(path))
    return kind


def check_names(entries: list[dict[str, Any]]) -> None:
    """Refuse owners and groups that the host does not have."""
    lookups: tuple[tuple[str, Callable[[str], Any]], ...] = (("owner", pwd.getpwnam), ("group", grp.getgrnam))
    missing = {}
    for entry in entries:
        for kind, look in lookups:
            try:
                if not entry[kind].isdigit():
                    look(entry[kind])
            except KeyError:
                text = f"{entry['path']} has to belong to {kind} {entry[kind]}, whom this host does not have."
                missing[kind, entry[kind]] = Finding("KVF-HOST-065", text, "Create the service user first.")
    if missing:
        raise KvfleetError(*missing.values())


def numbers(entry: dict[str, Any]) -> tuple[int, int, int]:
    """User id, group id and mode of an entry; KeyError for a name that the host does not have."""
    owner, group = entry["owner"], entry["group"]
    return (
        int(owner) if owner.isdigit() else pwd.getpwnam(owner).pw_uid,
        int(group) if group.isdigit() else grp.getgrnam(group).gr_gid,
        int(entry["mode"], 8),
    )


class Writer:
    """Makes folders and files of one call and remembers what differed."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.folders: list[str] = []
        self.files: list[str] = []
        self.diffs: list[dict[str, Any]] = []

    def attributes(self, entry: dict[str, Any], path: str) -> bool:
        """Set owner, group and mode of ``path``; whether any differed."""
        if self.module.check_mode and not Path(path).exists():
            return True
        try:
            wanted = numbers(entry)
        except KeyError:
            # check mode: a user that a task before would have made; a real run has refused it before
            return True
        found = Path(path).stat()
        now = (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode))
        if now == wanted:
            return False
        before, after = ({"owner": uid, "group": gid, "mode": f"{mode:04o}"} for uid, gid, mode in (now, wanted))
        self.diffs.append({"before": before, "after": after, "before_header": path, "after_header": path})
        if not self.module.check_mode:
            os.chown(path, wanted[0], wanted[1])
            # after the owner: a change of owner takes special bits away
            Path(path).chmod(wanted[2])
        return True

    def folder(self, entry: dict[str, Any]) -> None:
        """Make a folder, with those above it, and set its attributes."""
        path = entry["path"]
        missing = [one for one in (path, *filecheck.parents(path)) if not Path(one).is_dir()]
        if missing:
            self.diffs.append({"before": {"state": "absent"}, "after": {"state": "directory"}, "after_header": path})
        for one in reversed(missing):
            if not self.module.check_mode:
                uid, gid, mode = numbers(entry)
                # with its mode at once: a run that is killed here leaves no folder above that nobody may enter
                Path(one).mkdir(mode=mode)
                os.chown(one, uid, gid)
                Path(one).chmod(mode)
        if missing or self.attributes(entry, path):
            self.folders.append(path)

    def file(self, entry: dict[str, Any]) -> None:
        """Write a file whose content differs, or set the attributes of one whose content is right."""
        path, wanted = entry["path"], entry["content"].encode("utf-8", "surrogateescape")
        found = Path(path).read_bytes() if file_at(path) == filecheck.FILE else None
        if found == wanted:
            if self.attributes(entry, path):
                self.files.append(path)
            return
        if self.module._diff:
            before = (found or b"").decode("utf-8", "replace")
            self.diffs.append(
                {"before": before, "after": entry["content"], "before_header": path, "after_header": path}
            )
        if not self.module.check_mode:
            self.replace(entry, wanted)
        self.files.append(path)

    def replace(self, entry: dict[str, Any], content: bytes) -> None:
        """Put a whole file with its owner and mode in the place of what was there, in one step."""
        path = entry["path"]
        uid, gid, mode = numbers(entry)
        handle, temporary = tempfile.mkstemp(dir=Path(path).parent, prefix=".kvfleet-")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
                os.fchown(stream.fileno(), uid, gid)
                os.fchmod(stream.fileno(), mode)
                stream.flush()
                os.fsync(stream.fileno())
            Path(temporary).rename(path)
        except OSError:
            Path(temporary).unlink()
            raise
        self.module.set_default_selinux_context(path, False)


def main() -> None:
    # no_log: the journal of the host would get every file of every run; answers and diffs are as always
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True, no_log=True)
    folders, files = module.params["folders"], module.params["files"]
    writer = Writer(module)
    # whole files would come back to the controller with every answer
    named = {"module_args": {kind: [entry["path"] for entry in module.params[kind]] for kind in ("folders", "files")}}
    # new folders get exactly their modes; files are made by mkstemp, for their maker alone
    os.umask(0)
    path = ""
    try:
        if not module.params["rendered"] or any(entry["content"] is None for entry in files):
            raise refuse(
                "KVF-HOST-067",
                "The action plugin host_files did not run on the controller.",
                "Set action_plugins in ansible.cfg to this checkout's plugins/action; if ANSIBLE_ACTION_PLUGINS is set "
                "in the environment, which wins, add that folder to it.",
            )
        wrong = [entry for entry in (*folders, *files) if not re.fullmatch("[0-7]{3,4}", entry["mode"])]
        if wrong:
            raise refuse(
                "KVF-HOST-068",
                f"{wrong[0]['mode']!r} is no mode for {wrong[0]['path']}.",
                "Give it as octal digits in quotes, such as '0644'.",
            )
        try:
            filecheck.check_targets(
                [entry["path"] for entry in folders],
                [entry["path"] for entry in files],
                folder_at,
                file_at,
                announced=module.check_mode,
            )
        except OSError as error:
            raise refuse(
                "KVF-HOST-069", f"{error.filename} could not be looked at: {error.strerror}.", "Repair that first."
            ) from error
        if not module.check_mode:
            check_names([*folders, *files])
        try:
            for entry in folders:
                path = entry["path"]
                writer.folder(entry)
            for entry in files:
                path = entry["path"]
                writer.file(entry)
        except OSError as error:
            raise refuse(
                "KVF-HOST-066",
                f"{path} could not be written: {error.strerror}.",
                "Repair that and run this again: what was written before it stays and counts as done.",
            ) from error
    except KvfleetError as error:
        module.fail_json(
            msg=str(error),
            findings=[finding.as_dict() for finding in error.findings],
            changed=bool(writer.folders or writer.files),
            changed_folders=writer.folders,
            changed_files=writer.files,
            invocation=named,
        )
    result: dict[str, Any] = {
        "changed": bool(writer.folders or writer.files),
        "changed_folders": writer.folders,
        "changed_files": writer.files,
        "invocation": named,
    }
    if module._diff:
        result["diff"] = writer.diffs
    module.exit_json(**result)


if __name__ == "__main__":
    main()
