"""Take secrets out of what leaves a host or a run: results, events, support bundles.

Two nets: names that hold secrets (whatever the value), and texts that look like one (whatever the name). A value that
is known to be secret (an API key of the inventory) can be given and disappears wherever it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

HIDDEN = "[removed]"

#: names of settings whose values are secret; "token" alone is not enough, because models count tokens
_NAME = re.compile(
    r"api[-_]?key|passw(?:or)?d|passphrase|secret|credential|private[-_]?key|authorization|"
    r"(?:hf|hub|access|auth|bearer|refresh|vault|session)[-_]?token|^token$",
    re.IGNORECASE,
)
_TEXTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), HIDDEN),
    (re.compile(r"\$ANSIBLE_VAULT;[^\n]*(?:\n\s*[0-9a-f]+)*"), HIDDEN),
    (re.compile(r"(?i)\b((?:bearer|basic) )[A-Za-z0-9._~+/=-]{6,}"), r"\1" + HIDDEN),
    (re.compile(r"\b(?:hf_|sk-|ghp_|glpat-)[A-Za-z0-9_-]{12,}"), HIDDEN),
    (re.compile(r"(://[^/\s:@]+:)[^@/\s]+(?=@)"), r"\1" + HIDDEN),
    (re.compile(r"(?i)(--?(?:api-key|password|token|secret)(?:[= ]|',? '|\", \"))[^\s'\"]+"), r"\1" + HIDDEN),
    # NAME=value and "name": "value" in units, environments, JSON and YAML; bounded, or a long word takes for ever
    (
        re.compile(
            r"(?i)((?<![\w.-])[\w.-]{0,80}?(?:api[-_]?key|passw(?:or)?d|passphrase|secret|credential|private[-_]?key|"
            r"(?:hf|hub|access|auth|bearer|refresh|vault|session)[-_]?token)[\w.-]{0,80}[\"']?\s*[=:]\s*[\"']?)"
            r"(?!\[removed\])[^\s\"',}]+"
        ),
        r"\1" + HIDDEN,
    ),
)


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name holds a secret: ``vllm_api_key`` does, ``max_num_batched_tokens`` does not."""
    return _NAME.search(name) is not None


def clean_text(text: str, known: Iterable[str] = ()) -> str:
    """``text`` without what looks like a secret and without any of the ``known`` values (of six or more characters)."""
    for value in sorted({value for value in known if len(value) >= 6}, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    for pattern, replacement in _TEXTS:
        text = pattern.sub(replacement, text)
    return text


def clean(data: Any, known: Iterable[str] = ()) -> Any:
    """Plain data without secrets: values under secret names are replaced whole, all texts go through clean_text."""
    values = list(known)
    if isinstance(data, Mapping):
        return {
            key: HIDDEN if isinstance(key, str) and is_secret_name(key) and value not in (None, "", [], {}, False)
            else clean(value, values)
            for key, value in data.items()
        }  # fmt: skip
    if isinstance(data, (list, tuple)):
        return [clean(value, values) for value in data]
    return clean_text(data, values) if isinstance(data, str) else data


def secrets_of(data: Any) -> list[str]:
    """The texts under secret names in ``data``, to be handed to :func:`clean` as known values."""
    found: list[str] = []
    if isinstance(data, Mapping):
        for key, value in data.items():
            if isinstance(key, str) and is_secret_name(key) and isinstance(value, str):
                found.append(value)
            else:
                found += secrets_of(value)
    elif isinstance(data, (list, tuple)):
        for value in data:
            found += secrets_of(value)
    return found
