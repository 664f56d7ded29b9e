"""Benchmarks: one file a question, results in ``bench/results``. Run as ``python -m bench.NAME``."""

from microbatch.startup import prefer_passive_waiting

prefer_passive_waiting()  # as the server does it; must come before torch is imported
