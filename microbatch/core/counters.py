"""What a scheduler has done since it was made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Only ever grows. Tokens of prompts that were looked up in the prefix cache, and of those that were found."""

    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
