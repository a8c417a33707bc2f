"""One training step on OpenCL equals torch, for the zoo and for models of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from parity import find_opencl
from torch.nn import functional as F

import hetpipe as hp
from hetpipe.bench.parity import Parity, parity
from hetpipe.sdk.backend import Device
from hetpipe.sdk.host.registry import open_device
from hetpipe.zoo.load import FAMILIES, SMALL, load_workload
from hetpipe.zoo.workload import Workload

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")

SAMPLES, LENGTH, VOCABULARY, CLASSES = 4, 12, 64, 4
ZOO = [name + SMALL for names in FAMILIES.values() for name in names]


@pytest.fixture(scope="module")
def device() -> Device:
    found = find_opencl()
    if found is None:
        pytest.skip("no OpenCL device: install pocl-opencl-icd or the extra `emulators`")
    return open_device(found)


def check(row: Parity) -> None:
    assert not row.refused
    assert row.is_equal, (row.errors, row.torch, row.layers)


@pytest.mark.wide
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo(device: Device, name: str) -> None:
    check(parity(load_workload(name), device))


def text(generator: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return tokens without padding, and the following tokens as targets."""
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    return {"input_ids": tokens[:, :-1].clone()}, tokens[:, 1:].clone()


def padded(generator: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the same with a mask that keeps at least the first 4 tokens."""
    x, y = text(generator)
    lengths = torch.randint(4, LENGTH + 1, (SAMPLES, 1), generator=generator)
    return {**x, "attention_mask": (torch.arange(LENGTH) < lengths).long()}, y


def translated(generator: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    x, y = padded(generator)
    return {**x, "decoder_input_ids": text(generator)[0]["input_ids"]}, y


def classified(generator: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    x, _ = padded(generator)
    return x, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def pictures(generator: torch.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    x = torch.randn(SAMPLES, 3, 32, 32, generator=generator)
    return {"pixel_values": x}, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def language_loss(output: Any, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), y.flatten())


def class_loss(output: Any, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits, y)


BLOCKS = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip
TOKENS = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
Row = tuple[str, str, dict[str, Any], Callable[..., Any], Callable[..., torch.Tensor]]
MODELS: dict[str, Row] = {
    "bert": ("BertForSequenceClassification", "BertConfig",
             {**BLOCKS, **TOKENS, "num_labels": CLASSES}, classified, class_loss),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config",
             {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2,
              "n_head": 2, "use_cache": False, "bos_token_id": None, "eos_token_id": None},
             padded, language_loss),
    "llama": ("LlamaForCausalLM", "LlamaConfig",
              {**BLOCKS, **TOKENS, "num_key_value_heads": 1, "use_cache": False},
              text, language_loss),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config",
               {**BLOCKS, **TOKENS, "num_key_value_heads": 1, "head_dim": 16,
                "sliding_window": 6, "use_cache": False}, text, language_loss),
    "t5": ("T5ForConditionalGeneration", "T5Config",
           {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2,
            "num_heads": 2, "dropout_rate": 0.0, "use_cache": False}, translated, language_loss),
    "xlnet": ("XLNetLMHeadModel", "XLNetConfig",
              {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64,
               "use_mems_train": False}, padded, language_loss),
    "bart": ("BartForConditionalGeneration", "BartConfig",
             {**TOKENS, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
              "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64,
              "decoder_ffn_dim": 64, "dropout": 0.0, "use_cache": False},
             translated, language_loss),
    "deberta": ("DebertaV2ForSequenceClassification", "DebertaV2Config",
                {**BLOCKS, **TOKENS, "num_labels": CLASSES, "relative_attention": True,
                 "pos_att_type": ["p2c", "c2p"]}, classified, class_loss),
    "vit": ("ViTForImageClassification", "ViTConfig",
            {**BLOCKS, "image_size": 32, "patch_size": 8, "num_labels": CLASSES},
            pictures, class_loss),
    "swin": ("SwinForImageClassification", "SwinConfig",
             {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2],
              "num_heads": [2, 4], "window_size": 4, "drop_path_rate": 0.0,
              "num_labels": CLASSES}, pictures, class_loss),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig",
                 {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2,
                  "num_labels": CLASSES}, pictures, class_loss),
    "resnet": ("ResNetForImageClassification", "ResNetConfig",
               {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [2, 2],
                "num_labels": CLASSES}, pictures, class_loss),
    "regnet": ("RegNetForImageClassification", "RegNetConfig",
               {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1],
                "groups_width": 8, "num_labels": CLASSES}, pictures, class_loss),
    "segformer": ("SegformerForImageClassification", "SegformerConfig",
                  {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1],
                   "hidden_sizes": [16, 32], "patch_sizes": [3, 3], "strides": [2, 2],
                   "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "drop_path_rate": 0.0,
                   "num_labels": CLASSES}, pictures, class_loss),
}  # fmt: skip
"""By name: class, configuration, its settings, data and loss. Dropout outside layers is 0."""


def workload_of(name: str) -> Workload:
    network, config, settings, draw, loss_fn = MODELS[name]

    def batches(samples: int, seed: int) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield draw(generator)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = getattr(transformers, network)(getattr(transformers, config)(**settings)).train()
    return Workload(model, loss_fn, batches, name, SAMPLES, hp.optim.adamw(lr=1e-3))


@pytest.mark.wide
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(device: Device, name: str) -> None:
    check(parity(workload_of(name), device))
