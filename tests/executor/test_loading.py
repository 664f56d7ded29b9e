"""A name made into a model: what comes out, and every refusal in one line."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from microbatch.errors import SetupError
from microbatch.executor import loading, precision, quantization
from microbatch.executor.convert import convert_gguf
from microbatch.executor.loading import LoadedModel, ModelSpec, load_model
from tests.executor.tiny_models import EOS, edit_json, save_gguf, save_llama

IDS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny random model."""
    save_llama(tmp_path / "tiny")
    return tmp_path / "tiny"


def load(path: Path, **wishes: Any) -> LoadedModel:
    return load_model(ModelSpec(str(path), device="cpu", **wishes))


def refusal(path: Path, **wishes: Any) -> str:
    with pytest.raises(SetupError) as caught:
        load(path, **wishes)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_folder_is_loaded_whole_and_still(folder: Path) -> None:
    loaded = load(folder)
    assert (loaded.name, loaded.folder, loaded.max_model_len) == ("tiny", folder, 128)
    assert loaded.eos_token_ids == {EOS}
    assert (loaded.dtype, loaded.device, loaded.quantization) == (torch.float32, torch.device("cpu"), "none")
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert isinstance(loaded.tokenizer, PreTrainedTokenizerFast)
    assert not hasattr(loaded.model, "hf_device_map"), "device_map=auto on a CPU leaves no hooks"
    assert loaded.model.dtype == torch.float32


def test_nothing_is_printed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    load(folder)
    assert capfd.readouterr() == ("", "")


def test_the_network_is_not_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    load(folder)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_a_format_that_was_asked_for(folder: Path, name: str) -> None:
    loaded = load(folder, dtype=name)
    assert loaded.dtype == loaded.model.dtype == getattr(torch, name)


def test_a_gguf_file_is_the_same_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = save_llama(tmp_path / "tiny").eval()
    save_gguf(tmp_path / "tiny.gguf", model)
    capfd.readouterr()
    loaded = load(tmp_path / "tiny.gguf")
    assert (loaded.name, loaded.folder, loaded.max_model_len) == ("tiny", tmp_path, 128)
    assert loaded.eos_token_ids == {EOS}
    torch.testing.assert_close(loaded.model(IDS).logits, model(IDS).logits)
    text = "héllo\n😀 ab"
    assert loaded.tokenizer.decode(loaded.tokenizer(text).input_ids) == text
    assert capfd.readouterr() == ("", "")


