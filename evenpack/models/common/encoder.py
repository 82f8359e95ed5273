"""What encoders have in common: every token sees its whole sequence, so that heads for other tasks can read them.

Shapes: T = slots of the micro-batch, C = hidden size.
"""

from abc import abstractmethod
from typing import TypeVar

from jaxtyping import Float
from torch import Tensor, nn

from evenpack.batch import ModelInputs
from evenpack.models.common.section import TransformerConfig
from evenpack.models.common.transformer import PackedTransformer

EncoderConfigT = TypeVar("EncoderConfigT", bound=TransformerConfig)


class PackedEncoder(PackedTransformer[EncoderConfigT]):
    """A model that `evenpack finetune` can put a head on."""

    @abstractmethod
    def hidden_states(self, batch: ModelInputs) -> Float[Tensor, " T C"]:
        """Activations after the last block: what heads read.

        Raises: ValueError if positions may lie beyond a learned table; BackendError if the attention backend cannot
        serve on this device, dtype, head size or dropout.
        """

    @property
    @abstractmethod
    def pooler(self) -> nn.Linear | None:
        """The layer from a sequence's first token to what stands for the sequence, to be followed by tanh.

        None where pretraining had no use for one.
        """
