#!/usr/bin/python
# Copyright: kvfleet contributors
# Apache License 2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: engine_check
short_description: Say what a host holds of a release, without importing it
description:
  - Compares the release directories with a release row and its lock, by the marker that an installation leaves.
  - Reads only, and takes milliseconds, so that an unchanged run costs nothing.
options:
  root:
    description: Directory that holds the releases, the link C(current), tools and bundles.
    type: path
    default: /opt/kvfleet
  release:
    description:
      - The release row, from C(kvfleet_plan['release']). Without it only what the host holds is told.
    type: dict
  lock:
    description: Text of the release's lock file; needed with O(release).
    type: str
  lock_name:
    description: Name of the lock file, for messages.
    type: str
    default: lock
  packages:
    description: Debian packages that have to be there.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Nothing is ever changed.
    support: full
author: kvfleet
"""

EXAMPLES = r"""
- name: Compare the host with the release
  engine_check:
    release: "{{ kvfleet_plan['release'] }}"
    lock: "{{ lookup('ansible.builtin.file', engine_lock) }}"
    packages: [libnuma1]
  register: engine_state
"""

RETURN = r"""
path:
  description: Directory of the release when it is complete, else null.
  returned: with O(release)
  type: str
install:
  description: Whether it has to be built.
  returned: with O(release)
  type: bool
prove:
  description: Whether its gates have to run again because the row changed.
  returned: with O(release)
  type: bool
gates:
  description: What the gates found at installation.
  returned: with O(release)
  type: list
  elements: dict
current:
  description: Id of the release in use, or null.
  returned: always
  type: str
current_path:
  description: Directory of the release in use, or null.
  returned: always
  type: str
bundle_sha256:
  description: sha256 of the manifest of this release's unpacked bundle, or null.
  returned: with O(release)
  type: str
packages_missing:
  description: Debian packages that are not installed.
  returned: with O(release)
  type: list
  elements: str
rollback_to:
  description: Id of the proved release that the host left last and still holds, or null.
  returned: always
  type: str
releases:
  description: Every complete release on the host.
  returned: always
  type: list
  elements: dict
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvfleet import engine
from ansible.module_utils.kvfleet.command import run_command
from ansible.module_utils.kvfleet.findings import KvfleetError
from ansible.module_utils.kvfleet.lockfile import parse_lock


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/opt/kvfleet"},
            "release": {"type": "dict"},
            "lock": {"type": "str"},
            "lock_name": {"type": "str", "default": "lock"},
            "packages": {"type": "list", "elements": "str", "default": []},
        },
        required_together=[("release", "lock")],
        supports_check_mode=True,
    )
    options = module.params
    layout = engine.Layout(Path(options["root"]))
    if options["release"] is None:
        module.exit_json(changed=False, **engine.overview(layout))
    try:
        lock = parse_lock(options["lock"], options["lock_name"])
        engine.check_lock(options["release"], lock)
        found = engine.state(layout, options["release"], lock, run_command, packages=options["packages"])
    except KvfleetError as error:
        module.fail_json(msg=str(error), findings=[finding.as_dict() for finding in error.findings])
    module.exit_json(changed=False, **found)


if __name__ == "__main__":
    main()
