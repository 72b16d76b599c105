# Copyright: kvfleet contributors
# Apache License 2.0
"""Let Ansible's workers share the controller's memory instead of copying it."""

from __future__ import annotations

DOCUMENTATION = r"""
name: lean_workers
type: aggregate
short_description: Keep Ansible's workers small in a large fleet
description:
  - A worker is a fork that lives for one task. Python's garbage collector would walk through all objects of the parent
    in it, and every page that it touches becomes a copy of the worker's own, for each of the forks.
  - Prints nothing and listens to nothing.
author: kvfleet
"""

import gc
import os

from ansible.plugins.callback import CallbackBase

os.register_at_fork(after_in_child=gc.disable)


class CallbackModule(CallbackBase):
    """Exists so that Ansible imports this file."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "lean_workers"
    CALLBACK_NEEDS_ENABLED = False
