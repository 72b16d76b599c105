#!/usr/bin/python
# Copyright: kvfleet contributors
# Apache License 2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: support_bundle
short_description: Collect what a person needs to understand a failure, without secrets
description:
  - Journals and status of the units, plan, unit and settings files, last proofs, nvidia-smi, lsblk, mounts, listeners
    and the kernel's last lines, in one gzipped tar that only root reads. API keys, passwords, tokens and private keys
    are replaced.
options:
  plan:
    description: The host's plan (C(kvfleet_plan)).
    type: dict
    required: true
  reason:
    description: Why the bundle is made.
    type: str
    default: ""
  dest:
    description: The archive on the host.
    type: path
    required: true
attributes:
  check_mode:
    description: Not supported; it runs only after a failure.
    support: none
author: kvfleet
"""

EXAMPLES = r"""
- name: Collect a support bundle
  support_bundle:
    plan: "{{ kvfleet_plan }}"
    dest: /run/kvfleet-support.tar.gz
"""

RETURN = r"""
dest:
  description: The archive.
  returned: success
  type: str
names:
  description: What is in it.
  returned: success
  type: list
  elements: str
"""

import os
import platform
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.kvfleet import support
from ansible.module_utils.kvfleet.command import run_command


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "plan": {"type": "dict", "required": True},
            "reason": {"type": "str", "default": ""},
            "dest": {"type": "path", "required": True},
        }
    )
    texts = support.collect(module.params["plan"], module.params["reason"], run_command)
    path = Path(module.params["dest"])
    path.unlink(missing_ok=True)
    handle = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(support.pack(texts, f"support-{platform.node()}"))
    module.exit_json(changed=True, dest=str(path), names=sorted(texts))


if __name__ == "__main__":
    main()
