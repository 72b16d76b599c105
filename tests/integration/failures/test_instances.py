"""Several instances on one host, each with its own profile; what a removed one leaves, and what it does not touch."""

import pytest
from failing import ENGINE, SERVER

pytestmark = pytest.mark.root

SECOND = "kvfleet-vllm@second.service"
TINY = {"name": "tiny", "model": "/data/models/tiny", "port": 8000, "max_model_len": 4096, "max_num_seqs": 4}
BESIDE = {**TINY, "name": "second", "port": 8001, "profile": "gpu", "max_num_seqs": 2}
#: a server of an older plan, with what such a server keeps
OLD = "kvfleet-lmcache@old"
MADE = f"""
set -e
printf '[Service]\\nExecStart=/bin/sleep 9999\\n' > /etc/systemd/system/{OLD}.service
echo x > /etc/kvfleet/{OLD}.settings
install -d -o kvfleet -g kvfleet -m 0750 /var/cache/kvfleet/data/old/0123456789abcdef
echo x > /var/cache/kvfleet/data/old/0123456789abcdef/a.data
systemctl daemon-reload
systemctl start {OLD}.service
"""


def words(host, unit):
    """The command line of a unit's main process."""
    return host.sh(f"tr '\\0' '\\n' < /proc/{host.pid(unit)}/cmdline").split("\n")


def second_answers(host):
    """Whether the second instance generates."""
    return host.completion(8001, {"model": "tiny", "prompt": "x", "max_tokens": 1}) == 200


@pytest.fixture(scope="module")
def two(host):
    """The host with a second instance, without offload, beside the first; and what became of the first."""
    before = host.pid(ENGINE)
    host.play("site.yml", kvfleet_instances=[TINY, BESIDE])
    host.kept_running = host.pid(ENGINE) == before
    return host


def test_each_instance_has_its_own_profile(two, ready):
    assert second_answers(two)
    assert "--kv-transfer-config" in words(two, ENGINE)
    assert "--kv-transfer-config" not in words(two, SECOND)
    # the one without offload needs no server
    assert SERVER in two.show(ENGINE, "Requires").split()
    assert SERVER not in two.show(SECOND, "Requires").split()
    # memory is measured while they start: one after the other
    assert ENGINE in two.show(SECOND, "After").split()
    assert two.kept_running


def test_one_of_two_is_killed(two, ready, record):
    first, second = ready.pid(ENGINE), ready.pid(SECOND)
    ready.begin()
    injected = ready.now()
    ready.sh(f"kill -9 {second}")
    ready.wait("the second back", lambda: ready.pid(SECOND) not in (0, second) and second_answers(ready))
    outcome = ready.end(injected)
    assert ready.pid(ENGINE) == first
    assert outcome.lost == outcome.refused == 0
    record("`kill -9` of one of two instances", outcome, "the other one goes on; figures are those of its clients", 30)


def test_the_cache_server_takes_only_its_own_instances_along(two, ready):
    first, second = ready.pid(ENGINE), ready.pid(SECOND)
    ready.sh(f"kill -9 {ready.pid(SERVER)}")
    ready.wait("the first back", lambda: ready.pid(ENGINE) not in (0, first) and ready.well())
    assert ready.pid(SECOND) == second


def test_what_the_plan_does_not_name_any_more_goes_with_all_it_had(two, ready):
    first = ready.pid(ENGINE)
    ready.sh(MADE)
    kept = ready.sh("ls -d /var/cache/kvfleet/data/0/*").split()
    ready.play("site.yml")
    for unit in (SECOND, f"{OLD}.service"):
        assert ready.show(unit, "LoadState") == "not-found"
        assert ready.sh(f"find /etc/systemd /run/kvfleet /etc/kvfleet -name '{unit.removesuffix('.service')}*'") == ""
    assert ready.sh("ss -Hltn 'sport = :8001'") == ""
    assert ready.sh("pgrep -f '[/]bin/sleep 9999' || pgrep -f 'served-model-name [s]econd'; true") == ""
    assert ready.sh("ls /var/cache/kvfleet/data").split() == ["0"]
    assert ready.sh("ls -d /var/cache/kvfleet/data/0/*").split() == kept
    assert not [name for name in ready.sh("ls /dev/shm").split() if "second" in name or "old" in name]
    ready.wait("the watcher looks at what is left", lambda: ready.health(SECOND) == {} and ready.well())
    assert ready.pid(ENGINE) == first
