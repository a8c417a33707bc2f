"""Hugging Face models: losses and a trainer for models of the transformers library."""

from typing import TYPE_CHECKING

from hetpipe._lazy import lazy

if TYPE_CHECKING:
    from hetpipe.hf.model_losses import causal_lm_loss as causal_lm_loss
    from hetpipe.hf.model_losses import classification_loss as classification_loss
    from hetpipe.hf.model_losses import masked_lm_loss as masked_lm_loss
    from hetpipe.hf.trainer import Trainer as Trainer
else:
    __getattr__, __dir__ = lazy(__name__)
