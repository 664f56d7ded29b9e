"""Masks over a vocabulary: which tokens may come next in an answer that must have a form."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from microbatch.core.ports import FormMatcher
from microbatch.core.structured import StructuredOutput
from microbatch.errors import ExecutionError, InvalidRequestError
from microbatch.text.forms.grammars import grammar_of

#: Forms that are kept ready. Most clients ask for the same few again and again.
_KEPT: Final = 256
#: What one step of one answer may cost: tens of milliseconds, where the library's own bounds allow whole seconds.
_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=200_000, step_lexer_fuel=50_000, step_max_items=20_000, max_items_in_row=1000,
    max_lexer_states=50_000, verbose_errors=False,
)  # fmt: skip


class GuidedMatcher:
    """Where one sequence is in its form; implements ``core.ports.FormMatcher``."""

    __slots__ = ("raw",)

    def __init__(self, raw: LLMatcher) -> None:
        self.raw = raw

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on behind these tokens. Raises ``ExecutionError`` when the form does not allow them."""
        if self.raw.is_stopped() and not self.raw.is_error():
            return  # at the end of the form; what comes now is an end token
        if not self.raw.consume_tokens(list(token_ids)):
            raise ExecutionError(f"the answer has left its form: {self.raw.get_error().partition(chr(10))[0]}")


class GuidedForms:
    """Forms for one tokenizer; implements ``core.ports.Forms``. Safe to call from any thread.

    ``make_tokenizer`` is called at first use, as it takes a second; ``InvalidRequestError`` where there can be none.
    """

    def __init__(self, make_tokenizer: Callable[[], LLTokenizer]) -> None:
        self._make_tokenizer = make_tokenizer
        self._tokenizer: LLTokenizer | None = None
        self._executor: LLExecutor | None = None
        self._ready: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, form: StructuredOutput) -> None:
        """Compile the form. Raises ``InvalidRequestError`` that says what is wrong with it and where."""
        self._matcher(form)

    def matcher(self, form: StructuredOutput) -> GuidedMatcher:
        """A matcher at the beginning of an answer."""
        return GuidedMatcher(self._matcher(form).deep_copy())

    def fill(self, matchers: Sequence[FormMatcher], address: int, row_bytes: int) -> None:
        """Write the mask of each matcher, a bit for each token, into rows of ``row_bytes`` from ``address`` on."""
        if self._executor is None:
            self._executor = LLExecutor()
        rows = [(matcher.raw, row) for row, matcher in enumerate(matchers) if isinstance(matcher, GuidedMatcher)]
        self._executor.unsafe_compute_mask_ptr(rows, address, row_bytes, len(matchers))

    def _matcher(self, form: StructuredOutput) -> LLMatcher:
        with self._lock:
            found = self._ready.get(form)
            if found is not None:
                self._ready.move_to_end(form)
                return found
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer()
        found = LLMatcher(self._tokenizer, grammar_of(form, self._problem), log_level=0, limits=_LIMITS)
        _check_beginning(found, self._tokenizer.eos_tokens)
        with self._lock:
            self._ready[form] = found
            if len(self._ready) > _KEPT:
                self._ready.popitem(last=False)
        return found

    def _problem(self, grammar: str) -> str:
        """An error or a warning: these tell of keywords that would be left out, which a schema can ask for."""
        _, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer, limits=_LIMITS)
        return messages[0] if messages else ""


def _check_beginning(matcher: LLMatcher, eos_token_ids: Sequence[int]) -> None:
    """Take one step. Compiling does not find a form that no text can have, nor one that is too large to follow."""
    allowed = int.from_bytes(matcher.compute_bitmask(), "little")
    for token_id in eos_token_ids:
        allowed &= ~(1 << token_id)
    probe = matcher.deep_copy()
    if allowed and not probe.is_error():
        probe.consume_token((allowed & -allowed).bit_length() - 1)
    if probe.is_error():
        reason = probe.get_error().partition("\n")[0]
        said = "no answer can have this form" if "NoExtension" in reason else f"the form is too complex: {reason}"
        raise InvalidRequestError(said)
