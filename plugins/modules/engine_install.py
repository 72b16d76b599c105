#!/usr/bin/python
# Copyright: kvfleet contributors
# Apache License 2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: engine_install
short_description: Build a release directory from its lock and prove it
description:
  - Builds the virtual environment of a release beside its final name with uv, all wheels in one transaction, runs every
    gate in its own interpreter, and renames it. A directory with the final name is always complete and proved.
  - No other release is touched, and the link C(current) stays as it is.
  - A release that is there already is left alone; its gates run again only when the row changed.
options:
  root:
    description: Directory that holds the releases, the link C(current), tools and bundles.
    type: path
    default: /opt/kvfleet
  release:
    description: The release row, from C(kvfleet_plan['release']).
    type: dict
    required: true
  lock:
    description: Text of the release's lock file.
    type: str
    required: true
  lock_name:
    description: Name of the lock file, for messages.
    type: str
    default: lock
  tools_lock:
    description: Text of the lock of uv; needed without a bundle.
    type: str
    default: ""
  bundle:
    description: Index of a bundle; everything is taken from its parts and no package index is asked.
    type: dict
  bundle_folder:
    description: Directory on the host with the bundle's parts. Default, C(incoming/<name>) below O(root).
    type: path
  packages:
    description: Debian packages that have to be there; those that are missing are taken from the bundle.
    type: list
    elements: str
    default: []
  packages_only:
    description: Only unpack the bundle and install its Debian packages; the release is left for a later call.
    type: bool
    default: false
  base_python:
    description:
      - Interpreter of another environment on the host whose packages the release may use beside its own, for hosts that
        hold torch and CUDA's libraries already. Packages that the lock names as provided must be there.
    type: str
    default: ""
  instances:
    description:
      - Instances that will run on the release (C(kvfleet_plan['instances'])); the release's own parser has to take the
        C(command) of each.
    type: list
    elements: dict
    default: []
attributes:
  check_mode:
    description: Says what would be installed.
    support: full
author: kvfleet
"""

EXAMPLES = r"""
- name: Build and prove the release
  engine_install:
    release: "{{ kvfleet_plan['release'] }}"
    lock: "{{ lookup('ansible.builtin.file', engine_lock) }}"
    bundle: "{{ lookup('ansible.builtin.file', engine_bundle) | from_json }}"
"""

RETURN = r"""
path:
  description: Directory of the release, null with O(packages_only).
  returned: always
  type: str
gates:
  description: Name, result, detail and seconds of every gate.
  returned: always
  type: list
  elements: dict
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvfleet import engine
from ansible.module_utils.kvfleet.bundlefile import BundleIndex, read_index
from ansible.module_utils.kvfleet.command import run_command
from ansible.module_utils.kvfleet.findings import KvfleetError
from ansible.module_utils.kvfleet.lockfile import Lock, parse_lock


def bring_packages(
    module: AnsibleModule,
    layout: engine.Layout,
    row: dict[str, Any],
    lock: Lock,
    bundle: BundleIndex,
    folder: Path,
) -> dict[str, Any]:
    """The module's answer when only Debian packages are asked for."""
    packages = module.params["packages"]
    if module.check_mode:
        return {"changed": bool(engine.missing_packages(packages, run_command)), "path": None, "gates": []}
    changed = engine.bring_packages(
        layout, row, lock, run_command, bundle=bundle, bundle_folder=folder, packages=packages
    )
    return {"changed": changed, "path": None, "gates": []}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/opt/kvfleet"},
            "release": {"type": "dict", "required": True},
            "lock": {"type": "str", "required": True},
            "lock_name": {"type": "str", "default": "lock"},
            "tools_lock": {"type": "str", "default": ""},
            "bundle": {"type": "dict"},
            "bundle_folder": {"type": "path"},
            "packages": {"type": "list", "elements": "str", "default": []},
            "packages_only": {"type": "bool", "default": False},
            "instances": {"type": "list", "elements": "dict", "default": []},
            "base_python": {"type": "str", "default": ""},
        },
        required_if=[("packages_only", True, ("bundle",))],
        supports_check_mode=True,
    )
    options = module.params
    layout = engine.Layout(Path(options["root"]))
    row = options["release"]
    commands = [
        (str(one["name"]), [str(word) for word in one["command"][1:]])
        for one in options["instances"]
        if one.get("command")
    ]
    try:
        lock = parse_lock(options["lock"], options["lock_name"])
        engine.check_lock(row, lock)
        bundle = read_index(options["bundle"], "the bundle's index") if options["bundle"] else None
        folder = Path(options["bundle_folder"]) if options["bundle_folder"] else None
        if bundle is not None and folder is None:
            folder = layout.incoming / bundle.name
        if options["packages_only"] and bundle is not None and folder is not None:
            module.exit_json(**bring_packages(module, layout, row, lock, bundle, folder))
        found = engine.state(layout, row, lock, run_command)
        if not found["install"] and not found["prove"]:
            module.exit_json(changed=False, path=found["path"], gates=found["gates"])
        if module.check_mode:
            target = found["path"] or str(engine.directory_for(layout, str(row["id"]), lock.digest))
            module.exit_json(changed=True, path=target, gates=[])
        if found["install"]:
            result = engine.install(
                layout,
                row,
                lock,
                options["lock"],
                run_command,
                tools_lock_text=options["tools_lock"],
                bundle=bundle,
                bundle_folder=folder,
                packages=options["packages"],
                commands=commands,
                base_python=options["base_python"],
            )
        else:
            gates = engine.prove_again(layout, Path(found["path"]), row, lock, run_command, commands)
            result = {"changed": True, "path": found["path"], "gates": [gate.as_dict() for gate in gates]}
    except KvfleetError as error:
        module.fail_json(msg=str(error), findings=[finding.as_dict() for finding in error.findings])
    module.exit_json(**result)


if __name__ == "__main__":
    main()
