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
        if Path(path).parent.stat().st_uid not in (0, os.geteuid()):
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
        diff: dict[str, Any] = {}
        wanted = self.module.load_file_common_arguments({**entry, "path": path, "follow": True})
        if self.module.check_mode:
            # a user that a task before would have made cannot be compared
            try:
                check_names([entry])
            except KvfleetError:
                return True
        changed = bool(self.module.set_fs_attributes_if_different(wanted, False, diff=diff))
        if changed:
            self.diffs.append({**diff, "before_header": path, "after_header": path})
        return changed

    def folder(self, entry: dict[str, Any]) -> None:
        """Make a folder, with those above it, and set its attributes."""
        path = entry["path"]
        missing = [one for one in (path, *filecheck.parents(path)) if not Path(one).is_dir()]
        for one in reversed(missing):
            if not self.module.check_mode:
                Path(one).mkdir()
            if one != path:
                self.attributes(entry, one)
        if missing:
            self.diffs.append({"before": {"state": "absent"}, "after": {"state": "directory"}, "after_header": path})
        if self.attributes(entry, path) or missing:
            self.folders.append(path)

    def file(self, entry: dict[str, Any]) -> None:
        """Write a file whose content differs and set its attributes."""
        path, wanted = entry["path"], entry["content"].encode("utf-8", "surrogateescape")
        plain = file_at(path) == filecheck.FILE
        found = Path(path).read_bytes() if plain else None
        differs = found != wanted
        if differs:
            if self.module._diff:
                before = (found or b"").decode("utf-8", "replace")
                self.diffs.append(
                    {"before": before, "after": entry["content"], "before_header": path, "after_header": path}
                )
            if not self.module.check_mode:
                handle, temporary = tempfile.mkstemp(dir=self.module.tmpdir)
                with os.fdopen(handle, "wb") as stream:
                    stream.write(wanted)
                self.module.atomic_move(temporary, path, keep_dest_attrs=plain)
        if (differs and self.module.check_mode and not plain) or self.attributes(entry, path) or differs:
            self.files.append(path)


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    folders, files = module.params["folders"], module.params["files"]
    writer = Writer(module)
    # whole files would come back to the controller with every answer
    named = {"module_args": {kind: [entry["path"] for entry in module.params[kind]] for kind in ("folders", "files")}}
    # what is new is root's alone until it has its owner and mode
    os.umask(0o077)
    path = ""
    try:
        left = [entry["path"] for entry in files if entry["content"] is None]
        if left:
            raise refuse(
                "KVF-HOST-067",
                f"The template of {left[0]} was not rendered on the controller.",
                "Set action_plugins in ansible.cfg to this checkout's plugins/action.",
            )
        filecheck.check_targets(
            [entry["path"] for entry in folders],
            [entry["path"] for entry in files],
            folder_at,
            file_at,
            announced=module.check_mode,
        )
        if not module.check_mode:
            check_names([*folders, *files])
        try:
            for entry in folders:
                path = entry["path"]
                writer.folder(entry)
            for entry in files:
                path = entry["path"]
                writer.file(entry)
        # Ansible's own functions raise bare exceptions, with the system's error as their cause
        except Exception as error:
            cause = error.__cause__ or error
            raise refuse(
                "KVF-HOST-066",
                f"{path} could not be written: {getattr(cause, 'strerror', None) or cause}.",
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
