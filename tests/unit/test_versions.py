"""Version order and ranges, against the ``packaging`` library as the independent source."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion
from packaging.version import Version as Reference

from kvfleet.core.findings import KvfleetError
from kvfleet.core.versions import Range, Version, parse, parse_range

SPELLINGS = [
    "0.32.0",
    "v1.0",
    "0.8.5.post1",
    "0.5.7rc2",
    "0.5.7-rc.2",
    "0.5.7RC2",
    "1.0a1.dev3",
    "1.0.dev4",
    "1.0-1",
    "1!2.0",
    "2.13.0+cu130",
    "2.13.0+CPU",
    "1.0+abc.5-x_1",
    "3.11",
    "580.159.03",
    "1.0preview",
    "1.0rc",
    "1.0.rev3",
]
NONSENSE = ["", "latest", "0.32.", "0..1", "1.0+", "1.0 2.0", "0.32.0; rm -rf /", None, 0.32, "==1.0", "1.x"]

versions = st.builds(
    lambda release, pre, post, dev, local: (
        ".".join(map(str, release))
        + (f"{pre[0]}{pre[1]}" if pre else "")
        + (f".post{post}" if post is not None else "")
        + (f".dev{dev}" if dev is not None else "")
        + (f"+{local}" if local else "")
    ),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.none() | st.tuples(st.sampled_from(["a", "b", "rc"]), st.integers(0, 3)),
    st.none() | st.integers(0, 2),
    st.none() | st.integers(0, 2),
    st.none() | st.sampled_from(["cpu", "cu130", "cu130.1", "7", "12"]),
)
plain = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(lambda parts: ".".join(map(str, parts)))
operands = plain | st.builds(lambda v, s: v + s, plain, st.sampled_from(["rc1", ".post1", ".dev1", "a2"]))
clauses = (
    st.builds(lambda op, v: op + v, st.sampled_from([">=", "<=", "<", ">", "==", "!="]), operands)
    | st.builds(lambda op, v: f"{op}{v}.*", st.sampled_from(["==", "!="]), plain)
    | st.builds(lambda major, v: f"~={major}.{v}", st.integers(0, 4), plain)
)


@pytest.mark.parametrize("text", SPELLINGS)
def test_spellings_normalise_as_packaging_does(text: str) -> None:
    assert str(Version(text)) == str(Reference(text))
    assert Version(text).public == Reference(text).public
    assert Version(text).is_prerelease == Reference(text).is_prerelease


@settings(deadline=None)
@given(versions, versions)
def test_order_is_packagings_order(one: str, other: str) -> None:
    assert (Version(one) < Version(other)) == (Reference(one) < Reference(other))
    assert (Version(one) == Version(other)) == (Reference(one) == Reference(other))
    if Version(one) == Version(other):
        assert hash(Version(one)) == hash(Version(other))


@settings(deadline=None)
@example("0.dev0", "<0.post1")
@example("1.0.post1", ">1.0rc1")
@given(versions, st.lists(clauses, min_size=1, max_size=3).map(",".join))
def test_ranges_hold_as_packagings_do(version: str, text: str) -> None:
    assert (version in Range(text)) == SpecifierSet(text).contains(version, prereleases=True)


# what random choice seldom hits: later builds at a limit, trailing zeros, local parts, pre-releases of a limit
EDGES = [
    ("1.0.post1", ">1.0"),
    ("1.0.post1", ">1.0.post0"),
    ("1.1", ">1.0.post1"),
    ("1.0+cpu", ">1.0"),
    ("1.0+cpu", "==1.0"),
    ("1.0+cpu", "==1.0+cu130"),
    ("1.0+cpu", "<=1.0"),
    ("1", "==1.0.0"),
    ("1.0.0", ">=1"),
    ("1.0rc1", "<1.0"),
    ("1.0rc1", "<1.0rc2"),
    ("1.0.dev1", ">=1.0a1"),
    ("1.0", "==1.0.*"),
    ("1", "==1.0.*"),
    ("1.0.1", "~=1.0"),
    ("1.1", "~=1.0.0"),
    ("1!1.0", ">=2.0"),
]


@pytest.mark.parametrize(("version", "text"), EDGES)
def test_edges_of_ranges_are_packagings(version: str, text: str) -> None:
    assert (version in Range(text)) == SpecifierSet(text).contains(version, prereleases=True)


def test_trailing_zeros_do_not_make_another_version() -> None:
    assert Version("1.0") == Version("1.0.0.0") == Version("1")
    assert len({Version("1.0"), Version("1"), Version("1.0.0")}) == 1


@pytest.mark.parametrize("text", ["*", "", " "])
def test_a_star_holds_for_everything(text: str) -> None:
    assert "0.0.1.dev0" in Range(text)
    assert "9!9" in Range(text)


@pytest.mark.parametrize("text", NONSENSE)
def test_nonsense_is_refused_and_the_setting_is_named(text: object) -> None:
    if isinstance(text, str):
        with pytest.raises(InvalidVersion):
            Reference(text)
    with pytest.raises(KvfleetError, match=r"KVF-REL-001.*--vllm is"):
        parse(text, "--vllm")


@pytest.mark.parametrize("text", ["3.11", ">=3.11;<3.14", ">3.11,", "=>3", ">=three", None, 3.11, ">=1.0.*"])
def test_a_bad_range_is_refused_and_the_setting_is_named(text: object) -> None:
    with pytest.raises(KvfleetError, match=r"KVF-REL-002.*python of release x"):
        parse_range(text, "python of release x")


def test_minor_names_the_interpreter() -> None:
    assert Version("3.11.2").minor == "3.11"
    assert Version("3").minor == "3.0"
