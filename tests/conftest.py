"""Make the library importable under the name that Ansible gives it on hosts."""

from pathlib import Path

import ansible.module_utils

ROOT = Path(__file__).resolve().parent.parent
ansible.module_utils.__path__.append(str(ROOT / "plugins" / "module_utils"))
