"""Which library holds answers to a form, and what do rows with a form cost the rows without?

``libraries``: llguidance and xgrammar (where it is installed; we do not depend on it) over the vocabulary of SmolLM2
and over one of 200,000 tokens made from it by joining tokens. ``setup`` is once for a tokenizer, ``compile`` a form
that was never seen, ``mask`` and ``accept`` one token of a given answer; milliseconds, medians, ``mask_worst`` the
slowest. ``keywords``: for each keyword of JSON schema a schema and an answer that breaks it. "enforced": the answer
cannot be given. "refused": the schema is not taken. "ignored": the schema is taken and the answer can be given.

``rows``: the engine under ``continuous``, 16 requests side by side, of which none or half have a form. Milliseconds
between two tokens of the rows without one; both kinds take turns.

    python -m bench.structured [--rounds 3] [--tokens 48] [--no-engine]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch

from bench.report import median, write
from bench.structured_cases import FORMS, KEYWORDS, pieces, vocabulary
from microbatch import Engine, SamplingParams
from microbatch.core.structured import StructuredOutput

ROWS: Final = 16
SIZES: Final = (49_152, 200_000)
EOS: Final = 2


class Matcher(Protocol):
    """Both libraries, as far as they are measured."""

    def mask(self) -> None:
        """Fill the mask."""
        ...

    def accept(self, token_id: int) -> bool:
        """Go on behind a token; False when it is not allowed."""
        ...


Compile = Callable[[str, str], Matcher]


def llguidance(tokens: Sequence[bytes]) -> Compile:
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    class Listed:
        eos_token_id, bos_token_id, special_token_ids = EOS, None, [0, 1, 2]

        def __init__(self) -> None:
            self.tokens = list(tokens)

        def __call__(self, text: Any) -> list[int]:
            return []

    class Guided:
        def __init__(self, grammar: str) -> None:
            self._raw = LLMatcher(tokenizer, grammar, log_level=0)
            if self._raw.is_error():
                raise ValueError(self._raw.get_error())
            self._words = torch.empty(1, -(-len(tokens) // 32), dtype=torch.int32)

        def mask(self) -> None:
            self._raw.unsafe_compute_mask_ptr(self._words.data_ptr(), self._words.numel() * 4)

        def accept(self, token_id: int) -> bool:
            return bool(self._raw.consume_token(token_id))

    tokenizer = LLTokenizer(TokenizerWrapper(Listed()), eos_token=[EOS])
    grammar_of: dict[str, Any] = {
        "json_schema": LLMatcher.grammar_from_json_schema,
        "regex": LLMatcher.grammar_from_regex,
    }
    return lambda kind, text: Guided(grammar_of[kind](text))


def xgrammar(tokens: Sequence[bytes]) -> Compile:
    library: Any = importlib.import_module("xgrammar")

    class Compiled:
        def __init__(self, compiled: Any) -> None:
            self._raw = library.GrammarMatcher(compiled)
            self._words = library.allocate_token_bitmask(1, len(tokens))

        def mask(self) -> None:
            self._raw.fill_next_token_bitmask(self._words)

        def accept(self, token_id: int) -> bool:
            return bool(self._raw.accept_token(token_id))

    info = library.TokenizerInfo(list(tokens), vocab_size=len(tokens), stop_token_ids=[EOS])
    compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    return lambda kind, text: Compiled(
        compiler.compile_json_schema(text, strict_mode=False) if kind == "json_schema" else compiler.compile_regex(text)
    )


LIBRARIES: Final = {"llguidance": llguidance, "xgrammar": xgrammar}


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds, and the result."""
    began = time.perf_counter()
    result = work()
    return (time.perf_counter() - began) * 1e3, result


def measure(library: str, size: int, rounds: int) -> dict[str, Any]:
    """One library over one vocabulary."""
    tokens = vocabulary(size)
    setup, compiled = timed(lambda: LIBRARIES[library](tokens))
    found: dict[str, Any] = {"setup": round(setup, 1)}
    for name, (kind, text, answer) in FORMS.items():
        took: dict[str, list[float]] = {"compile": [], "mask": [], "accept": []}
        for _ in range(rounds):
            compiling, matcher = timed(lambda: compiled(kind, text))
            took["compile"].append(compiling)
            for token_id in pieces(answer, tokens):
                took["mask"].append(timed(matcher.mask)[0])
                accepting, allowed = timed(lambda: matcher.accept(token_id))
                assert allowed, (library, name, tokens[token_id])
                took["accept"].append(accepting)
        found[name] = {what: median(values, 3) for what, values in took.items()}
        found[name]["mask_worst"] = round(max(took["mask"]), 3)
    return found


def honesty(library: str) -> dict[str, str]:
    """What becomes of each keyword."""
    tokens = vocabulary(SIZES[0])
    compiled = LIBRARIES[library](tokens)

    def fate(schema: Any, answer: Any) -> str:
        try:
            matcher = compiled("json_schema", json.dumps(schema))
        except Exception:  # of many kinds
            return "refused"
        token_ids = [*pieces(json.dumps(answer), tokens), EOS]
        return "ignored" if all(matcher.accept(token_id) for token_id in token_ids) else "enforced"

    return {name: fate(schema, answer) for name, (schema, answer) in KEYWORDS.items()}


async def gaps(engine: Engine, num_formed: int, tokens: int) -> list[float]:
    """Milliseconds between the tokens of the rows without a form, while all rows run."""
    form = StructuredOutput("json_schema", json.dumps({"type": "array", "items": {"type": "string"}, "minItems": 500}))
    free = SamplingParams(max_tokens=tokens, temperature=0.8, seed=1, ignore_eos=True)
    held = SamplingParams(max_tokens=tokens, temperature=0.8, seed=1, structured_output=form)
    found: list[float] = []

    async def run(row: int) -> None:
        last = None
        async for _ in engine.stream("Once upon a time", held if row < num_formed else free):
            now = time.perf_counter()
            if last is not None and row == ROWS - 1:
                found.append((now - last) * 1e3)
            last = now

    await asyncio.gather(*[run(row) for row in range(ROWS)])
    return found


async def rows(rounds: int, tokens: int) -> dict[str, float]:
    """None and half of the rows with a form, in turns."""
    none: list[float] = []
    half: list[float] = []
    async with Engine(policy="continuous", max_model_len=512) as engine:
        await gaps(engine, ROWS // 2, 8)
        for _ in range(rounds):
            none += await gaps(engine, 0, tokens)
            half += await gaps(engine, ROWS // 2, tokens)
    without, beside = median(none, 3), median(half, 3)
    return {"none": without, "half": beside, "ratio": round(beside / without, 3)}


def main() -> None:
    """Measure and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--no-engine", action="store_true")
    options = parser.parse_args()
    names = [name for name in LIBRARIES if importlib.util.find_spec(name)]
    results: dict[str, Any] = {"libraries": {}, "keywords": {name: honesty(name) for name in names}}
    for name in names:
        results["libraries"][name] = {str(size): measure(name, size, options.rounds) for size in SIZES}
        print(name, json.dumps(results["libraries"][name]))
    if not options.no_engine:
        results["rows"] = asyncio.run(rows(options.rounds, options.tokens))
        print(results["rows"])
    write("structured", (__doc__ or "").partition("\n")[0], results)


if __name__ == "__main__":
    main()
