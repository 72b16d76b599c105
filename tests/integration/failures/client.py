#!/usr/bin/env python3
"""Runs on the host under test: sends fixed prompts, keeps every answer, says which were lost and which were wrong.

client.py expect FILE            each prompt alone, cold; the tokens become the truth
client.py load FILE SECONDS OUT  two at a time until SECONDS have passed or OUT.stop exists, one JSON line each
"""

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

URL = "http://127.0.0.1:8000/v1/completions"
KEY = "canary-5f2c9b41d7e84a06"
PROMPTS = 6
#: two chunks of 256 tokens and a rest
PROMPT_TOKENS = 600
ANSWER_TOKENS = 8


def prompt(number):
    """Token ids of prompt ``number``: a fixed pseudo-random walk over the plain tokens."""
    value, ids = number + 1, []
    for _ in range(PROMPT_TOKENS):
        value = value * 1103515245 + 12345 & 0x7FFFFFFF
        ids.append(300 + (value >> 8) % 600)
    return ids


def ask(number, timeout_s=120, **extra):
    """``(tokens, error)`` of one request; tokens are ids as text."""
    body = {
        "model": "tiny", "prompt": prompt(number), "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
        "return_tokens_as_token_ids": True, "logprobs": 0, **extra,
    }  # fmt: skip
    request = urllib.request.Request(
        URL, json.dumps(body).encode(), {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310 - always http
            choice = json.loads(answer.read())["choices"][0]
            if choice["finish_reason"] not in ("length", "stop"):
                # an answer that says itself that it was cut short is lost, not wrong
                return None, f"cut short ({choice['finish_reason']})"
            return choice["logprobs"]["tokens"], None
    except urllib.error.HTTPError as error:
        return None, f"HTTP {error.code}"
    except (OSError, ValueError, KeyError) as error:
        return None, f"{type(error).__name__}: {error}"


def expect(path):
    answers = []
    for number in range(PROMPTS):
        tokens, error = ask(number)
        if error:
            sys.exit(f"client: prompt {number}: {error}")
        answers.append(tokens)
    if len({tuple(answer) for answer in answers}) != PROMPTS:
        sys.exit("client: two prompts have the same answer, so a wrong one could pass for right")
    path.write_text(json.dumps(answers))


def load(path, seconds, out):
    answers = json.loads(path.read_text())
    stop = Path(f"{out}.stop")
    end = time.time() + seconds
    lock = threading.Lock()
    with out.open("w") as lines:

        def send(first):
            number = first
            while time.time() < end and not stop.exists():
                began = time.time()
                tokens, error = ask(number % PROMPTS)
                line = {
                    "began": began, "ended": time.time(), "error": error,
                    "wrong": error is None and tokens != answers[number % PROMPTS],
                }  # fmt: skip
                with lock:
                    lines.write(json.dumps(line) + "\n")
                    lines.flush()
                number += 1
                # a client that is refused waits a moment, as real ones do
                time.sleep(0.5 if error else 0.1)

        threads = [threading.Thread(target=send, args=(first,)) for first in (0, PROMPTS // 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    Path(f"{out}.done").touch()


if __name__ == "__main__":
    if sys.argv[1] == "expect":
        expect(Path(sys.argv[2]))
    else:
        load(Path(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
