"""Loading models: folders and GGUF files in every way that they can be wrong."""

import importlib.util
import json

import pytest
import torch
from tiny import write_model
from transformers import BertConfig, BertForMaskedLM, LlamaModel, T5Config, T5ForConditionalGeneration

from lowbit.finetune.errors import UserError
from lowbit.finetune.model import load_model


def test_a_folder_gives_model_and_tokenizer_in_the_dtype_asked_for(tmp_path):
    model, tokenizer = load_model(write_model(tmp_path / "m"), dtype=torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.use_cache is False and not model.training
    assert tokenizer.decode(tokenizer("héllo").input_ids) == "héllo"


def test_a_tokenizer_without_padding_pads_with_the_end(tmp_path):
    folder = write_model(tmp_path / "m")
    path = tmp_path / "m" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("pad_token", None)
    path.write_text(json.dumps(config))
    tokenizer = load_model(folder)[1]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_from_scratch_needs_no_weights_and_follows_the_seed(tmp_path, dtype):
    folder = write_model(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    state = torch.get_rng_state()
    (one, tokenizer), (same, _), (other, _) = (
        load_model(folder, dtype=dtype, seed=seed, from_scratch=True) for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), state) and tokenizer.eos_token_id == 0
    assert {p.dtype for p in one.parameters()} == {dtype} and not one.training and one.config.use_cache is False
    for (name, p), q, r in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q) and (p.ndim == 1 or not torch.equal(p, r)), name
    weight = one.model.layers[1].mlp.up_proj.weight.float()  # [96, 64]
    assert weight.std().item() == pytest.approx(0.02, rel=0.05) and abs(weight.mean()) < 0.001  # initializer_range
    exact = 1 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(dict(one.named_buffers())["model.rotary_emb.inv_freq"], exact, rtol=1e-6, atol=0)


def _masked(folder):
    BertForMaskedLM(BertConfig(vocab_size=30, hidden_size=8, intermediate_size=8, num_attention_heads=2,
                               num_hidden_layers=1)).save_pretrained(folder)  # fmt: skip


def _encoder_decoder(folder):
    T5ForConditionalGeneration(T5Config(vocab_size=30, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2)
                               ).save_pretrained(folder)  # fmt: skip


def _headless(folder):
    model, _ = load_model(write_model(folder))
    LlamaModel(model.config).save_pretrained(folder)


def _cut(folder):
    write_model(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def _no_config(folder):
    folder.mkdir()


@pytest.mark.parametrize(
    "make, message",
    [
        (_masked, "not a causal language model .BertForMaskedLM"),
        (_encoder_decoder, "not a causal language model .T5ForConditionalGeneration"),
        (_headless, "not a causal language model .LlamaModel"),
        (_cut, "can't be loaded: "),
        (_no_config, "no config.json"),
    ],
)
def test_a_folder_that_is_no_model_is_named_in_one_line(tmp_path, make, message):
    make(tmp_path / "m")
    with pytest.raises(UserError, match=message) as error:
        load_model(str(tmp_path / "m"))
    assert str(tmp_path / "m") in str(error.value) and "\n" not in str(error.value)


def test_files_and_names_that_are_no_model(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"not a model at all, but long enough to have a header")
    (tmp_path / "x.txt").write_text("hello")
    for name, message in [
        (tmp_path / "x.gguf", "can't be loaded"),
        (tmp_path / "x.txt", "not a model: give a .gguf file"),
        (tmp_path / "none.gguf", "no such file"),
        (tmp_path / "none", "no such file or folder"),
    ]:
        with pytest.raises(UserError, match=message) as error:
            load_model(str(name))
        assert str(name) in str(error.value) and "\n" not in str(error.value)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install gguf"):
        load_model(str(tmp_path / "x.gguf"))


def test_the_hub_out_of_reach_is_said(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="not a local folder, so looked up on the Hugging Face Hub"):
        load_model("no-such-owner-at-all/no-such-model-at-all")


def test_rotary_frequencies_stay_fp32(tmp_path):
    """Rounded to bf16 they would be off by up to 0.4 %: two radians at position 512."""
    name = write_model(tmp_path / "m")
    (bf16, _), (fp32, _) = (load_model(name, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    assert {p.dtype for p in bf16.parameters()} == {torch.bfloat16}
    found, expected = dict(bf16.named_buffers()), dict(fp32.named_buffers())
    assert found.keys() == expected.keys() and len(found) > 0
    exact = 1 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(found["model.rotary_emb.inv_freq"], exact, rtol=1e-6, atol=0)
