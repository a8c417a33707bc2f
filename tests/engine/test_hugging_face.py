"""Models of the transformers library train with hp.hf's losses, and take their weights back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from crews import UNLIKE
from pipelines import user_pipeline
from torch import Tensor, nn

import hetpipe as hp
from hetpipe.capture import EvalModeWarning
from hetpipe.crew.crew import Crew

transformers = pytest.importorskip("transformers")

DEVICES = UNLIKE
LENGTH, VOCABULARY = 12, 32
FIXED: dict[str, Any] = {"cuts": [3], "microbatches": 3, "schedule": "1f1b"}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny GPT-2, whose embedding and output share their weights."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("gpt2")
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    return transformers.GPT2LMHeadModel.from_pretrained(folder)


def padded(samples: int = 8) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (samples, LENGTH))
    mask = torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (samples, 1))
    return {"input_ids": ids, "attention_mask": mask.long()}, ids.where(mask, -100)


def test_training_equals_torch_and_the_weights_come_back(
    crew: Crew, pretrained: Path, tmp_path: Path
) -> None:
    """The micro-batches have 3, 3 and 2 samples, with unlike shares of padding."""
    rule = hp.optim.sgd(lr=0.1, momentum=0.9)
    x, labels = padded()
    plain, model = load(pretrained).train(), load(pretrained).train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    with user_pipeline(
        crew, model, hp.hf.causal_lm_loss, (x, labels), optimizer=rule, **FIXED
    ) as pipe:
        for _ in range(3):
            optimizer.zero_grad()
            loss = plain(**x, labels=labels).loss
            loss.backward()
            optimizer.step()
            assert pipe.step(x, labels) == pytest.approx(loss.item(), rel=1e-5)
        pipe.copy_to(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert model.lm_head.weight is model.transformer.wte.weight
    model.save_pretrained(tmp_path)
    again, prompt = load(tmp_path), x["input_ids"][:1, :4]
    assert all(torch.equal(v, model.state_dict()[n]) for n, v in again.state_dict().items())
    for each in (plain, model, again):
        text = each.eval().generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=1)
        assert text.shape[1] > 4
        assert torch.equal(text, again.generate(prompt, max_new_tokens=4, pad_token_id=1))


class Other(nn.Module):
    """Returns the logits of a model in another form."""

    def __init__(self, model: nn.Module, form: type) -> None:
        super().__init__()
        self.model, self.form = model, form

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return self.form([logits] if self.form is tuple else {"logits": logits})


@pytest.mark.parametrize("form", [tuple, dict])
def test_other_forms_of_outputs_train(crew: Crew, pretrained: Path, form: type) -> None:
    x, labels = padded()
    wanted = load(pretrained)(**x, labels=labels).loss.item()
    model = Other(load(pretrained), form).train()
    with user_pipeline(crew, model, hp.hf.causal_lm_loss, (x, labels), **FIXED) as pipe:
        assert pipe.step(x, labels) == pytest.approx(wanted, rel=1e-5)


def test_a_model_from_a_folder_is_in_eval_mode(crew: Crew, pretrained: Path) -> None:
    with (
        pytest.warns(EvalModeWarning, match=r"from_pretrained.*call model\.train\(\)"),
        user_pipeline(crew, load(pretrained), hp.hf.causal_lm_loss, padded(), **FIXED),
    ):
        pass
