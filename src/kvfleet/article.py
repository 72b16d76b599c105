"""What the background article reported, for showing beside measured figures; its own numbers, unverified.

Machine: 2 x A100 80 GB, EPYC 7543, 512 GB RAM, PM9A3 NVMe; Meta-Llama-3-8B-Instruct, tensor parallel 2; 200 requests of
2048 tokens in and 128 out. Its tables did not survive, these figures stand in its text.
"""

from __future__ import annotations

MACHINE = "2 x A100 80 GB, Llama-3-8B, 200 requests of 2048 tokens in and 128 out"

#: measure, figure (a key of report.TABLES), concurrency, and what the article says for gpu, cpu and disk
STATEMENTS: tuple[tuple[str, str, int, str, str, str], ...] = (
    ("TTFT at low concurrency", "ttft_mean_ms", 1, "reference", "almost equal", "slightly worse"),
    ("TTFT at 8", "ttft_mean_ms", 8, "-", "-", "687 ms"),
    ("TTFT at 16", "ttft_mean_ms", 16, "-", "hardly any loss up to 16", "1142 ms"),
    ("TTFT at 32", "ttft_mean_ms", 32, "-", "-", "2.2 s"),
    ("p99 TTFT at 32", "ttft_tail_ms", 32, "-", "a little over 1 s", "over 6 s"),
    ("requests/s at 16", "requests_per_s", 16, "-", "above GPU only", "9.24, below GPU only"),
    ("requests/s at 32", "requests_per_s", 32, "18.04", "28.45 (+57.7 %)", "8.63"),
    ("TPOT at 32", "tpot_mean_ms", 32, "-", "27 ms", "about 59 ms"),
)
