"""Runs on the host: sends a request at a time, for ever, and looks at the release, the proof and the disk tier."""

import json
import threading
import time
import urllib.request
from pathlib import Path

LOG = Path("/root/load.jsonl").open("a", buffering=1)  # noqa: SIM115 - as long as the process
TIERS = Path("/var/cache/kvfleet/data")


def write(**entry):
    LOG.write(json.dumps(entry) + "\n")


def look():
    while True:
        # the tiers before the proof: what is gone was removed under the proof that is read afterwards
        tiers = sorted(path.name for path in TIERS.glob("*/*"))
        try:
            proved = json.loads(Path("/var/lib/kvfleet/proved.json").read_text())["release"]
        except (OSError, ValueError):
            proved = None
        current = Path("/opt/kvfleet/current").resolve().name
        write(kind="look", time=time.time(), current=current, proved=proved, tiers=tiers)
        time.sleep(0.5)


def ask(number):
    body = {"model": "tiny", "prompt": [*range(10, 40), number % 500], "max_tokens": 8, "ignore_eos": True}
    request = urllib.request.Request(
        "http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    start = time.time()
    try:
        with urllib.request.urlopen(request, timeout=180) as answer:  # noqa: S310 - this host
            tokens = json.load(answer)["usage"]["completion_tokens"]
        error = None if tokens == 8 else f"{tokens} tokens"
    except Exception as caught:  # whatever it is, it is a failed request
        error = f"{type(caught).__name__}: {caught}"
    write(kind="request", start=start, end=time.time(), error=error)


threading.Thread(target=look, daemon=True).start()
count = 0
while True:
    ask(count)
    count += 1
    time.sleep(0.3)
