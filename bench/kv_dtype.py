"""What does K/V in 8 bits cost in accuracy and save in bytes? ``auto``, ``fp8`` and ``int8`` on the embedded model.

Teacher-forced over the paged store: the tokens of a text go in by chunks, so every read of the context goes through
the format in question, and all formats read the same chunks. Each text is cut into windows; tokens with at least
``--context`` tokens before them are scored. Perplexity; its change with the standard error of the paired difference of
negative log-likelihoods; how often the best token is that of ``auto``; mean KL divergence from ``auto``. ``rechunked``:
the same format read in chunks of another size, which in exact arithmetic changes nothing.

    python -m bench.kv_dtype --data FOLDER | --file TEXT [--windows 2] [--width 2048] [--context 512] [--chunk 64]

FOLDER has ``fastchat``, ``self-instruct``, ``gsm8k`` and ``human-eval`` in it, JSONL files of those projects.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn.functional import cross_entropy, kl_div

from bench.report import write
from microbatch.executor.attention import PagedStep
from microbatch.executor.loading import LoadedModel, ModelSpec, load_model
from microbatch.executor.probe import attach, layer_specs, store_as
from microbatch_kernels.attention_inputs import AttentionInputs
from microbatch_kernels.dispatch import choose_backend
from microbatch_kernels.store import KVStore

FORMATS: Final = ("auto", "fp8", "int8")
BLOCK_SIZE: Final = 16
#: Name of a text: its file, and what of a line belongs to it.
TEXTS: Final[Mapping[str, tuple[str, Callable[[Any], str]]]] = {
    "answers": ("fastchat/mt_bench_reference_gpt-4.jsonl", lambda row: "\n\n".join(row["choices"][0]["turns"])),
    "instructions": (
        "self-instruct/user_oriented_instructions.jsonl",
        lambda row: "\n".join([row["instruction"], *row["instances"][0].values()]),
    ),
    "math": ("gsm8k/test.jsonl", lambda row: row["question"] + "\n" + row["answer"]),
    "code": ("human-eval/HumanEval.jsonl", lambda row: row["prompt"] + row["canonical_solution"]),
}


class Reader:
    """The model over one store for each format, read by chunks. One sequence at a time owns all blocks."""

    def __init__(self, loaded: LoadedModel, width: int, formats: Sequence[str] = FORMATS) -> None:
        self.model: Any = loaded.model
        self.backend = choose_backend("torch")
        specs = layer_specs(self.model)
        if not attach(self.model, specs, self.backend):
            raise SystemExit("this model's attention does not run over the paged store")
        self.block_ids = range(1, 1 + -(-width // BLOCK_SIZE))
        self.stores = {
            name: KVStore(store_as(self.model, specs, self.backend, name, paged=True), len(self.block_ids), BLOCK_SIZE)
            for name in formats
        }

    @torch.no_grad()
    def logits(self, name: str, token_ids: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """Float32 ``[stop - start, V]`` of these positions; those before must have been read in order."""
        device = self.model.device
        inputs = AttentionInputs.build([(self.block_ids, start, stop - start)], BLOCK_SIZE, device)
        output = self.model(
            input_ids=torch.tensor([token_ids[start:stop]], device=device),
            position_ids=torch.arange(start, stop, device=device)[None],
            use_cache=False,
            paged=PagedStep(self.stores[name], self.backend, inputs, packed=None),
        )
        return output.logits[0].float()  # type: ignore[no-any-return]

    def chunks(self, token_ids: Sequence[int], chunk: int) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Start of each chunk, and its logits in every format."""
        for start in range(0, len(token_ids), chunk):
            stop = min(start + chunk, len(token_ids))
            yield start, {name: self.logits(name, token_ids, start, stop) for name in self.stores}


