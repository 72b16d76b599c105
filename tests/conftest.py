"""Make the library importable under the name that Ansible gives it on hosts; fix the property tests' examples in CI."""

import os
from pathlib import Path

import ansible.module_utils
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
ansible.module_utils.__path__.append(str(ROOT / "plugins" / "module_utils"))

# a red build must be red again when it is repeated: random examples are for people, fixed ones for CI
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
