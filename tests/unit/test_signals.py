"""What a signal does to a command that runs the fleet."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

#: says on standard output that it waits, and in the file when it was told to end and could still print
WAITS = """
import sys, time
from kvfleet.commands.fleet import stopped_by_signals
with stopped_by_signals() as cancel:
    print("waiting", flush=True)
    end = time.monotonic() + 20
    while not cancel.is_set() and time.monotonic() < end:
        time.sleep(0.05)
    told = cancel.is_set()
    print("told" * told, flush=True)
    open(sys.argv[1], "w").write("told" if told else "not told")
"""
#: as under a login shell, also where these tests themselves run under nohup, whose children ignore SIGHUP
HEARS = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL){WAITS}"


def test_a_lost_terminal_ends_the_run_with_a_result(tmp_path: Path) -> None:
    said = tmp_path / "said"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", HEARS, str(said)])  # noqa: S606 - this very python
    assert b"waiting" in os.read(terminal, 100)
    # the kernel tells the session's leader; what it prints then goes to a terminal that is gone
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert said.read_text() == "told"


@pytest.mark.parametrize("numbers", [[signal.SIGHUP, signal.SIGHUP], [signal.SIGTERM], [signal.SIGINT]])
def test_signals_end_the_run_with_a_result(tmp_path: Path, numbers: list[signal.Signals]) -> None:
    command = [sys.executable, "-c", HEARS, tmp_path / "said"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"waiting\n"
        for number in numbers:
            process.send_signal(number)
        # what is no terminal still gets the result
        assert process.stdout.read() == b"told\n"
    assert process.returncode == 0
    assert (tmp_path / "said").read_text() == "told"


def test_nohup_holds(tmp_path: Path) -> None:
    command = ["nohup", sys.executable, "-c", WAITS, tmp_path / "said"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"waiting\n"
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.terminate()
        assert process.stdout.read() == b"told\n"
