"""What a scheduler has done since it was made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Only ever grows. Tokens of prompts that were looked up in the prefix cache, and of those that were found; tokens
    of a prompt that a choice took over from another one; blocks copied to host memory and back."""

    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    forked_tokens: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
