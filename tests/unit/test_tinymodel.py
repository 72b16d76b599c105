"""scripts/tinymodel: bytes, shapes, tokenizer, and that the weights really follow the pointer chase."""

from __future__ import annotations

import importlib.util
import json
import stat
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors import deserialize
from tokenizers import Tokenizer

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "tinymodel"


def load() -> ModuleType:
    loader = SourceFileLoader("tinymodel", str(SCRIPT))
    spec = importlib.util.spec_from_loader("tinymodel", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up
    sys.modules["tinymodel"] = module
    loader.exec_module(module)
    return module


@pytest.fixture
def tinymodel() -> ModuleType:
    return load()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    assert load().main(["--size", "tiny", str(folder)]) == 0
    return folder


def read_weights(path: Path) -> dict[str, Any]:
    """Read bfloat16 tensors with the library that engines use."""
    tensors = {}
    for name, view in deserialize(path.read_bytes()):
        assert view["dtype"] == "BF16"
        halves = np.frombuffer(bytes(view["data"]), dtype="<u2").astype(np.uint32)
        tensors[name] = (halves << np.uint32(16)).view(np.float32).reshape(view["shape"])
    return tensors


def llama_logits(weights: dict[str, Any], config: dict[str, Any], ids: list[int]) -> Any:
    """Logits after the last token, from the published definition of the Llama architecture, in float32."""
    head_dim, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    length, half = len(ids), head_dim // 2
    angles = np.outer(np.arange(length), config["rope_theta"] ** (-np.arange(half) * 2 / head_dim))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def norm(x: Any, weight: Any) -> Any:
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config["rms_norm_eps"]) * weight

    def rotate(x: Any) -> Any:
        first, second = x[:, :half], x[:, half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=1)

    hidden = weights["model.embed_tokens.weight"][ids]
    future = np.triu(np.full((length, length), -np.inf, dtype=np.float32), 1)
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        x = norm(hidden, weights[p + "input_layernorm.weight"])
        q, k, v = (x @ weights[f"{p}self_attn.{name}_proj.weight"].T for name in "qkv")
        out = np.empty((length, heads * head_dim), dtype=np.float32)
        for head in range(heads):
            kv = slice((head * kv_heads // heads) * head_dim, (head * kv_heads // heads + 1) * head_dim)
            own = slice(head * head_dim, (head + 1) * head_dim)
            scores = rotate(q[:, own]) @ rotate(k[:, kv]).T / np.sqrt(head_dim) + future
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, own] = scores / scores.sum(axis=1, keepdims=True) @ v[:, kv]
        hidden = hidden + out @ weights[p + "self_attn.o_proj.weight"].T
        x = norm(hidden, weights[p + "post_attention_layernorm.weight"])
        gate = x @ weights[p + "mlp.gate_proj.weight"].T
        up = x @ weights[p + "mlp.up_proj.weight"].T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ weights[p + "mlp.down_proj.weight"].T
    return norm(hidden[-1], weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def chased(ids: list[int], chase: Any, layers: int) -> int:
    """The token that the chase ends at, followed with nothing but the definition."""

    def token_class(layer: int, position: int) -> int:
        if layer == 0:
            return int(chase.token_class[ids[position]])
        before = token_class(layer - 1, position)
        return token_class(layer - 1, position - int(chase.distance[layer - 1][before]))

    last = len(ids) - 1
    return ids[last - int(chase.distance[layers - 1][token_class(layers - 1, last)])]


def test_greedy_output_is_the_end_of_the_chase(
    tinymodel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a short reach keeps the whole chase inside a prompt that numpy can work through in a second
    monkeypatch.setattr(tinymodel, "REACH", 80)
    size = tinymodel.SIZES["tiny"]
    tinymodel.write_config(tmp_path, size)
    tinymodel.write_weights(tmp_path, size, 0)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = read_weights(tmp_path / "model.safetensors")
    chase = tinymodel.make_chase(size, 0)
    generator = np.random.default_rng(5)
    answers, leads = set(), []
    for _ in range(8):
        ids = [int(token) for token in generator.integers(3, 1024, 420)]
        logits = llama_logits(weights, config, ids)
        top = np.sort(logits)[::-1]
        answers.add(int(np.argmax(logits)))
        leads.append(float(top[0] - top[1]))
        assert int(np.argmax(logits)) == chased(ids, chase, size.layers)
    assert len(answers) > 4
    # far above what rounding to bfloat16 (eight bits) can move
    assert min(leads) > 2.0


def test_one_position_leads_all_others(tinymodel: ModuleType) -> None:
    kernel = tinymodel.kernel().astype(np.float64)
    frequency = 10000.0 ** (-np.arange(32) / 32)
    for distance in (8, 977, 5800):
        others = np.delete(np.arange(32768), distance)
        # q . k / sqrt(64) of rotary embedding: each pair of dimensions contributes its product times a cosine
        scores = np.cos(np.outer(others - distance, frequency)) @ (kernel * kernel) / 8
        assert (kernel * kernel).sum() / 8 - scores.max() > 39.0


def test_distances_reach_over_a_long_prompt(tinymodel: ModuleType) -> None:
    for size in tinymodel.SIZES.values():
        distance = tinymodel.make_chase(size, 0).distance
        assert distance.shape == (size.layers, size.classes)
        assert distance.min() >= 8
        assert distance.max() < 6000
        assert (distance > 1000).mean() > 0.6


def test_codes_are_unlike_each_other(tinymodel: ModuleType) -> None:
    codes = tinymodel.make_codes(200, 64, np.random.default_rng(1))
    alike = codes @ codes.T / 64
    np.fill_diagonal(alike, 0)
    assert set(np.unique(codes)) == {-1.0, 1.0}
    assert alike.max() <= 0.5


def test_bfloat16_rounds_to_nearest_even(tinymodel: ModuleType) -> None:
    # IEEE 754 patterns by hand: 1 + 2^-8 lies half way between 1 and 1 + 2^-7 and goes to the even 1
    cases = {1.0: 0x3F80, -2.0: 0xC000, 1 + 2**-8: 0x3F80, 1 + 3 * 2**-8: 0x3F82, 1 + 2**-8 + 2**-20: 0x3F81}
    values = np.array(list(cases), dtype=np.float32)
    assert np.frombuffer(tinymodel.to_bfloat16(values), dtype="<u2").tolist() == list(cases.values())


@pytest.mark.parametrize(("name", "kib_per_token", "millions"), [("tiny", 2, 3.7), ("small", 6, 20), ("mid", 16, 103)])
def test_sizes_are_the_documented_ones(tinymodel: ModuleType, name: str, kib_per_token: int, millions: float) -> None:
    size = tinymodel.SIZES[name]
    # K and V, two bytes each, for every key-value head and layer
    assert size.layers * 2 * size.kv_heads * 64 * 2 == kib_per_token * 1024
    weights = tinymodel.make_weights(size, 0)
    assert sum(values.size for values in weights.values()) == pytest.approx(millions * 1e6, rel=0.02)


def test_same_seed_same_bytes(tinymodel: ModuleType, tiny: Path, tmp_path: Path) -> None:
    assert tinymodel.main(["--size", "tiny", str(tmp_path / "again")]) == 0
    assert tinymodel.main(["--size", "tiny", "--seed", "1", str(tmp_path / "other")]) == 0
    first, again, other = (tinymodel.file_digests(path) for path in (tiny, tmp_path / "again", tmp_path / "other"))
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


def test_a_finished_model_is_left_alone(tinymodel: ModuleType, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in tiny.iterdir()}
    assert tinymodel.main(["--size", "tiny", str(tiny)]) == 0
    assert "already there" in capsys.readouterr().out
    assert {path.name: path.stat().st_mtime_ns for path in tiny.iterdir()} == before


def test_a_damaged_model_is_made_again(tinymodel: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    tinymodel.main(["--size", "tiny", str(folder)])
    good = tinymodel.file_digests(folder)
    (folder / "model.safetensors").write_bytes(b"cut short")
    assert tinymodel.main(["--size", "tiny", str(folder)]) == 0
    assert tinymodel.file_digests(folder) == good
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_a_service_user_can_read_it(tiny: Path) -> None:
    assert {stat.S_IMODE(path.stat().st_mode) for path in tiny.iterdir()} == {0o644}
    assert stat.S_IMODE(tiny.stat().st_mode) == 0o755


def test_foreign_files_are_not_overwritten(
    tinymodel: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    assert tinymodel.main(["--size", "tiny", str(tmp_path)]) == 1
    assert "did not make" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("argv", [["--size", "huge", "out"], ["--seed", "-1", "out"], ["--seed", "x", "out"], []])
def test_wrong_usage_is_one_sentence(
    tinymodel: ModuleType, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        tinymodel.main(argv)
    assert caught.value.code == 64
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_tokenizer_reads_and_writes_any_text(tiny: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    text = "Zwölf Boxkämpfer 北京 \U0001f600\n\tdef f(x): return x"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    config = json.loads((tiny / "config.json").read_text())
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert all(tokenizer.id_to_token(token) for token in range(config["vocab_size"]))
    assert [tokenizer.id_to_token(config[f"{name}_token_id"]) for name in ("bos", "eos", "pad")] == [
        "<s>",
        "</s>",
        "<pad>",
    ]


def test_chat_template_is_there(tiny: Path) -> None:
    import jinja2

    template = json.loads((tiny / "tokenizer_config.json").read_text())["chat_template"]
    text = jinja2.Template(template).render(messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    assert text == "user: Hi\nassistant: "
