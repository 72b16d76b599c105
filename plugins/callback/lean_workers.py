# Copyright: kvfleet contributors
# Apache License 2.0
"""Let Ansible's workers share the controller's memory instead of copying it."""

from __future__ import annotations

DOCUMENTATION = r"""
name: lean_workers
type: aggregate
short_description: Keep Ansible's workers small and quick in a large fleet
description:
  - A worker is a fork that lives for one task. Python's garbage collector would walk through all objects of the parent
    in it, and every page that it touches becomes a copy of the worker's own, for each of the forks.
  - What every worker would load for itself, because its parent never needed it, is loaded once, in the parent.
  - Prints nothing and listens to nothing.
author: kvfleet
"""

import gc
import os

from ansible.plugins import loader
from ansible.plugins.callback import CallbackBase
from ansible.template import Templar, trust_as_template

os.register_at_fork(after_in_child=gc.disable)

# the lexer, all filters and all tests
Templar().template(trust_as_template("{{ '' | default('') is defined }}"))
for plugins, names in (
    (loader.action_loader, ("normal", "set_fact", "debug", "validate_argument_spec")),
    (loader.connection_loader, ("ssh", "local")),
    (loader.become_loader, ("sudo",)),
    (loader.shell_loader, ("sh",)),
    (loader.lookup_loader, ("file", "vars", "varnames")),
):
    for name in names:
        plugins.get(f"ansible.builtin.{name}", class_only=True)


class CallbackModule(CallbackBase):  # type: ignore[misc]
    """Exists so that Ansible imports this file."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "lean_workers"
    CALLBACK_NEEDS_ENABLED = False
