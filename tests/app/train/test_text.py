"""Text in the application: what is read, how it is cut, and a run from its first step to its report."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import spartan
from spartan.app.cli import app
from spartan.app.train.config import Config, RecipeError, load_recipe
from spartan.app.train.data import build_data
from spartan.app.train.loop import Trainer, resume, train
from spartan.app.train.processes import Processes
from spartan.app.train.text import Text, read_corpus
from spartan.files import read

CPU = torch.device("cpu")
SMALL = [
    "size=tiny", "epochs=2", "model_args={layers: 1, width: 32, heads: 2}", "data.context=16", "data.train_size=128",
    "data.test_size=20", "batch_size=16",
]  # fmt: skip


def small(path: Path | None, *sets: str) -> Config:
    return load_recipe("bytes-gpt", [*SMALL, *([] if path is None else [f"data.path={path}"]), *sets])


def spartan_cli(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of texts, each of its own letter."""
    home = tmp_path / "texts"
    home.mkdir()
    for i in range(26):
        (home / f"{i}.txt").write_text(chr(97 + i) * 200)
    return home


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    train(small(None), run, quiet=True)
    return run


# ---------------------------------------------------------------------- what is read


def test_files_are_split_by_name(texts: Path) -> None:
    first = read_corpus(small(texts))
    letters = [set(part.replace(b"\n", b"")) for part in (first.train, first.test)]
    assert not letters[0] & letters[1]
    assert len(letters[0] | letters[1]) == 26
    assert 1 <= len(letters[1]) <= 8
    # Another file moves none of the others, and changes the hash.
    (texts / "more.txt").write_text("!" * 100)
    second = read_corpus(small(texts))
    assert letters[1] <= set(second.test)
    assert letters[0] <= set(second.train)
    assert first.facts["sha256"] != second.facts["sha256"]
    assert first.facts["files"] == 26
    (texts / "more.txt").unlink()
    assert read_corpus(small(texts)).facts == first.facts


def test_a_single_file_is_cut_by_position(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(1, 101)) * 10)
    corpus = read_corpus(small(path))
    assert corpus.train + corpus.test == path.read_bytes()
    assert len(corpus.test) == 100


def test_the_standard_library_is_on_every_machine() -> None:
    corpus = read_corpus(small(None))
    assert corpus.facts["text"] == "the Python standard library"
    assert len(corpus.train) > 4_000_000
    assert len(corpus.test) > 200_000
    assert b"def " in corpus.test


def test_a_suffix_picks_files(texts: Path) -> None:
    (texts / "notes.md").write_text("# notes")
    (texts / ".hidden.txt").write_text("hidden")
    assert read_corpus(small(texts)).facts["files"] == 27
    assert read_corpus(small(texts, "data.suffix=.md")).facts["files"] == 1


# ---------------------------------------------------------------------- how it is cut


def test_sequences_and_what_comes_next(tmp_path: Path) -> None:
    path = tmp_path / "count.txt"
    path.write_bytes(bytes(range(1, 128)) * 20)
    data = build_data(small(path), CPU)
    batches = list(data.train(0))
    assert [x.shape for x, _ in batches] == [(16, 16)] * 8
    for x, y in batches:
        assert torch.equal((x % 127) + 1, y)
    assert not torch.equal(batches[0][0], next(data.train(1))[0])
    later = list(data.train(0, start=5))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(later, batches[5:], strict=True))


def test_the_test_goes_over_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "count.txt"
    path.write_bytes(bytes(range(1, 128)) * 20)
    whole = build_data(small(path, "data.test_size=null"), CPU)
    seen = torch.cat([x.flatten() for x, _ in whole.test()])
    assert bytes(seen.tolist()) == path.read_bytes()[-254:][: len(seen)]
    assert len(seen) == 253 // 16 * 16
    some = build_data(small(path, "data.test_size=5"), CPU)
    assert sum(len(y) for _, y in some.test()) == some.test_size == 5
    # Of two processes, each has its own.
    shares = [build_data(small(path), CPU, Processes(rank, 2)) for rank in (0, 1)]
    parts = [torch.cat([x for x, _ in share.test()]) for share in shares]
    alone = torch.cat([x for x, _ in build_data(small(path), CPU).test()])
    assert torch.equal(torch.stack([parts[0][0], parts[1][0]]), alone[:2])
    assert sum(map(len, parts)) == len(alone)


# ---------------------------------------------------------------------- mistakes


