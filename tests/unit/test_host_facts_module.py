"""The module ``host_facts``: the description of this machine, in check mode too."""

import pytest
from ansible.module_utils import basic
from ansible.module_utils.testing import patch_module_args

import host_facts


@pytest.mark.parametrize("check_mode", [False, True])
def test_describes_this_machine(monkeypatch, check_mode):
    seen = {}

    def leave(_, **result):
        seen.update(result)
        raise SystemExit

    monkeypatch.setattr(basic.AnsibleModule, "exit_json", leave)
    with patch_module_args({"_ansible_check_mode": check_mode}), pytest.raises(SystemExit):
        host_facts.main()
    assert seen["changed"] is False
    wanted = "hostname gpus driver_version memory numa cpus disks shm_bytes python glibc kernel os machine unavailable"
    assert set(wanted.split()) <= set(seen["host"])
