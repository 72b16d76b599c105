"""The proxy on a throw-away host: only the API and the health check pass, over TLS, for those on the list."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.root

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
TESTHOST = ROOT / "scripts" / "testhost"
PLAYBOOK = Path(sys.executable).parent / "ansible-playbook"
HOST = "proxy"

STAND_IN = """
import http.server
class Echo(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(("backend " + self.path).encode())
    def log_message(self, *words):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Echo).serve_forever()
"""
#: prints the status of GET path over TLS to an address, or the error's name
ASK = """
import socket, ssl, sys
address, path, tls = sys.argv[1], sys.argv[2], sys.argv[3] == "tls"
context = ssl._create_unverified_context()
try:
    with socket.create_connection((address, 8443), timeout=10) as plain:
        with (context.wrap_socket(plain) if tls else plain) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\\r\\nHost: x\\r\\nConnection: close\\r\\n\\r\\n".encode())
            print(connection.recv(4096).split()[1].decode())
except OSError as error:
    print(type(error).__name__)
"""


def ssh(command, **options):
    return subprocess.run(
        [TESTHOST, "ssh", HOST, command], text=True, capture_output=True, check=True, **options
    ).stdout.strip()


def play(inventory, playbook=HERE / "site.yml", **values):
    environment = dict(os.environ, ANSIBLE_CONFIG=str(ROOT / "ansible.cfg"), ANSIBLE_NOCOLOR="1")
    return subprocess.run(
        [PLAYBOOK, "-i", inventory, "-e", json.dumps(values), playbook],
        cwd=ROOT, env=environment, text=True, capture_output=True, check=False, timeout=500,
    )  # fmt: skip


GOOD = {
    "api_proxy_allow": ["127.0.0.1/32"],
    "api_proxy_certificate": "/etc/ssl/proxy.pem",
    "api_proxy_certificate_key": "/etc/ssl/private/proxy.key",
}


@pytest.fixture(scope="module")
def inventory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("proxy")
    subprocess.run([TESTHOST, "up", HOST, "--reuse", "--size", "64M"], check=True)
    try:
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=proxy.test",
             "-keyout", folder / "key", "-out", folder / "pem"],
            check=True, capture_output=True,
        )  # fmt: skip
        for name, path in (("pem", "/etc/ssl/proxy.pem"), ("key", "/etc/ssl/private/proxy.key")):
            ssh(f"mkdir -p /etc/ssl/private; umask 077; cat > {path}", input=(folder / name).read_text())
        ssh("cat > /root/stand_in.py", input=STAND_IN)
        ssh("cat > /root/ask.py", input=ASK)
        ssh("systemd-run --unit stand-in python3 /root/stand_in.py")
        entry = subprocess.run([TESTHOST, "inventory", HOST], text=True, capture_output=True, check=True).stdout
        path = folder / "hosts.yml"
        path.write_text("all:\n  hosts:\n" + "".join(f"    {line}\n" for line in entry.splitlines()))
        yield path
    finally:
        subprocess.run([TESTHOST, "down", HOST], check=True)


def test_without_a_list_nothing_is_installed(inventory):
    done = play(inventory, **{**GOOD, "api_proxy_allow": []})
    assert done.returncode != 0
    assert "KVF-NET-010" in done.stdout
    assert ssh("command -v nginx || echo none") == "none"


def test_a_certificate_that_is_not_there_is_told_and_comes_right_later(inventory):
    done = play(inventory, **{**GOOD, "api_proxy_certificate": "/etc/ssl/none.pem"})
    assert done.returncode != 0
    assert "KVF-NET-011" in done.stdout
    assert "/etc/ssl/none.pem" in done.stdout
    done = play(inventory, **GOOD)
    assert done.returncode == 0, done.stdout


def test_second_run_changes_nothing(inventory):
    assert "changed=0" in play(inventory, **GOOD).stdout


def ask(path, address="127.0.0.1", how="tls"):
    return ssh(f"python3 /root/ask.py {address} '{path}' {how}")


READY = "/opt/kvfleet/traffic/ready"
CONFIGURATION = "/etc/nginx/conf.d/kvfleet.conf"


def test_a_mistyped_certificate_leaves_a_proxy_that_serves(inventory):
    ssh(f"mkdir -p {Path(READY).parent}; touch {READY}")
    before = ssh(f"cat {CONFIGURATION}")
    done = play(inventory, **{**GOOD, "api_proxy_certificate": "/etc/ssl/typo.pem"})
    assert done.returncode != 0
    assert "KVF-NET-011" in done.stdout
    assert "/etc/ssl/typo.pem" in done.stdout
    assert ask("/health") == "200"
    # and after its next start
    ssh("systemctl restart nginx")
    assert ask("/health") == "200"
    assert ssh(f"cat {CONFIGURATION}") == before
    assert ssh(f"ls {Path(CONFIGURATION).parent}") == "kvfleet.conf"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/health"])
def test_api_and_health_pass(inventory, path):
    ssh(f"mkdir -p {Path(READY).parent}; touch {READY}")
    assert ask(path) == "200"


def test_a_host_out_of_traffic_fails_its_health_and_still_answers(inventory):
    ssh(f"rm -f {READY}")
    assert ask("/health") == "503"
    # what was sent before the balancer noticed is served
    assert ask("/v1/completions") == "200"
    ssh(f"touch {READY}")
    assert ask("/health") == "200"


@pytest.mark.parametrize(
    "path",
    [
        "/", "/metrics", "/tokenize", "/invocations", "/pause", "/v1", "/v1/../metrics", "/v1/%2e%2e/metrics",
        "//metrics", "/health/x", "/server_info",
    ],
)  # fmt: skip
def test_everything_else_stays_on_the_host(inventory, path):
    # "/v1" without a slash is sent on to "/v1/" by nginx itself, not by the instance
    assert ask(path) in ("404", "301") if path == "/v1" else ask(path) == "404"


def test_who_is_not_on_the_list_gets_nothing(inventory):
    own = ssh("hostname -I").split()[0]
    assert not own.startswith("127.")
    assert ask("/v1/models", own) == "403"


def test_no_plain_http(inventory):
    assert ask("/v1/models", how="plain") == "400"
    listening = ssh("ss -Hltn").splitlines()
    assert not [line for line in listening if line.split()[3].endswith(":80")]
    assert [line for line in listening if line.split()[3] == "0.0.0.0:8443"]


def test_uninstalling_leaves_nginx_to_its_other_sites(inventory):
    ssh("cat > /etc/nginx/conf.d/other.conf", input="server { listen 127.0.0.1:8081; return 204; }\n")
    ssh("systemctl reload nginx")
    main = ssh("systemctl show --property=MainPID nginx")
    done = play(inventory, ROOT / "playbooks" / "uninstall.yml", uninstall_hosts=[HOST])
    assert done.returncode == 0, done.stdout
    assert ssh("ls /etc/nginx/conf.d") == "other.conf"
    assert ssh("systemctl show --property=MainPID nginx") == main
    listening = [line.split()[3] for line in ssh("ss -Hltn").splitlines()]
    assert "127.0.0.1:8081" in listening
    assert "0.0.0.0:8443" not in listening
