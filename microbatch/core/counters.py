"""What a scheduler has done since it was made."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class SchedulerCounters:
    """Only ever grows. Tokens of prompts that were looked up in the prefix cache, of those that were found, and of
    these the ones of declared prefixes; tokens of a prompt that a choice took over from another one; blocks copied to
    host memory and back."""

    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    pinned_hit_tokens: int = 0
    forked_tokens: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0

    def since(self, earlier: SchedulerCounters) -> SchedulerCounters:
        """What has been added to ``earlier``."""
        return SchedulerCounters(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))