def test_a_converted_gguf_file_is_the_same_model_as_a_plain_folder(tmp_path: Path) -> None:
    model = save_llama(tmp_path / "tiny").eval()
    save_gguf(tmp_path / "tiny.gguf", model)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "made")
    loaded = load(tmp_path / "made")
    assert getattr(loaded.model.config, "quantization_config", None) is None
    assert type(loaded.model) is type(model)
    torch.testing.assert_close(loaded.model(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_quantized_on_a_cpu(folder: Path, form: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = load(folder)
    with caplog.at_level(logging.WARNING):
        loaded = load(folder, quantization=form)
        logits = loaded.model(IDS).logits
    assert loaded.quantization == form and loaded.dtype == torch.float32
    assert loaded.model.get_memory_footprint() < plain.model.get_memory_footprint()
    assert torch.isfinite(logits).all()
    assert (logits - plain.model(IDS).logits).abs().max() < 0.2
    assert not caplog.records, "bitsandbytes is silent"


def test_quantization_auto_changes_nothing_on_a_cpu(folder: Path) -> None:
    assert load(folder, quantization="auto").quantization == "none"


def test_a_quantized_model_that_cannot_run_is_refused_at_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bitsandbytes import nn

    def fail(*_: object) -> None:
        raise RuntimeError("shape is\ninvalid")

    layer: Any = nn
    monkeypatch.setattr(layer.Linear8bitLt, "forward", fail)
    assert "does not run in int8 on cpu (RuntimeError: shape is)" in refusal(folder, quantization="int8")
    monkeypatch.undo()
    monkeypatch.setattr(torch, "isfinite", lambda logits: torch.zeros_like(logits, dtype=torch.bool))
    assert "computes no numbers in int8" in refusal(folder, quantization="int8")


def test_a_device_without_bitsandbytes_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes

    monkeypatch.setattr(bitsandbytes, "supported_torch_devices", {"cuda"})
    assert "int8 does not work on cpu with bitsandbytes" in refusal(folder, quantization="int8")


@pytest.mark.parametrize("wish", ["int8", "int4", "none", "auto"])
def test_weights_that_do_not_fit_are_refused_before_the_load(
    folder: Path, monkeypatch: pytest.MonkeyPatch, wish: str
) -> None:
    monkeypatch.setattr(quantization, "available_bytes", lambda device: 1000)
    (folder / "model.safetensors").write_bytes(b"never read")
    message = refusal(folder, quantization=wish)
    assert "the weights need" in message and message.endswith("use a smaller model")


def test_a_form_that_would_fit_is_proposed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "available_bytes", lambda device: 200_000)
    assert "use --quantization int8, or a smaller model" in refusal(folder)


def test_auto_takes_the_first_form_that_fits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, gpu = load(folder).model.config, torch.device("cuda", 0)
    parameters = quantization.count_parameters(config)
    assert parameters == sum(p.numel() for p in load(folder).model.parameters())
    for free, form in ((10.0, "none"), (1.5, "int8"), (1.0, "int4")):
        monkeypatch.setattr(quantization, "available_bytes", lambda device, free=free: int(free * parameters))
        assert quantization.choose_quantization("auto", config, torch.float16, gpu)[0] == form


def test_a_model_spread_over_devices_is_refused(folder: Path) -> None:
    files = SimpleNamespace(name="x", folder=folder)
    for places in ({"a": 0, "b": "cpu"}, {"": "disk"}):
        with pytest.raises(SetupError, match="does not fit on one device"):
            loading._require_whole(SimpleNamespace(hf_device_map=places), set(), files)  # type: ignore[arg-type]


def test_a_gpu_that_is_not_there_is_refused_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(loading, "fetch", lambda *_, **__: pytest.fail("fetched"))
    with pytest.raises(SetupError, match="device cuda was asked for, but"):
        load_model(ModelSpec(str(folder), device="cuda"))


@pytest.mark.parametrize("wish", [{"dtype": "int9"}, {"quantization": "int3"}])
def test_an_unknown_wish_is_refused(folder: Path, wish: dict[str, str]) -> None:
    assert "must be" in refusal(folder, **wish)
    with pytest.raises(SetupError, match="device must be"):
        precision.choose_device("tpu")


def test_the_format_of_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    has_bfloat16 = True
    monkeypatch.setattr(precision, "_has_bfloat16", lambda: has_bfloat16)
    assert precision.choose_dtype("auto", torch.bfloat16, cpu) == torch.float32
    assert precision.choose_dtype("auto", torch.bfloat16, gpu) == torch.bfloat16
    assert precision.choose_dtype("auto", torch.float32, gpu) == torch.float16
    assert precision.choose_dtype("auto", None, gpu) == torch.float16
    has_bfloat16 = False
    assert precision.choose_dtype("auto", torch.bfloat16, gpu) == torch.float16
    with pytest.raises(SetupError, match="no bfloat16: use --dtype float16"):
        precision.choose_dtype("bfloat16", None, gpu)


def test_auto_takes_the_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert precision.choose_device("auto") == precision.choose_device("cuda") == torch.device("cuda", 0)
    assert precision.choose_device("cpu") == torch.device("cpu")


def test_a_model_that_does_not_generate_is_refused(folder: Path) -> None:
    edit_json(folder / "config.json", architectures=["LlamaForSequenceClassification"])
    assert "(LlamaForSequenceClassification) is not a causal language model" in refusal(folder)


@pytest.mark.parametrize("kind", ["bert", "t5", "clip"])
def test_another_kind_of_model_is_refused(folder: Path, kind: str) -> None:
    architecture = {"bert": "BertForMaskedLM", "t5": "T5ForConditionalGeneration", "clip": "CLIPModel"}[kind]
    (folder / "config.json").write_text(f'{{"model_type": "{kind}", "architectures": ["{architecture}"]}}')
    assert "is not a causal language model" in refusal(folder)


def test_an_unknown_architecture_is_one_line(folder: Path) -> None:
    edit_json(folder / "config.json", model_type="never-heard-of", architectures=["NeverForCausalLM"])
    assert "its config failed" in refusal(folder)


def test_code_of_the_model_is_never_run(folder: Path, tmp_path: Path) -> None:
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')", encoding="utf-8")
    auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    edit_json(folder / "config.json", model_type="strange", architectures=["StrangeLM"], auto_map=auto_map)
    assert "needs code of its own" in refusal(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_corrupt_file_is_one_line(folder: Path, file: str) -> None:
    (folder / file).write_bytes(b"\x00not it")
    assert str(folder) in refusal(folder)


def test_weights_that_are_not_there_are_not_made_up(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=3)
    assert "lacks" in refusal(folder) and "model.layers.2." in refusal(folder)


def test_a_model_that_comes_quantized_is_not_quantized_again(folder: Path) -> None:
    config = load(folder).model.config
    for own in ({"quant_method": "gptq"}, SimpleNamespace(quant_method=SimpleNamespace(value="gptq"))):
        config.quantization_config = own
        with pytest.raises(SetupError, match=r"comes quantized already \(gptq\)"):
            quantization.choose_quantization("int8", config, torch.float32, torch.device("cpu"))
        form, room = quantization.choose_quantization("none", config, torch.float32, torch.device("cpu"))
        assert form == "none" and room > 0


def test_memory_that_runs_out_on_the_gpu_is_one_line() -> None:
    files = SimpleNamespace(name="x", folder=Path("/x"))
    error = torch.OutOfMemoryError("CUDA out of memory")
    assert "no memory on the GPU" in str(loading._refused("its weights", files, error))  # type: ignore[arg-type]
    spilled = ValueError("Some modules are dispatched on the CPU or the disk. Make sure")
    assert "does not fit on the device" in str(loading._refused("", files, spilled))  # type: ignore[arg-type]


def test_an_unknown_hub_name_offline_is_one_line_at_once() -> None:
    begin = time.monotonic()
    with pytest.raises(SetupError, match="not in the local cache and HF_HUB_OFFLINE is set"):
        load_model(ModelSpec("owner/no-such-model-here"))
    assert time.monotonic() - begin < 5


def test_a_context_that_is_too_long_is_refused_before_the_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(folder, max_model_len=128).max_model_len == 128
    monkeypatch.delattr(loading, "_load_folder")
    assert refusal(folder, max_model_len=129) == "max_model_len 129 is more than the model's context of 128 tokens"


def test_end_tokens_of_a_folder(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[0, 5])
    assert load(folder).eos_token_ids == {0, 5, EOS}


@pytest.mark.model
def test_the_embedded_model(home: Path, embedded_model: Path) -> None:
    loaded = load_model(ModelSpec(device="cpu", local_files_only=True), home=home)
    assert (loaded.name, loaded.folder) == ("HuggingFaceTB/SmolLM2-135M-Instruct", embedded_model)
    assert (loaded.max_model_len, loaded.dtype) == (8192, torch.float32)
    assert loaded.eos_token_ids == {2}
    prompt = loaded.tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert loaded.tokenizer.decode(loaded.model(prompt).logits[0, -1].argmax()) == " Paris"
    assert loaded.tokenizer.chat_template
