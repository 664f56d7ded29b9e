"""Triton is a package for Linux; elsewhere the tests of its kernels are left out."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["test_triton_*.py"]
