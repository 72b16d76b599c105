"""The article's load to its end on a throw-away host: three set-ups, one report with the article's tables and plots."""

import json
import re

import proof_host
import pytest

from kvfleet import article

pytestmark = pytest.mark.root

SCALE = 0.05
CONCURRENCIES = (1, 4, 8, 16, 32)


def article_sizes(record):
    """Requests and tokens that a run of the record really had."""
    run = next(run["run"] for run in record["load"]["instances"][0]["runs"] if run["run"]["name"] == "random-c1")
    return run["requests"], run["prompt_tokens"], run["output_tokens"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A host deployed by one run of site.yml that proves it with profile article."""
    host = proof_host.ProofHost("article", tmp_path_factory.mktemp("article"))
    try:
        host.up()
        status, text = host.play(
            "site.yml", limit_s=1200, smoke_benchmark_profile="article", smoke_benchmark_article_scale=SCALE
        )
        assert status == 0, text
        yield host
    finally:
        host.down()


def test_every_set_up_ran_every_concurrency_with_the_same_pool(measured):
    records = measured.records()
    assert [record["plan_profile"] for record in records] == ["gpu", "cpu", "disk"]
    pools = set()
    for record in records:
        runs = {run["run"]["name"]: run for run in record["load"]["instances"][0]["runs"]}
        assert set(runs) == {
            "rag-populate",
            *(f"{load}-c{many}" for load in ("random", "rag") for many in CONCURRENCIES),
        }
        for run in runs.values():
            assert run["figures"]["completed"] == run["run"]["requests"]
            assert run["figures"]["failed"] == 0
        instance = record["plan"]["instances"][0]
        pools.add((instance["gpu_kv_tokens"], instance["max_num_seqs"]))
        assert record["load"]["instances"][0]["scale"] == SCALE
    assert len(pools) == 1


def test_the_disk_set_up_was_really_read_from_disk(measured):
    runs = [run for run in measured.records()[-1]["load"]["instances"][0]["runs"] if run["run"]["phase"] == "warm"]
    assert len(runs) == len(CONCURRENCIES)
    for run in runs:
        assert run["disk"]["hit_bytes"] > 0
        assert run["disk"]["served_by"] == "device"
        assert run["tokens"]["tier_disk"] > run["tokens"]["tier_cpu"]


def test_the_host_ends_in_its_own_profile(measured):
    measured.assert_unharmed()
    assert json.loads(measured.ssh("cat /var/lib/kvfleet/proved.json"))["plan_profile"] == "disk"
    assert measured.ssh(f"systemctl is-active {' '.join(proof_host.UNITS)}").split() == ["active", "active"]


def test_the_report_has_the_articles_tables_and_plots_and_needs_no_network(measured):
    page = (measured.results / "report.html").read_text()
    loads = ("prompts that repeat a prefix (RAG)", "random prompts (the article&#39;s own load)")
    tables = dict(re.findall(r"<h4>(.*?)</h4>\s*<table[^>]*>(.*?)</table>", page, re.DOTALL))
    figures = ("TTFT mean", "TTFT p99", "TPOT mean", "Requests per second", "Output tokens per second")
    assert set(tables) == {f"{figure}, {load}" for figure in figures for load in loads}
    for title, table in tables.items():
        assert re.findall(r">(gpu|cpu|disk)</th>", table) == ["gpu", "cpu", "disk"], title
        rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(<td.*?)</tr>", table, re.DOTALL)]
        assert [row[0] for row in rows] == [str(many) for many in CONCURRENCIES], title
        assert all(len(row) == 4 and all(re.match(r"[\d.,]+", cell) for cell in row) for row in rows), title
    plots = dict(re.findall(r"<figcaption>(.*?)</figcaption>(<svg.*?</svg>)", page, re.DOTALL))
    for load in loads:
        for figure in ("Mean TTFT", "Throughput", "Output"):
            words = re.findall(r"<text[^>]*>(.*?)</text>", plots[f"{figure}, {load}"])
            assert {"gpu", "cpu", "disk", "requests at a time", *map(str, CONCURRENCIES)} <= set(words)
    assert {"Use of the engine&#39;s KV pool", "Bytes in the tiers"} <= set(plots)
    assert page.count('data-l="here, disk"') == len(article.STATEMENTS)
    requests, tokens_in, tokens_out = article_sizes(measured.records()[-1])
    assert f"scale {SCALE:g}: {requests} requests of {tokens_in} tokens in and {tokens_out} out" in page.lower()
    assert not re.search(r'(src|href)\s*=\s*"?(https?:)?//', page)
    assert "<script" not in page
