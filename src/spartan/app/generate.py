"""Measures how fast a decoder reads a prompt and writes tokens, before and after: the work of `spartan bench --generate`."""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

import spartan
from spartan.app.bench import EAGER, OURS, Tell
from spartan.app.trained import find_trained
from spartan.gpt import GPT
from spartan.wording import one_line
from spartan.zoo import torchvision

if TYPE_CHECKING:
    from spartan.inference.convert import Explanation

# Scores of what comes after each token, and the keys and values so far, which go into the next call.
Step = Callable[[Tensor, Any], tuple[Tensor, Any]]

# Contenders take turns for so many rounds at least, and for about so long each.
ROUNDS, SECONDS = 3, 3.0


@dataclass(frozen=True)
class Decoder:
    """A language model on the CPU, and how it is called with a cache of keys and values."""

    name: str
    kind: str
    model: nn.Module
    step_of: Callable[[nn.Module], Step]
    encode: Callable[[str], list[int]]
    vocabulary: int
    context: int  # positions that it has
    example: Callable[[Tensor], Any]  # what `accelerate` calls the model with, for this prompt

    @property
    def sparsity(self) -> float:
        """The share of zeros in tensors of two or more dimensions."""
        weights = [p for p in self.model.parameters() if p.ndim > 1]
        return 1.0 - sum(int(p.count_nonzero()) for p in weights) / max(1, sum(p.numel() for p in weights))

    def prompt(self, given: str) -> Tensor:
        """The prompt [1, T]: a text's tokens or, for a number, so many tokens drawn at random."""
        if given.isascii() and given.isdigit():
            generator = torch.Generator().manual_seed(0)
            tokens = torch.randint(self.vocabulary, (1, int(given)), generator=generator)
        else:
            tokens = torch.tensor([self.encode(given)], dtype=torch.int64)
        if not tokens.shape[1]:
            raise ValueError(f"--generate {given!r} has no token: a text, or a number of tokens from 1 on, is needed")
        return tokens


@dataclass(frozen=True)
class Generated:
    """Tokens a second by contender, the tokens that each wrote, and the kernels."""

    prompt: int
    prefill: Mapping[str, float]
    decode: Mapping[str, float]
    written: Mapping[str, list[int]]
    kernels: "list[Explanation]"


def find_decoder(target: Path, recipe: str | None = None, sets: tuple[str, ...] = ()) -> Decoder:
    """The decoder of a run or file, or of a folder of `transformers` with a configuration and weights."""
    if (target / "config.json").is_file():
        if recipe is not None or sets:
            raise ValueError(f"--recipe, --set: {target} is a folder of transformers and needs none")
        return _of_transformers(target)
    trained = find_trained(target, recipe, sets)
    model = trained.model
    if not isinstance(model, GPT):
        raise ValueError(
            f"--generate: {target} holds {trained.reference['model']}, which writes no text; runs and files of gpt "
            "(recipe bytes-gpt) and folders of decoders that transformers wrote do"
        )
    vocabulary = model.tokens.num_embeddings

    def encode(text: str) -> list[int]:
        tokens = list(text.encode())
        if max(tokens, default=0) >= vocabulary:
            raise ValueError(
                f"--generate {text!r}: the model has tokens 0 to {vocabulary - 1}; give a number of tokens"
            )
        return tokens

    def step_of(decoder: nn.Module) -> Step:
        return cast(GPT, decoder).run

    kind = trained.reference["model"]
    return Decoder(trained.name, kind, model, step_of, encode, vocabulary, model.context, lambda prompt: prompt)


def _of_transformers(folder: Path) -> Decoder:
    with contextlib.suppress(ValueError):  # it need not be there, but where it is transformers imports it
        torchvision()
    try:
        import transformers
    except ImportError:
        raise ValueError(f"{folder} is a folder of transformers: pip install transformers") from None
    # Nothing is fetched, and no code of the folder is run.
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{folder}: transformers cannot load a decoder: {one_line(error)[:300]}") from None

    def encode(text: str) -> list[int]:
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        except Exception as error:  # whatever its files are missing
            raise ValueError(
                f"--generate {text!r}: {folder} has no tokenizer that can be loaded; give a number of tokens "
                f"({one_line(error)[:200]})"
            ) from None
        return list(tokenizer(text)["input_ids"])

    def step_of(decoder: nn.Module) -> Step:
        def step(tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
            out = decoder(input_ids=tokens, past_key_values=cache, use_cache=True)
            return out.logits, out.past_key_values

        return step

    config = model.config
    context = getattr(config, "max_position_embeddings", None) or 1 << 30
    name = folder.resolve().name
    kind, size = type(model).__name__, config.vocab_size

    def example(prompt: Tensor) -> dict[str, Any]:
        return {"input_ids": prompt, "use_cache": False}

    return Decoder(name, kind, model.eval(), step_of, encode, size, context, example)


@torch.inference_mode()
def generate(decoder: Decoder, given: str, length: int, tell: Tell) -> Generated:
    """Read the prompt and write `length` tokens, the likeliest each time; the least times of several rounds count.

    Args:
        decoder: the model.
        given: a text, or a number of tokens.
        length: how many tokens to write.
        tell: is given a line about what is being done.
    """
    prompt = decoder.prompt(given)
    size = prompt.shape[1]
    if size + length > decoder.context:
        raise ValueError(
            f"--generate: {size} tokens and {length} more (--length) are over the model's context of {decoder.context}"
        )
    tell("choosing kernels")
    fast = spartan.accelerate(decoder.model, example_inputs=decoder.example(prompt), tokens=(1,))
    steps = {EAGER: decoder.step_of(decoder.model), OURS: decoder.step_of(fast)}
    prefill, decode = dict.fromkeys(steps, float("inf")), dict.fromkeys(steps, float("inf"))
    written: dict[str, list[int]] = {}
    begin, turn = time.perf_counter(), 0
    while turn < ROUNDS or time.perf_counter() - begin < SECONDS * len(steps):
        tell(f"timing, round {turn + 1}")
        for name, step in steps.items():
            start = time.perf_counter()
            scores, cache = step(prompt, None)
            token = scores[:, -1].argmax(-1, keepdim=True)
            middle = time.perf_counter()
            tokens = [token]
            for _ in range(length - 1):
                scores, cache = step(token, cache)
                token = scores[:, -1].argmax(-1, keepdim=True)
                tokens.append(token)
            end = time.perf_counter()
            prefill[name] = min(prefill[name], middle - start)
            decode[name] = min(decode[name], (end - middle) / (length - 1))
            written[name] = torch.cat(tokens, 1)[0].tolist()
        turn += 1
    return Generated(
        size,
        {name: size / t for name, t in prefill.items()},
        {name: 1 / t for name, t in decode.items()},
        written,
        spartan.explain(fast),
    )
