"""`spartan bench --generate`: tokens a second of decoders, of ours and of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import spartan
from spartan.app import generate
from spartan.app.bench import EAGER, OURS
from spartan.app.cli import app
from spartan.app.generate import find_decoder
from spartan.gpt import GPT
from spartan.inference.cpu.library import library
from spartan.zoo import digits_cnn, torchvision

torchvision()  # which transformers imports by itself
transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One round is enough where the times do not matter."""
    torch.manual_seed(0)
    library()  # compiled into the usual cache; the times go into another one
    monkeypatch.setattr(generate, "SECONDS", 0.0)
    monkeypatch.setattr(generate, "ROUNDS", 1)
    monkeypatch.setenv("SPARTAN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def gpt(tmp_path: Path) -> Path:
    model = GPT(context=40, layers=2, width=32, heads=2)
    spartan.prune(model, 0.9, exclude=["tokens*", "positions*", "head*"])
    path = tmp_path / "gpt.safetensors"
    architecture = {"model": "gpt", "classes": 256, "shape": [40], "args": {"layers": 2, "width": 32, "heads": 2}}
    spartan.save(model, path, architecture=architecture)
    return path


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(num_hidden_layers=2, max_position_embeddings=48, **SIZES, **SMALL)
    model = transformers.LlamaForCausalLM(config)
    spartan.prune(model, 0.9, exclude=["*embed*", "lm_head*"], budget="uniform")
    model.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def works(*args: object) -> str:
    result = CliRunner().invoke(app, ["bench", *map(str, args)])
    assert result.exit_code == 0, result.output
    return result.output


def refused(*args: object) -> str:
    result = CliRunner().invoke(app, ["bench", *map(str, args)])
    assert result.exit_code != 0
    return f"{result.output} {result.exception}"


def test_bytes_gpt(gpt: Path) -> None:
    text = works(gpt, "--generate", "to be", "--length", 12)
    assert "gpt: gpt, 52.37% zeros" in text  # embeddings and head are dense
    for words in ("reading 5 tokens", "writing 12", "tokens/s", "all 12 tokens are the same", "attention.qkv"):
        assert words in text, words
    assert "reading 9 tokens" in works(gpt, "--generate", "9", "--length", 3, "--threads", 1)


def test_a_folder_of_transformers(llama: Path) -> None:
    text = works(llama, "--generate", "20", "--length", 8)
    for words in ("LlamaForCausalLM", "reading 20 tokens", "all 8 tokens are the same", "mlp.gate_proj"):
        assert words in text, words


@torch.inference_mode()
def test_the_tokens_are_those_of_the_libraries(gpt: Path, llama: Path) -> None:
    """The cache is used as the models themselves use it."""
    decoder = find_decoder(gpt)
    prompt, found = decoder.prompt("7"), generate.generate(decoder, "7", 10, print)
    expected = decoder.model.generate(prompt, 10, temperature=0)[0, 7:].tolist()  # type: ignore[operator]
    assert found.written == {EAGER: expected, OURS: expected}
    assert found.prompt == 7
    assert min(*found.prefill.values(), *found.decode.values()) > 0
    decoder = find_decoder(llama)
    prompt, found = decoder.prompt("11"), generate.generate(decoder, "11", 9, print)
    whole = decoder.model.generate(  # type: ignore[operator]
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, do_sample=False, eos_token_id=None
    )
    assert found.written == {EAGER: whole[0, 11:].tolist(), OURS: whole[0, 11:].tolist()}


def test_mistakes(gpt: Path, llama: Path, tmp_path: Path) -> None:
    assert "5 tokens and 64 more (--length) are over the model's context of 40" in refused(gpt, "--generate", "to be")
    assert "has no token" in refused(gpt, "--generate", "0")
    assert "has no token" in refused(gpt, "--generate", "")
    assert "has no tokenizer that can be loaded; give a number" in refused(llama, "--generate", "to be")
    assert "--compile: --generate compares eager torch" in refused(gpt, "--generate", "5", "--compile")
    assert "--length: it says how many tokens --generate writes" in refused(gpt, "--length", "5")
    assert "is a folder of transformers and needs none" in refused(llama, "--generate", "5", "--recipe", "bytes-gpt")
    model = torch.nn.Linear(4, 4)
    spartan.save(model, tmp_path / "other.safetensors")
    assert "--recipe" in refused(tmp_path / "other.safetensors", "--generate", "5")
    digits = tmp_path / "digits.safetensors"
    spartan.save(digits_cnn(), digits, architecture={"model": "digits-cnn", "classes": 10, "shape": [1, 8, 8]})
    assert "holds digits-cnn, which writes no text" in refused(digits, "--generate", "5")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert "transformers cannot load a decoder" in refused(tmp_path / "empty", "--generate", "5")
