"""What a model says of itself, from a config as transformers makes it and from its file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from microbatch.executor.limits import DEFAULT_LENGTH, context_length, end_token_ids, length_in_file


def test_the_context_is_what_the_config_says_under_any_name() -> None:
    assert context_length(SimpleNamespace(max_position_embeddings=77, sliding_window=8), None) == 77
    assert context_length(SimpleNamespace(seq_length=5), None) == 5
    longrope = {"rope_type": "longrope", "original_max_position_embeddings": 40}
    assert context_length(SimpleNamespace(max_position_embeddings=77, rope_parameters=longrope), None) == 40
    assert context_length(SimpleNamespace(), SimpleNamespace(model_max_length=9)) == 9
    assert context_length(SimpleNamespace(), SimpleNamespace(model_max_length=10**30)) == DEFAULT_LENGTH
    inner = SimpleNamespace(max_position_embeddings=3)
    assert context_length(SimpleNamespace(get_text_config=lambda: inner), None) == 3


def test_the_context_is_in_the_file_or_not_known(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    assert length_in_file(file) is None
    for text, length in [
        ('{"text_config": {"max_position_embeddings": 9}, "max_position_embeddings": 8}', 9),
        ('{"max_position_embeddings": 128}', 128),
        ('{"n_positions": 7}', 7),
        ('{"n_positions": "7"}', None),
        ('{"text_config": 3}', None),
        ("[]", None),
        ("{", None),
        ("\udcff", None),
    ]:
        file.write_bytes(text.encode(errors="surrogateescape"))
        assert length_in_file(file) == length


def test_end_tokens_are_the_union_of_all_who_name_some() -> None:
    config = SimpleNamespace(eos_token_id=2, vocab_size=10)
    assert end_token_ids(SimpleNamespace(eos_token_id=[0, 2]), config, SimpleNamespace(eos_token_id=7)) == {0, 2, 7}
    assert end_token_ids(SimpleNamespace(eos_token_id=None), config, SimpleNamespace(eos_token_id=10)) == {2}
    assert end_token_ids(None, SimpleNamespace(eos_token_id=None, vocab_size=10), None) == frozenset()