BAD = {
    "empty": (b"", "is empty; text is needed"),
    "binary": (b"text\0more" * 100, "is no text: byte 4 is zero"),
    "UTF-16": ("naïve ".encode("utf-16") * 100, "is in UTF-16 or UTF-32; save it as UTF-8"),
    "latin-1": ("naïve ".encode("latin-1") * 100, "is not UTF-8 at byte 2"),
    "short": (b"hello", "part of .* has 5 bytes, too few for a sequence of 16"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_text_is_one_clear_line(what: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(BAD[what][0])
    with pytest.raises(RecipeError, match=BAD[what][1]):
        build_data(small(path), CPU)
    sets = [word for setting in [*SMALL, f"data.path={path}"] for word in ("--set", setting)]
    result = spartan_cli("train", "bytes-gpt", *sets, "--out", tmp_path / "run")
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert result.stderr.startswith("error: data.path: ")
    assert not (tmp_path / "run").exists()


def test_other_mistakes(tmp_path: Path, texts: Path) -> None:
    with pytest.raises(RecipeError, match="there is no file or folder"):
        build_data(small(tmp_path / "nowhere"), CPU)
    (tmp_path / "none").mkdir()
    with pytest.raises(RecipeError, match="has no files; text is needed"):
        build_data(small(tmp_path / "none"), CPU)
    with pytest.raises(RecipeError, match=r"whose names end in .rst \(data.suffix\)"):
        build_data(small(texts, "data.suffix=.rst"), CPU)
    with pytest.raises(RecipeError, match=r"mixup: 0.2 is for images"):
        build_data(small(texts, "mixup=0.2"), CPU)
    with pytest.raises(RecipeError, match="data.context: 0 is too small"):
        small(texts, "data.context=0")
    with pytest.raises(RecipeError, match="wrn-10-1 takes images"):
        Trainer(small(texts, "model=wrn-10-1", "model_args={}"))
    with pytest.raises(RecipeError, match="gpt takes sequences of tokens"):
        Trainer(load_recipe("digits", ["model=gpt"]))
    with pytest.raises(RecipeError, match=r"size: 'tinny' is unknown \(did you mean tiny\?\)"):
        load_recipe("bytes-gpt", ["size=tinny"])
    with pytest.raises(RecipeError, match="one size only"):
        load_recipe("digits", ["size=tiny"])


def test_a_size_is_under_the_settings() -> None:
    config = load_recipe("bytes-gpt", ["data.context=32", "size=tiny", "optimizer.lr=0.5"])
    assert (config.data.context, config.data.source, config.optimizer.lr) == (32, "text", 0.5)
    assert config.optimizer.weight_decay == 0.1
    assert config.model_args == {"layers": 2, "width": 96, "heads": 3}


# ---------------------------------------------------------------------- a run


def test_a_run_is_measured_in_bits(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert math.isclose(summary["bits_per_byte"], summary["test_loss"] / math.log(2))
    assert 2 < summary["bits_per_byte"] < 8
    assert summary["achieved_sparsity"] == pytest.approx(0.9, abs=1e-3)
    assert all("layers." in layer["name"] for layer in summary["layers"])  # embeddings and the head are dense
    assert [len(s["prompt"].encode()) for s in summary["samples"]] == [16] * 3
    facts = json.loads((finished / "environment.json").read_text())["data"]
    assert facts == read_corpus(small(None)).facts


def test_the_loss_is_that_of_every_byte(finished: Path) -> None:
    config, data = small(None), build_data(small(None), CPU)
    trainer = Trainer(config)
    trainer.model.load_state_dict(read(finished / "model.safetensors"))
    total = count = 0.0
    with torch.no_grad():
        for x, y in data.test():
            chances = trainer.model(x).double().log_softmax(-1).gather(-1, y[..., None])
            total, count = total - float(chances.sum()), count + y.numel()
    assert json.loads((finished / "summary.json").read_text())["test_loss"] == pytest.approx(total / count, rel=1e-5)


def test_resume_and_a_text_that_changed(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, whole, stopped = small(texts, "checkpoint_steps=3"), tmp_path / "whole", tmp_path / "stopped"
    train(config, whole, quiet=True)
    epoch, calls = Trainer._epoch, []

    def breaks(self: Trainer, *arguments: Any) -> Any:
        for _ in epoch(self, *arguments):
            calls.append(self.step)
            if self.step == 11:
                raise KeyboardInterrupt
            yield

    monkeypatch.setattr(Trainer, "_epoch", breaks)
    with pytest.raises(KeyboardInterrupt):
        train(config, stopped, quiet=True)
    monkeypatch.setattr(Trainer, "_epoch", epoch)
    again = tmp_path / "again"
    shutil.copytree(stopped, again)
    resume(stopped, quiet=True)
    for name, weight in read(whole / "model.safetensors").items():
        assert torch.equal(read(stopped / "model.safetensors")[name], weight), name
    (texts / "0.txt").write_text("changed")
    with pytest.raises(RecipeError, match="is not the text that the run was trained with"):
        resume(again, quiet=True)


def test_commands(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bits = json.loads((finished / "summary.json").read_text())["bits_per_byte"]
    shown = spartan_cli("evaluate", finished)
    assert f"bits      {bits:.4f} per byte" in shown.output, shown.output
    table = spartan_cli("compare", finished, "--csv", "runs.csv", "--plot", "curve.png")
    assert "bits per byte" in table.output
    assert "top-1" not in table.output
    assert f"0:{bits:.4f}" in table.output
    assert str(bits) in Path("runs.csv").read_text()
    page = Path(spartan_cli("report", finished).output.strip()).read_text()
    for text in (
        "Bits per byte, last epoch",
        f"{bits:.4f}",
        "Samples",
        "sequences/s",
        "sha256",
    ):
        assert text in page, text
    both = Path(spartan_cli("report", finished.parent).output.strip()).read_text()
    assert "Bits per byte against sparsity" in both
    assert "lower is better" in both
    assert spartan_cli("export", finished, "--out", "small.safetensors").exit_code == 0
    model: Any = spartan.load("small.safetensors")
    x = torch.randint(256, (2, 16))
    assert model.generate(x, 5).shape == (2, 21)
    assert "bytes of the test data" in spartan_cli("bench", finished, "--batch", "1", "--images", "4").output


def test_every_process_sees_the_same_batches(texts: Path) -> None:
    alone = [x for x, _ in build_data(small(texts), CPU).train(0)]
    shares = [list(build_data(small(texts, "micro_batch=8"), CPU, Processes(rank, 2)).train(0)) for rank in (0, 1)]
    assert isinstance(build_data(small(texts), CPU), Text)
    pairs = zip(*shares, strict=True)
    assert all(torch.equal(torch.cat((a, b)), whole) for ((a, _), (b, _)), whole in zip(pairs, alone, strict=True))
