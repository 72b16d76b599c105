"""Running ``vllm bench serve`` on the host: one interpreter for all runs, a lock against a second benchmark."""

from __future__ import annotations

import contextlib
import fcntl
import grp
import json
import os
import pwd
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .findings import refuse

LOCK_PATH = Path("/run/kvfleet/bench.lock")

#: Every call of ``vllm bench serve`` costs 10 to 25 s of imports on two cores, so one interpreter runs the console
#: script's own entry point once per run. It waits for a line before each run (the caller reads counters in between)
#: and announces its steps on the descriptor given as its argument, apart from the tool's output.
DRIVER = r"""
import json, os, queue, sys, threading, traceback
report = os.fdopen(int(sys.argv[1]), "w", buffering=1)
orders = queue.Queue()

def read_orders():
    for line in sys.stdin:
        orders.put(line)
    # whoever gave the orders is gone: a load must not outlive it
    os._exit(0)

threading.Thread(target=read_orders, daemon=True).start()
from vllm.entrypoints.cli.main import main
print(json.dumps({"ready": True}), file=report)
while True:
    sys.argv = ["vllm", *json.loads(orders.get())]
    status = 0
    try:
        main()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else (0 if stop.code is None else 1)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    print(json.dumps({"status": status}), file=report)
"""

#: lines of the tool's output that are kept for a failure's message
_TAIL_LINES = 40


@contextlib.contextmanager
def only_benchmark(path: Path = LOCK_PATH) -> Iterator[None]:
    """Hold the host's benchmark lock; refuse (KVF-BENCH-024) when another benchmark holds it.

    The kernel releases it with the process, however that ends.
    """
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    handle = os.open(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(handle, 64).decode(errors="replace").strip() or "unknown"
            raise refuse(
                "KVF-BENCH-024",
                f"Another benchmark runs on this host (process {owner}); two at once would measure each other.",
                f"Wait for it, or end process {owner}.",
            ) from error
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(handle)


class BenchSession:
    """The release's own ``vllm bench serve`` as the service user, for several runs in one interpreter."""

    def __init__(self, release: Path, environment: Mapping[str, str], directory: Path, user: str | None = None) -> None:
        """``release`` holds ``bin/python``; ``directory`` receives result files; ``user`` runs the tool (root only)."""
        self._python = release / "bin" / "python"
        self._environment = dict(environment)
        self._directory = directory
        self._user = user
        self._process: subprocess.Popen[str] | None = None
        self._reports: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._tail: list[str] = []
        self._threads: list[threading.Thread] = []

    def start(self, timeout_s: float = 180.0) -> None:
        """Start the interpreter and wait until vLLM is imported. Raises KVF-BENCH-025 when that fails."""
        read_end, write_end = os.pipe()
        options: dict[str, Any] = {}
        if self._user and os.geteuid() == 0:
            account = pwd.getpwnam(self._user)
            groups = [entry.gr_gid for entry in grp.getgrall() if self._user in entry.gr_mem]
            options = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": groups}
            os.chown(self._directory, account.pw_uid, account.pw_gid)
        try:
            self._process = subprocess.Popen(
                [str(self._python), "-c", DRIVER, str(write_end)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace", pass_fds=(write_end,), cwd=str(self._directory),
                env=self._environment, start_new_session=True, **options,
            )  # fmt: skip
        except OSError as error:
            os.close(read_end)
            raise refuse(
                "KVF-BENCH-025",
                f"The release's interpreter {self._python} does not start: {error.strerror}.",
                "Run the deploy again, so that the release is complete.",
            ) from error
        finally:
            os.close(write_end)
        self._threads = [
            threading.Thread(target=self._collect_output, args=(self._process.stdout,), daemon=True),
            threading.Thread(target=self._collect_reports, args=(read_end,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        if not self._next_report(timeout_s):
            raise refuse(
                "KVF-BENCH-025",
                f"vllm bench serve could not be loaded from {self._python}: {self.last_line()}",
                "The benchmark could not run, which says nothing about the service: check the release's environment.",
            )

    def run(self, arguments: Sequence[str], timeout_s: float) -> int:
        """One call of ``vllm`` with ``arguments``; its exit status. KVF-BENCH-026 after ``timeout_s`` seconds."""
        process = self._process
        if process is None or process.stdin is None:
            raise RuntimeError("start() was not called")
        self._tail.clear()
        try:
            process.stdin.write(json.dumps(list(arguments)) + "\n")
            process.stdin.flush()
        except OSError:
            return 1
        try:
            # None: the driver closed its end, so it is dead or dying, whether or not it can be reaped already
            report = self._reports.get(timeout=timeout_s)
        except queue.Empty:
            raise refuse(
                "KVF-BENCH-026",
                f"The load did not end within {timeout_s:.0f} s.",
                "Read the instance's journal for hanging requests; shorten the load for slow hosts.",
            ) from None
        return 1 if report is None else int(report["status"])

    def output(self) -> str:
        """The last lines that the tool printed since the current run began."""
        return "\n".join(self._tail)

    def last_line(self) -> str:
        """The last line that is an error's own, for a message."""
        lines = [line.strip() for line in self._tail if line.strip()]
        return lines[-1][:300] if lines else "no output"

    def close(self) -> None:
        """End the interpreter and all it started."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(OSError):
            if process.stdin:
                process.stdin.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for thread in self._threads:
            thread.join(timeout=5)
        if process.stdout:
            process.stdout.close()
        self._process = None

    def __enter__(self) -> BenchSession:
        return self

    def __exit__(self, *_unused: object) -> None:
        self.close()

    def _next_report(self, timeout_s: float) -> dict[str, Any] | None:
        """The driver's next step; ``None`` when it ended or the time is over."""
        try:
            return self._reports.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _collect_output(self, stream: Any) -> None:
        for line in stream:
            self._tail.append(line.rstrip("\n")[:500])
            del self._tail[:-_TAIL_LINES]

    def _collect_reports(self, read_end: int) -> None:
        with os.fdopen(read_end) as reports:
            for line in reports:
                self._reports.put(json.loads(line))
        # wakes whoever waits: the driver is gone
        self._reports.put(None)


class Sampler:
    """Calls ``probe`` every ``interval_s`` seconds in the background and keeps (seconds since start, values)."""

    def __init__(self, probe: Any, interval_s: float) -> None:
        self._probe = probe
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self.samples: list[dict[str, Any]] = []
        self.missed = 0

    def __enter__(self) -> Sampler:
        self._started = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_unused: object) -> None:
        self._stop.set()
        self._thread.join(timeout=30)

    def _loop(self) -> None:
        while True:
            at = time.monotonic() - self._started
            try:
                self.samples.append({"at_s": round(at, 2), **self._probe()})
            except Exception:
                # a page that did not come is a gap in the series, not the end of the load
                self.missed += 1
            if self._stop.wait(self._interval_s):
                return
