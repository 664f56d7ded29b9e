"""The ports of the core: what it needs of memory, of the device and of text, as protocols."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import Protocol

from microbatch.core.chat import ChatOptions
from microbatch.core.plan import StepPlan, StepResult
from microbatch.core.structured import StructuredOutput


class KVManager(Protocol):
    """Which blocks belong to whom. Pure bookkeeping: it never touches a tensor.

    A block is ``block_size`` token slots. Block 0 is the null block and is never handed out.
    """

    @property
    def block_size(self) -> int:
        """Token slots in a block."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks that can be handed out (the null block not counted)."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nothing references, cached ones included."""
        ...

    def match_prefix(self, token_ids: SequenceABC[int], salt: str = "") -> int:
        """Number of leading tokens whose K/V is cached, a multiple of ``block_size``. Changes nothing.

        At least one token is left to compute, so the result is below ``len(token_ids)``. Valid until the next call that
        changes the manager.
        """
        ...

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        ...

    def begin(self, seq_id: int, token_ids: SequenceABC[int], num_tokens: int, salt: str = "") -> int | None:
        """Give a new sequence a block table for ``num_tokens`` tokens, its cached prefix shared, the rest fresh.

        All or nothing: returns the number of cached tokens (as ``match_prefix``), or None and changes nothing when
        there are not enough free blocks.
        """
        ...

    def allocate(self, seq_id: int, num_tokens: int) -> bool:
        """Grow a table to hold ``num_tokens`` tokens. All or nothing; False changes nothing."""
        ...

    def block_ids(self, seq_id: int) -> tuple[int, ...]:
        """The block table of a sequence, in order."""
        ...

    def commit(self, seq_id: int, token_ids: SequenceABC[int], num_computed_tokens: int) -> None:
        """K/V of the first ``num_computed_tokens`` tokens is written: full blocks among them become shareable."""
        ...

    def fork(self, parent_seq_id: int, child_seq_id: int, num_tokens: int | None = None) -> None:
        """Give a new sequence the blocks of another's first ``num_tokens`` tokens, shared. ``allocate`` must follow
        before the child writes: it asks for copies (``take_copies``) of what others can see."""
        ...

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The copies (source block, target block) asked for since the last call: for the next plan, in this order."""
        ...

    @property
    def num_swapped(self) -> int:
        """Sequences whose K/V is kept in host memory."""
        ...

    def swap_out(self, seq_id: int, num_tokens: int) -> bool:
        """Keep the first ``num_tokens`` tokens of a sequence in host memory; ``free`` it next. False changes nothing:
        there is no room. In the making of one plan, what goes out does so before anything comes in."""
        ...

    def swap_in(self, seq_id: int) -> int:
        """Bring back what was swapped out of a sequence that has begun again, as far as it is not shared. The number of
        tokens whose K/V it then holds, 0 when nothing was kept."""
        ...

    def drop_swapped(self, seq_id: int) -> None:
        """Forget what was swapped out of a sequence."""
        ...

    def take_swaps(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """The (device block, host block) and the (host block, device block) copies asked for since the last call. In
        the next plan the first come before the second, and these before ``take_copies``."""
        ...

    def free(self, seq_id: int) -> None:
        """Give back every block of a sequence. Shared ones stay until their last reference is gone."""
        ...

    def pin(self, token_ids: SequenceABC[int], salt: str = "") -> object:
        """Keep the full blocks of a prefix, which must be cached now, until the manager is told to unpin the result."""
        ...

    def num_pinned_tokens(self, token_ids: SequenceABC[int], salt: str = "") -> int:
        """Leading tokens of a prompt that lie in pinned blocks."""
        ...

    def max_num_tokens(self, token_ids: SequenceABC[int] = (), salt: str = "") -> int:
        """The most tokens that a sequence with this prompt can hold when it is alone."""
        ...

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the books do not balance."""
        ...


class Executor(Protocol):
    """Arithmetic on the device. ``execute`` blocks; it is called by one thread at a time."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Raises on a fault of the whole step; faults of single sequences are in ``result.errors``."""
        ...

    def reset(self) -> None:
        """Forget the batch that runs, if any: after a fault, or when all of its sequences were released."""
        ...

    def close(self) -> None:
        """Free threads and memory. Idempotent."""
        ...


class FormMatcher(Protocol):
    """Where one sequence is in the form that its answer must have."""

    def accept(self, token_ids: SequenceABC[int]) -> None:
        """Go on behind these tokens. Raises ``ExecutionError`` when the form does not allow them."""
        ...


class Forms(Protocol):
    """Forms of answers for one tokenizer. Calls may come from any thread."""

    def check(self, form: StructuredOutput) -> None:
        """Get the form ready. Raises ``InvalidRequestError`` that says what is wrong with it and where."""
        ...

    def matcher(self, form: StructuredOutput) -> FormMatcher:
        """A matcher at the beginning of an answer."""
        ...

    def fill(self, matchers: SequenceABC[FormMatcher], address: int, row_bytes: int) -> None:
        """Write which tokens may come next, for each matcher a row of ``row_bytes`` bytes from ``address`` on: a bit
        for each token, the lowest first. At the end of a form only end tokens may."""
        ...


class Detokenizer(Protocol):
    """Turns the tokens of one sequence into text, piece by piece, append-only."""

    def push(self, token_id: int) -> str:
        """Text that is certain after this token; may be empty. Never holds a part of a stop text."""
        ...

    def finish(self) -> str:
        """The rest of the text when the sequence ends by itself; bytes of an unfinished character become U+FFFD."""
        ...

    @property
    def stopped(self) -> bool:
        """Whether a stop text was found; the text before it has been given out in full."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back. Calls may come from any thread."""

    @property
    def vocab_size(self) -> int:
        """Ids are from 0 to ``vocab_size`` - 1 (the model's embedding rows)."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every token that ends a sequence, from the tokenizer and the generation config."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: SequenceABC[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, special tokens left out or shown by their names."""
        ...

    def token_text(self, token_id: int) -> tuple[str, bytes]:
        """One token alone, as text (U+FFFD for half characters) and as its exact bytes."""
        ...

    @property
    def tool_parser(self) -> str:
        """Name of the form in which the model writes calls of tools; "none" when it is not known."""
        ...

    def apply_chat_template(
        self, messages: SequenceABC[dict[str, object]], options: ChatOptions = ChatOptions()
    ) -> list[int]:
        """Token ids of a conversation, by default with the generation prompt; ``InvalidRequestError`` if the template
        refuses it."""
        ...

    def detokenizer(
        self, stop: SequenceABC[str] = (), shown: SequenceABC[str] = (), *, whole: bool = False
    ) -> Detokenizer:
        """A fresh detokenizer for one sequence; ``shown`` names the special tokens that its text has. ``whole``: a
        space at its beginning belongs to it (some tokenizers put one there that does not)."""
        ...
