"""Three throw-away hosts that serve the tiny model with the real engine, behind proxies, with a vaulted key."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bundle_folder import prepare_bundle_folder
from fleet_hosts import ROOT, VALUES, carry_model, ssh, tool, write_inventory

from kvfleet import fleet
from kvfleet.checkout import cache_directory

sys.path[:0] = [str(ROOT / "tests" / "integration" / "releases"), str(ROOT / "tests" / "unit")]
import bad_releases  # noqa: E402 - the stub wheels live with the releases' tests

BIN = Path(sys.executable).parent
#: kept between the parts
FOLDER = cache_directory() / "test-fleet"
CANARY, FIRST, SECOND = HOSTS = ["wave-a", "wave-b", "wave-c"]
RELEASE = "cpu-0.32.0-0.5.6"
UNIT = "kvfleet-vllm@tiny.service"
#: files of what must stand nowhere else on the controller: the API's key, and the password of the vault that holds it
SECRETS = {"key": FOLDER / "api.key", "password": FOLDER / "vault.pass"}
#: the task that restarts: where a run is hit
RESTART = "Bring servers and instances to the rendered state"

SETTINGS: dict[str, Any] = {
    **VALUES,
    "kvfleet_api_key": "{{ vault_api_key }}",
    "kvfleet_api_proxy": True,
    "api_proxy_allow": ["127.0.0.1/32"],
    "api_proxy_certificate": "/etc/ssl/proxy.pem",
    "api_proxy_certificate_key": "/etc/ssl/private/proxy.key",
    # after the canary one host, then the next
    "kvfleet_batches": [1],
    "kvfleet_drain_notice_s": 3,
    "kvfleet_releases_extra": [row for row in bad_releases.rows() if row["id"] == bad_releases.NEVER_READY],
    "engine_bundle": str(FOLDER / "bundles"),
    "engine_lock": (
        f"{FOLDER}/locks/{{{{ kvfleet_plan['release']['id'] }}}}-{{{{ kvfleet_plan['release']['platform'] }}}}.txt"
    ),
    "host_plan_output_dir": str(FOLDER / "plans"),
    "smoke_benchmark_results_dir": str(FOLDER / "results"),
    # a pool small enough that a proof takes seconds; three hosts share the machine's cores, so times of one say nothing
    # and the counters alone tell which tier served
    "kvfleet_kv_pool_gib": 0.02,
    "smoke_benchmark_min_warm_speedup_ram": 0,
    "smoke_benchmark_min_warm_speedup_disk": 0,
    "smoke_benchmark_cold_limit_s": 10,
    "smoke_benchmark_settle_limit_s": 12,
}


class ServingFleet:
    """The hosts, their inventory, and runs against them."""

    inventory = FOLDER / "inventory"
    certificate = FOLDER / "proxy.pem"
    runs = FOLDER / "runs"

    def prepare(self) -> None:
        """Everything on the controller: bundles, locks, certificate, vault."""
        os.environ["ANSIBLE_VAULT_PASSWORD_FILE"] = str(SECRETS["password"])
        prepare_bundle_folder(FOLDER)
        subprocess.run([BIN / "kvfleet", "bundle", RELEASE, "--output", FOLDER / "bundles"], check=True)
        bad_releases.build(FOLDER / "bad", FOLDER / "bundles", FOLDER / "locks", [bad_releases.NEVER_READY])
        for path in SECRETS.values():
            if not path.exists():
                path.touch(mode=0o600)
                path.write_text(secrets.token_hex(16))
        if not self.certificate.exists():
            subprocess.run(
                ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=fleet.test",
                 "-keyout", FOLDER / "proxy.key", "-out", self.certificate],
                check=True, capture_output=True,
            )  # fmt: skip

    def write_inventory(self, seqs: int = 4) -> None:
        """Hosts and values, the key in a vault; ``seqs`` is the setting that the tests change."""
        shutil.rmtree(self.inventory, ignore_errors=True)
        write_inventory(FOLDER, HOSTS)
        instance = {**VALUES["kvfleet_instances"][0], "max_model_len": 2048, "max_num_seqs": seqs}
        everybody = self.inventory / "group_vars" / "all"
        (self.inventory / "group_vars" / "all.yml").unlink()
        everybody.mkdir()
        (everybody / "main.yml").write_text(json.dumps({**SETTINGS, "kvfleet_instances": [instance]}))
        words = [BIN / "ansible-vault", "encrypt_string", "--stdin-name", "vault_api_key"]
        made = subprocess.run(
            words, input=SECRETS["key"].read_text(), text=True, capture_output=True, check=True, cwd=ROOT
        )
        (everybody / "vault.yml").write_text(made.stdout)

    @property
    def seqs(self) -> int:
        """What the inventory wants."""
        values = json.loads((self.inventory / "group_vars" / "all" / "main.yml").read_text())
        return int(values["kvfleet_instances"][0]["max_num_seqs"])

    def change(self) -> int:
        """Let the inventory want another number of sequences, which restarts every instance; returns it."""
        wanted = 3 if self.seqs == 4 else 4
        self.write_inventory(wanted)
        return wanted

    def is_ready(self) -> bool:
        """Whether an earlier part left all hosts as the next one needs them."""
        listed = {host["name"]: host["state"] for host in json.loads(tool("list", "--json"))}
        if any(listed.get(name) != "running" for name in HOSTS) or not self.inventory.is_dir():
            return False
        return all(
            self.seen(name)["seqs"] == self.seqs and self.seen(name)["ready"] and self.seen(name)["proved"]
            for name in HOSTS
        )

    def deploy(self) -> None:
        """From nothing to three proved hosts; keeps the events for the test that looks at their order."""
        shutil.rmtree(self.runs, ignore_errors=True)
        for name in HOSTS:
            tool("up", name, "--reuse", "--size", "2G")
            carry_model(name, FOLDER)
            tool("ssh", name, "cat > /etc/ssl/proxy.pem", stdin=self.certificate.open())
            key = "mkdir -p /etc/ssl/private; umask 077; cat > /etc/ssl/private/proxy.key"
            tool("ssh", name, key, stdin=(FOLDER / "proxy.key").open())
        self.write_inventory()
        with (FOLDER / "deploy.jsonl").open("w") as log:
            done = self.run(fleet.Action.DEPLOY, lambda event: log.write(json.dumps(event.as_dict()) + "\n"))
        (FOLDER / "deploy.json").write_text(json.dumps(done.as_dict()))
        assert done.exit == 0, json.dumps(done.as_dict(), indent=1)

    def down(self) -> None:
        """Remove the hosts and what the controller keeps of them, apart from bundles."""
        for name in HOSTS:
            subprocess.run([ROOT / "scripts" / "testhost", "down", name], check=False, capture_output=True)
        shutil.rmtree(self.inventory, ignore_errors=True)

    def run(
        self, action: fleet.Action, on_event: Callable[[fleet.FleetEvent], None] | None = None, **options: Any
    ) -> fleet.FleetResult:
        """One run, as a service would start it; its files stay for the test that looks for secrets."""
        done = fleet.run(action, self.inventory, on_event=on_event, artifacts=self.runs, keep=50, **options)
        short = {name: (str(host.verdict), host.figure, host.reasons[:2]) for name, host in done.hosts.items()}
        print(f"{action} ended with {int(done.exit)} after {done.seconds:.0f} s: {short}", flush=True)
        return done

    def seen(self, name: str) -> dict[str, Any]:
        """What runs on a host: the setting, since when it is proved, the instance's start, whether it takes traffic."""
        text = ssh(
            name,
            f"cat /var/lib/kvfleet/proved.json 2>/dev/null || echo '{{}}'; echo ---;"
            f"systemctl show -P InvocationID {UNIT};"
            f"sed -n 's/.*--max-num-seqs \\([0-9]*\\).*/\\1/p' /etc/systemd/system/{UNIT} 2>/dev/null;"
            "ls /opt/kvfleet/traffic/ready 2>/dev/null; readlink /opt/kvfleet/current; true",
        )
        proof, _, rest = text.partition("---\n")
        lines = [line for line in rest.splitlines() if line]
        record = json.loads(proof or "{}")
        return {
            "proved": record.get("time"),
            "release": record.get("release"),
            "start": lines[0] if lines else None,
            "seqs": next((int(line) for line in lines if line.isdigit() and len(line) < 3), None),
            "ready": any(line.endswith("/ready") for line in lines),
        }

    def all_seen(self) -> dict[str, dict[str, Any]]:
        """:meth:`seen` of every host."""
        return {name: self.seen(name) for name in HOSTS}


def verdicts(done: fleet.FleetResult) -> dict[str, str]:
    """What became of each host."""
    return {name: str(host.verdict) for name, host in done.hosts.items()}
