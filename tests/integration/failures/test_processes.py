"""Processes that die or hang under load: the services come back by themselves, and no answer is ever wrong."""

import time

import pytest
from failing import ENGINE, SERVER

pytestmark = pytest.mark.root


def restarted(host, unit, before):
    """Whether ``unit`` runs with another main process than ``before`` and is well."""
    return lambda: host.show(unit, "MainPID") not in ("0", str(before)) and host.well()


def test_kill_engine_core(ready, record):
    engine = ready.pid(ENGINE)
    ready.begin()
    injected = ready.now()
    ready.sh(f"kill -9 {ready.pid(ENGINE, 'EngineCor')}")
    ready.wait("the instance back", restarted(ready, ENGINE, engine))
    record(
        "`kill -9` of EngineCore",
        ready.end(injected),
        "the API server ends with status 0, systemd restarts the instance",
    )


def test_kill_api_server(ready, record):
    engine = ready.pid(ENGINE)
    ready.begin()
    injected = ready.now()
    ready.sh(f"kill -9 {engine}")
    ready.wait("the instance back", restarted(ready, ENGINE, engine))
    outcome = ready.end(injected)
    left = ready.sh("ls /dev/shm").split()
    assert not [
        name for name in left if name.startswith("psm_") and not ready.sh(f"grep -l {name} /proc/*/maps", check=False)
    ]
    record("`kill -9` of the API server", outcome, "systemd kills what is left of the unit and restarts it")


def test_kill_cache_server(ready, record):
    server, engine = ready.pid(SERVER), ready.pid(ENGINE)
    ready.begin()
    injected = ready.now()
    ready.sh(f"kill -9 {server}")
    ready.wait("both back", restarted(ready, SERVER, server))
    outcome = ready.end(injected)
    seen = "restarted with it" if ready.pid(ENGINE) != engine else "kept running"
    record("`kill -9` of the LMCache server", outcome, f"systemd restarts the server; the instance is {seen}")


def test_engine_hangs(ready, record):
    engine = ready.pid(ENGINE)
    ready.begin()
    injected = ready.now()
    ready.sh(f"kill -STOP {ready.pid(ENGINE, 'EngineCor')}")
    ready.wait("the instance back", restarted(ready, ENGINE, engine))
    outcome = ready.end(injected)
    assert int(ready.health(ENGINE)["restarts"]) >= 1
    record(
        "`SIGSTOP` of EngineCore (a hang)",
        outcome,
        "the watcher gets no token and sees no step, kills and restarts it",
        90,
    )


def test_cache_server_is_slow(ready, record):
    server, engine = ready.pid(SERVER), ready.pid(ENGINE)
    ready.begin()
    injected = ready.now()
    ready.sh(f"kill -STOP {server}; sleep 20; kill -CONT {server}")
    time.sleep(5)
    ready.wait("both well", ready.well)
    outcome = ready.end(injected)
    assert ready.pid(SERVER) == server
    seen = "kept running" if ready.pid(ENGINE) == engine else "was restarted"
    record(
        "LMCache server stopped for 20 s (`SIGSTOP`)", outcome, f"the instance {seen}; requests waited or were computed"
    )


def test_out_of_memory_inside_the_unit(ready, record):
    """What the kernel does to one process of the unit when memory is short: SIGKILL. The cgroup's own limit is used
    where the host may set one."""
    engine = ready.pid(ENGINE)
    group = "/sys/fs/cgroup" + ready.show(ENGINE, "ControlGroup")
    limited = ready.sh(f"test -w '{group}/memory.max' && echo yes", check=False).strip() == "yes"
    ready.begin()
    injected = ready.now()
    if limited:
        ready.sh(f"echo 400M > '{group}/memory.max'")
    else:
        worker = ready.pid(ENGINE, "VLLM::W")
        ready.sh(f"kill -9 {worker}")
    ready.wait("the instance back", restarted(ready, ENGINE, engine))
    how = (
        "the unit's memory.max was lowered"
        if limited
        else "no memory controller here: the worker got the kernel's SIGKILL"
    )
    record("out of memory inside the unit", ready.end(injected), f"{how}; systemd restarts the instance", 90)
