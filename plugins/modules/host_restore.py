#!/usr/bin/python
# Copyright: kvfleet contributors
# Apache License 2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host_restore
short_description: Put the release and settings that were proved last back on a host's disk
description:
  - Writes back the unit and settings files of the last proved state and our part of nginx's configuration, removes
    those that came later, and points the release in use at the proved one. Starting the units, reloading nginx and
    proving are the next tasks.
options:
  plan:
    description: The plan that failed (C(kvfleet_plan)); its paths say where the proved state lies.
    type: dict
    required: true
attributes:
  check_mode:
    description: Not supported; it runs only after a failure.
    support: none
author: kvfleet
"""

EXAMPLES = r"""
- name: Put the proved state back
  host_restore:
    plan: "{{ kvfleet_plan }}"
  register: restored
"""

RETURN = r"""
plan:
  description: The plan of the proved state.
  returned: success
  type: dict
units:
  description: Its units in start order.
  returned: success
  type: list
  elements: str
files:
  description: Files that were written or removed.
  returned: success
  type: list
  elements: str
proxy:
  description:
    - V(wanted) when the API proxy was part of the proved state, so that nginx has to run with it again; V(removed) when
      it came with the change that failed; V(untouched) otherwise.
  returned: success
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvfleet import serving
from ansible.module_utils.kvfleet.findings import KvfleetError


def main() -> None:
    module = AnsibleModule(argument_spec={"plan": {"type": "dict", "required": True}})
    try:
        restored = serving.restore(module.params["plan"])
    except KvfleetError as error:
        module.fail_json(msg=str(error), findings=[finding.as_dict() for finding in error.findings])
    module.exit_json(changed=bool(restored["files"]), **restored)


if __name__ == "__main__":
    main()
