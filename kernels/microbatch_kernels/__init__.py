"""Paged K/V for microbatch: the ledger (standard library only) and, beside it, the tensors and attention (torch).

Importing this package loads nothing else: import the module that you need. ``kernels/README.md`` has the layouts.
"""
