#!/usr/bin/python
# Copyright: kvfleet contributors
# Apache License 2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: engine_switch
short_description: Point the link of the release in use at a proved release, and drop old ones
description:
  - Replaces the link C(current) in one step when it points elsewhere. Only a complete, proved release is accepted.
  - Drops all but the O(keep) newest releases, never the one in use nor one that a proof file names.
options:
  root:
    description: Directory that holds the releases, the link C(current), tools and bundles.
    type: path
    default: /opt/kvfleet
  path:
    description: Directory of the release to use.
    type: path
  release:
    description: Id of the release to use, when its directory is not known; the newest directory of this id is taken.
    type: str
  keep:
    description: Releases to keep. V(0) drops none.
    type: int
    default: 0
  proof_files:
    description:
      - JSON files on the host whose key C(release) names a release that must stay. The first is the newest proof; if it
        names the release that is left, that one is remembered as the one to return to.
    type: list
    elements: path
    default: []
attributes:
  check_mode:
    description: Says what would be switched and dropped.
    support: full
  diff_mode:
    description: Shows the release in use before and after.
    support: full
author: kvfleet
"""

EXAMPLES = r"""
- name: Use the release
  engine_switch:
    path: "{{ engine_state['path'] }}"
    keep: 2
    proof_files: [/var/lib/kvfleet/proved.json, /var/lib/kvfleet/proved.previous.json]
"""

RETURN = r"""
switched:
  description: Whether the link pointed elsewhere before.
  returned: always
  type: bool
previous:
  description: Directory that was in use before, or null.
  returned: always
  type: str
pruned:
  description: Directories of old releases that were dropped.
  returned: always
  type: list
  elements: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvfleet import engine
from ansible.module_utils.kvfleet.findings import KvfleetError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/opt/kvfleet"},
            "path": {"type": "path"},
            "release": {"type": "str"},
            "keep": {"type": "int", "default": 0},
            "proof_files": {"type": "list", "elements": "path", "default": []},
        },
        required_one_of=[("path", "release")],
        mutually_exclusive=[("path", "release")],
        supports_check_mode=True,
    )
    options = module.params
    layout = engine.Layout(Path(options["root"]))
    try:
        folder = Path(options["path"]) if options["path"] else engine.newest_of(layout, options["release"])
        before = engine.current_directory(layout)
        protected = engine.proved_releases([Path(path) for path in options["proof_files"]])
        switched = engine.switch(layout, folder, proved=protected[:1], dry_run=module.check_mode)
        pruned: list[str] = []
        if options["keep"] > 0:
            pruned = engine.prune(layout, options["keep"], protected, using=folder, dry_run=module.check_mode)
    except KvfleetError as error:
        module.fail_json(msg=str(error), findings=[finding.as_dict() for finding in error.findings])
    result = {
        "changed": switched or bool(pruned),
        "switched": switched,
        "previous": str(before) if before else None,
        "pruned": pruned,
    }
    if module._diff:
        names = {"before": before.name if before else "", "after": folder.name}
        result["diff"] = {key: f"current: {name}\n" for key, name in names.items()}
    module.exit_json(**result)


if __name__ == "__main__":
    main()
