"""Runs on the host: sends a request at a time, for ever, and looks at the release, the proof and the disk tier."""

import json
import os
import threading
import time
import urllib.request

LOG = open("/root/load.jsonl", "a", buffering=1)  # noqa: SIM115 - as long as the process
TIER = "/var/cache/kvfleet/data"


def write(**entry):
    LOG.write(json.dumps(entry) + "\n")


def look():
    while True:
        # the tiers before the proof: what is gone was removed under the proof that is read afterwards
        tiers = []
        for server in os.listdir(TIER) if os.path.isdir(TIER) else []:
            tiers += os.listdir(os.path.join(TIER, server))
        try:
            with open("/var/lib/kvfleet/proved.json") as file:
                proved = json.load(file)["release"]
        except (OSError, ValueError):
            proved = None
        current = os.path.basename(os.path.realpath("/opt/kvfleet/current"))
        write(kind="look", time=time.time(), current=current, proved=proved, tiers=sorted(tiers))
        time.sleep(0.5)


def ask(number):
    body = {"model": "tiny", "prompt": [*range(10, 40), number % 500], "max_tokens": 8, "ignore_eos": True}
    request = urllib.request.Request(
        "http://127.0.0.1:8000/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    start = time.time()
    try:
        with urllib.request.urlopen(request, timeout=180) as answer:
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
