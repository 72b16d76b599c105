"""Stands in for the vllm command in a stub release: serves tests/unit/fake_stack.py over HTTP, and runs its bench."""

import argparse
import importlib.metadata
import json
import os
import pathlib
import random
import sys
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from vllm import fake_stack
from vllm.entrypoints.cli import serve as serve_command

fake_stack.CHUNK = 256


def options(words):
    parser = argparse.ArgumentParser("vllm", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", allow_abbrev=False)
    serve.add_argument("model")
    for name in (
        "host", "port", "served-model-name", "tensor-parallel-size", "max-model-len", "max-num-seqs", "kv-cache-dtype",
        "dtype", "block-size", "shutdown-timeout", "disable-access-log-for-endpoints", "kv-cache-memory-bytes",
        "gpu-memory-utilization", "load-format", "kv-transfer-config",
    ):  # fmt: skip
        serve.add_argument(f"--{name}")
    bench = commands.add_parser("bench")
    bench.add_argument("what")
    return parser.parse_known_args(words) if words[:1] == ["bench"] else (parser.parse_args(words), [])


def serve(arguments):
    stack = fake_stack.FakeStack(pool_blocks=int(arguments.kv_cache_memory_bytes) // 131072 // 16, profile="gpu")
    stack.model = arguments.served_model_name
    if arguments.kv_transfer_config:
        assert json.loads(arguments.kv_transfer_config)["kv_connector"] == "LMCacheConnectorV1"
        config = json.loads(pathlib.Path(os.environ["LMCACHE_CONFIG_FILE"]).read_text())
        print("LMCache Configuration:", config, flush=True)
        stack.profile = "disk" if config.get("local_disk") else "cpu"
        if config.get("local_disk"):
            pathlib.Path(config["local_disk"].partition("://")[2], "chunk.pt").write_bytes(os.urandom(4096))
    print("sampler", os.environ.get("VLLM_USE_FLASHINFER_SAMPLER"), flush=True)
    print(f"INFO GPU KV cache size: {stack.pool_blocks * 16:,} tokens", flush=True)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def log_message(self, *_words):
            pass

        def answer(self, text, kind="application/json"):
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self):
            if self.path == "/metrics":
                self.answer(stack.engine_page() + "\n", "text/plain")
            elif self.path == "/v1/models":
                self.answer(json.dumps({"data": [{"id": stack.model}]}))
            else:
                self.answer("{}")

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if isinstance(body["prompt"], str):
                usage = {"completion_tokens": body["max_tokens"], "prompt_tokens": 4}
                self.answer(json.dumps({"choices": [{"text": "x"}], "usage": usage}))
                return
            events = stack.serve(body)
            if not body.get("stream"):
                self.answer(json.dumps({"choices": [{"text": "x"}], "usage": {}}))
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for at, event in events:
                time.sleep(min(0.2, at / 100))
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

    ThreadingHTTPServer((arguments.host, int(arguments.port)), Handler).serve_forever()


def bench(words):
    flags = ("--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed")
    rest = [word for word in words if word not in flags]
    known = dict(zip(rest[0::2], rest[1::2], strict=True))
    count, output = int(known["--num-prompts"]), int(known["--prefix-repetition-output-len"])
    prefixes = int(known["--prefix-repetition-num-prefixes"])
    rng = random.Random(int(known["--seed"]))  # noqa: S311 - words of a load
    heads = [
        [rng.randrange(7000, 90000) for _ in range(int(known["--prefix-repetition-prefix-len"]))]
        for _ in range(prefixes)
    ]
    ttfts = []
    for number in range(count):
        tail = [rng.randrange(7000, 90000) for _ in range(int(known["--prefix-repetition-suffix-len"]))]
        body = {"model": known["--model"], "prompt": heads[number % prefixes] + tail, "max_tokens": output}
        body.update(json.loads(known["--extra-body"]))
        request = urllib.request.Request(  # noqa: S310 - the stub's own server
            known["--base-url"] + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        started = time.monotonic()
        urllib.request.urlopen(request).read()  # noqa: S310
        ttfts.append(time.monotonic() - started)
    prompt = len(heads[0]) + len(tail)
    total = sum(ttfts)
    result = {
        "completed": count, "failed": 0, "duration": total, "request_throughput": count / total,
        "output_throughput": count * output / total, "total_token_throughput": count * (prompt + output) / total,
        "total_input_tokens": count * prompt, "total_output_tokens": count * output, "ttfts": ttfts,
        "latencies": [2 * value for value in ttfts], "output_lens": [output] * count,
        "itls": [[value / output] * (output - 1) for value in ttfts], "mean_ttft_ms": 1000 * total / count,
        "mean_e2el_ms": 2000 * total / count, "mean_tpot_ms": 1.0, "mean_itl_ms": 1.0,
    }  # fmt: skip
    pathlib.Path(known["--result-dir"], known["--result-filename"]).write_text(json.dumps(result))


def main():
    if sys.argv[1:] == ["--version"]:
        print(importlib.metadata.version("vllm"))
        return
    arguments, rest = options(sys.argv[1:])
    if arguments.command == "bench":
        bench(rest)
    elif serve_command.ServeSubcommand.cmd is serve_command.original:
        serve(arguments)
    else:
        serve_command.ServeSubcommand.cmd(arguments)