class Score:
    """Sums over the scored tokens of one format; ``auto`` is the reference of itself and of the others."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.same: list[torch.Tensor] = []
        self.divergences: list[torch.Tensor] = []

    def add(self, logits: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> None:
        """A chunk: ``logits`` and ``reference`` ``[N, V]``, the tokens that came next ``[N]``."""
        self.losses.append(cross_entropy(logits, targets, reduction="none").double())
        self.same.append(logits.argmax(-1).eq(reference.argmax(-1)))
        expected = reference.log_softmax(-1)
        self.divergences.append(kl_div(logits.log_softmax(-1), expected, reduction="none", log_target=True).sum(-1))

    def extend(self, other: Score) -> None:
        """The tokens of another score as well."""
        self.losses += other.losses
        self.same += other.same
        self.divergences += other.divergences

    def summary(self, reference: Score) -> dict[str, float]:
        """Of all tokens added so far, against those of ``auto``."""
        losses = torch.cat(self.losses)
        change = losses - torch.cat(reference.losses)
        return {
            "tokens": len(losses),
            "perplexity": round(math.exp(losses.mean()), 4),
            "perplexity_change_percent": round(100 * math.expm1(change.mean()), 3),
            "perplexity_change_stderr_percent": round(100 * float(change.std()) / math.sqrt(len(change)), 3),
            "top1_agreement": round(torch.cat(self.same).double().mean().item(), 4),
            "mean_kl": float(f"{torch.cat(self.divergences).double().mean().item():.3g}"),
        }


def score(reader: Reader, windows: Sequence[Sequence[int]], context: int, chunk: int) -> dict[str, Score]:
    """All windows in every format; tokens with fewer than ``context`` before them are read and not scored."""
    scores = {name: Score() for name in reader.stores}
    for window in windows:
        for start, logits in reader.chunks(window, chunk):
            targets = torch.tensor(window[start + 1 : start + chunk + 1])
            first = max(0, context - start - 1)
            for name, values in logits.items():
                scores[name].add(values[first : len(targets)], logits["auto"][first : len(targets)], targets[first:])
    return scores


def summaries(scores: Mapping[str, Score]) -> dict[str, dict[str, float]]:
    """Each format against ``auto``."""
    return {name: one.summary(scores["auto"]) for name, one in scores.items()}


def rechunked(reader: Reader, window: Sequence[int], sizes: tuple[int, int]) -> dict[str, dict[str, float]]:
    """One window read twice, in chunks of two sizes: how far apart the logits are."""
    runs = [[logits for _, logits in reader.chunks(window, size)] for size in sizes]
    result = {}
    for name in reader.stores:
        one, two = (torch.cat([logits[name] for logits in run]) for run in runs)
        difference = (one - two).double()
        result[name] = {
            "top1_agreement": round(one.argmax(-1).eq(two.argmax(-1)).double().mean().item(), 4),
            "largest_logit_difference": float(f"{difference.abs().max():.2g}"),
            "rms_logit_difference": float(f"{difference.square().mean().sqrt():.2g}"),
        }
    return result


def sizes(reader: Reader) -> dict[str, dict[str, float]]:
    """Bytes of a token, and their share of what the model's own format and 16 bits take."""
    auto = reader.stores["auto"]
    halves = sum(2 * s.num_kv_heads * (s.key_dim + s.value_dim) for s in auto.layers)
    return {
        name: {
            "bytes_per_token": store.bytes_per_token,
            "share_of_auto": round(store.bytes_per_token / auto.bytes_per_token, 3),
            "share_of_16_bits": round(store.bytes_per_token / halves, 3),
        }
        for name, store in reader.stores.items()
    }


def read_texts(data: str | None, file: str | None) -> dict[str, str]:
    """The texts by name."""
    if file is not None:
        return {Path(file).name: Path(file).read_text("utf-8")}
    if data is None:
        raise SystemExit("give --data FOLDER or --file TEXT")
    texts = {}
    for name, (path, part) in TEXTS.items():
        lines = (Path(data) / path).read_text("utf-8").splitlines()
        texts[name] = "\n\n".join(part(json.loads(line)) for line in lines)
    return texts


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """All texts; returns what is kept."""
    loaded = load_model(ModelSpec())
    reader, width, least = Reader(loaded, arguments.width), arguments.width, arguments.context
    texts, whole, first = {}, {name: Score() for name in FORMATS}, None
    for text_name, text in read_texts(arguments.data, arguments.file).items():
        ids: list[int] = loaded.tokenizer(text, add_special_tokens=False).input_ids
        windows = [ids[i * width : (i + 1) * width] for i in range(arguments.windows)]
        if len(windows[0]) < least + 2:
            raise SystemExit(f"text {text_name} has {len(ids)} tokens, too few for a context of {least}")
        first = first or windows[0][:512]
        scores = score(reader, windows, least, arguments.chunk)
        texts[text_name] = summaries(scores)
        for name in FORMATS:
            whole[name].extend(scores[name])
        print(text_name, json.dumps(texts[text_name], indent=1), flush=True)
    assert first is not None
    return {
        **{name: getattr(arguments, name) for name in ("windows", "width", "context", "chunk")},
        "dtype_of_auto": str(reader.stores["auto"].layers[0].dtype).removeprefix("torch."),
        "bytes": sizes(reader),
        "all": summaries(whole),
        "texts": texts,
        "rechunked": rechunked(reader, first, (arguments.chunk, 3 * arguments.chunk // 4)),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="accuracy and bytes of K/V in 8 bits")
    parser.add_argument("--data")
    parser.add_argument("--file")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=64)
    kept = main(parser.parse_args())
    print(json.dumps(kept["all"], indent=1), json.dumps(kept["rechunked"], indent=1))
    write("kv_dtype", (__doc__ or "").partition("\n")[0], kept)
