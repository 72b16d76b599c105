"""The driver process and the lock, with a stand-in package named vllm under the real interpreter."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvfleet.core import bench_session
from kvfleet.core.findings import KvfleetError

MAIN = """
import json, os, sys, time
from pathlib import Path
def main():
    words = sys.argv[1:]
    with open("calls", "a") as calls:
        calls.write(json.dumps([os.getpid(), words]) + chr(10))
    if "sleep" in words:
        time.sleep(60)
    if "crash" in words:
        raise RuntimeError("boom")
    if "exit" in words:
        sys.exit(3)
    if "refuse" in words:
        sys.exit("usage: wrong option")
    print("done", os.environ.get("OPENAI_API_KEY", "no key"))
"""


@pytest.fixture
def release(tmp_path):
    package = tmp_path / "packages/vllm/entrypoints/cli"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "main.py").write_text(MAIN)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    return tmp_path


def session(release, **environment):
    work = release / "work"
    work.mkdir(exist_ok=True)
    base = {"PYTHONPATH": str(release / "packages"), "PATH": os.environ["PATH"]}
    return bench_session.BenchSession(release, {**base, **environment}, work)


def calls(release):
    return [json.loads(line) for line in (release / "work/calls").read_text().splitlines()]


def test_all_runs_share_one_interpreter(release):
    with session(release, OPENAI_API_KEY="k") as running:
        running.start(30)
        assert running.run(["bench", "serve", "a"], 30) == 0
        assert running.run(["bench", "serve", "b"], 30) == 0
        deadline = time.monotonic() + 5
        while "done" not in running.output() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert running.last_line() == "done k"
    made = calls(release)
    assert [words[-1] for _, words in made] == ["a", "b"]
    assert len({pid for pid, _ in made}) == 1


@pytest.mark.parametrize(("word", "status"), [("crash", 1), ("exit", 3), ("refuse", 1)])
def test_a_run_that_fails_has_its_status_and_the_next_one_runs(release, word, status):
    with session(release) as running:
        running.start(30)
        assert running.run([word], 30) == status
        assert running.run(["fine"], 30) == 0


def test_a_run_beyond_its_limit_is_ended_with_all_it_started(release):
    with session(release) as running:
        running.start(30)
        with pytest.raises(KvfleetError, match="KVF-BENCH-026"):
            running.run(["sleep"], 0.5)
        pid = calls(release)[0][0]
    assert not Path(f"/proc/{pid}").exists()


def test_a_release_without_the_engine_says_that_the_benchmark_could_not_run(release):
    (release / "packages/vllm/entrypoints/cli/main.py").write_text("import no_such_module_anywhere")
    with session(release) as running, pytest.raises(KvfleetError, match="no_such_module_anywhere"):
        running.start(30)
    (release / "bin/python").unlink()
    with session(release) as running, pytest.raises(KvfleetError, match="KVF-BENCH-025"):
        running.start(30)


def test_a_driver_that_is_killed_is_a_failed_run(release):
    with session(release) as running:
        running.start(30)
        running.run(["a"], 30)
        os.kill(calls(release)[0][0], signal.SIGKILL)
        assert running.run(["b"], 30) == 1


def test_the_load_ends_when_whoever_started_it_dies(release):
    parent = f"""
import sys, time
sys.path.insert(0, {str(Path(bench_session.__file__).parent.parent)!r})
from core import bench_session
from pathlib import Path
release = Path({str(release)!r})
running = bench_session.BenchSession(release, {{"PYTHONPATH": str(release / "packages")}}, release / "work")
running.start(30)
print("started", flush=True)
running.run(["sleep"], 60)
"""
    (release / "work").mkdir()
    started = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline().strip() == "started"
    deadline = time.monotonic() + 10
    while not (release / "work/calls").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    pid = calls(release)[0][0]
    started.kill()
    started.wait()
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid):
    """Whether a process runs; one that nobody reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_lock_names_its_owner_and_ends_with_it(tmp_path):
    lock = tmp_path / "run/bench.lock"
    with (
        bench_session.only_benchmark(lock),
        pytest.raises(KvfleetError, match=f"process {os.getpid()}"),
        bench_session.only_benchmark(lock),
    ):
        pass
    with bench_session.only_benchmark(lock):
        pass


def test_sampling_survives_a_page_that_does_not_come():
    answers = iter([{"a": 1}, OSError("gone"), {"a": 2}])

    def probe():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with bench_session.Sampler(probe, 0.01) as sampler:
        deadline = time.monotonic() + 5
        while len(sampler.samples) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert [entry["a"] for entry in sampler.samples] == [1, 2]
    assert sampler.missed >= 1
