"""A small round-robin load balancer and its users: it sends only to hosts whose health endpoint says yes."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from fleet_hosts import tool


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Request:
    """One completion: the host that it was sent to, its begin and end, and what went wrong."""

    host: str
    begin: float
    end: float
    error: str | None


@dataclass
class Balancer:
    """Use it as a context: users ask, with less than a second between two requests, until it ends.

    Each host's proxy is reached through a forwarded port of its SSH connection, with TLS all the way.
    """

    hosts: list[str]
    certificate: Path
    key: str
    users: int = 2
    #: seconds between two looks at a host's health
    poll_s: float = 1.0
    requests: list[Request] = field(default_factory=list)
    #: (time, host, healthy) whenever it changed
    changes: list[tuple[float, str, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ports = {host: free_port() for host in self.hosts}
        self._healthy = dict.fromkeys(self.hosts, False)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._turn = 0
        self._tls = ssl.create_default_context(cafile=str(self.certificate))
        # the certificate has the fleet's name, the way goes through loopback
        self._tls.check_hostname = False

    def __enter__(self) -> Balancer:
        self._ways = [
            subprocess.Popen(
                ["ssh", "-F", tool("ssh-config", host).strip(), "-N", "-o", "ExitOnForwardFailure=yes",
                 "-o", "ControlMaster=no", "-o", "ControlPath=none",
                 "-L", f"127.0.0.1:{self._ports[host]}:127.0.0.1:8443", host]
            )
            for host in self.hosts
        ]  # fmt: skip
        self._threads = [threading.Thread(target=self._look, args=(host,), daemon=True) for host in self.hosts]
        self._threads += [threading.Thread(target=self._use, daemon=True) for _ in range(self.users)]
        for thread in self._threads:
            thread.start()
        end = time.time() + 30
        while not all(self._healthy.values()):
            assert time.time() < end, f"not all hosts are healthy: {self._healthy}"
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=120)
        for way in self._ways:
            way.terminate()
            way.wait(timeout=10)

    def _ask(self, host: str, path: str, body: bytes | None, limit_s: float) -> bytes:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(f"https://127.0.0.1:{self._ports[host]}{path}", body, headers)
        with urllib.request.urlopen(request, timeout=limit_s, context=self._tls) as answer:  # noqa: S310 - a test host
            return bytes(answer.read())

    def _look(self, host: str) -> None:
        while not self._stop.wait(self.poll_s if self._turn else 0.2):
            try:
                self._ask(host, "/health", None, 20)
                healthy = True
            except OSError:
                healthy = False
            with self._lock:
                if healthy != self._healthy[host]:
                    self._healthy[host] = healthy
                    self.changes.append((time.time(), host, healthy))

    def _next(self) -> str | None:
        with self._lock:
            for _ in self.hosts:
                self._turn += 1
                host = self.hosts[self._turn % len(self.hosts)]
                if self._healthy[host]:
                    return host
        return None

    def _use(self) -> None:
        number = 0
        while not self._stop.is_set():
            host = self._next()
            if host is None:
                time.sleep(0.1)
                continue
            number += 1
            prompt = [*range(10, 60), number % 500]
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
            begin, error = time.time(), None
            try:
                answer = json.loads(self._ask(host, "/v1/completions", json.dumps(body).encode(), 120))
                if answer["usage"]["completion_tokens"] != 8:
                    error = f"{answer['usage']} instead of 8 tokens"
            except (OSError, ValueError, KeyError) as caught:
                error = f"{type(caught).__name__}: {caught}"
            with self._lock:
                self.requests.append(Request(host, begin, time.time(), error))
            # two busy cores are shared with what is rolled out
            time.sleep(0.8)

    def wait_until_all_serve(self) -> None:
        """Wait until every host is healthy and has answered since."""
        began, end = time.time(), time.time() + 60
        while not all(any(one.host == host and one.begin > began for one in self.requests) for host in self.hosts):
            assert time.time() < end, f"not all hosts serve again: {self._healthy}"
            time.sleep(0.2)

    def out_of_traffic(self, host: str) -> list[tuple[float, float]]:
        """When the balancer saw the host fail its health, and when it was back."""
        seen = [(moment, healthy) for moment, name, healthy in self.changes if name == host]
        # the first change is the first look at all
        pairs = seen[1:]
        assert [healthy for _, healthy in pairs] == [False, True] * (len(pairs) // 2), pairs
        return [(pairs[at][0], pairs[at + 1][0]) for at in range(0, len(pairs), 2)]
