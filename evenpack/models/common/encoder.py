"""The parts that encoders share: every token sees its whole sequence, and heads for other tasks can read them.

Shapes: T = slots of the micro-batch, C = hidden size.
"""

from abc import abstractmethod
from typing import TypeVar

from jaxtyping import Float
from torch import Tensor, nn

from evenpack.batch import PackedBatch
from evenpack.models.common.section import TransformerConfig
from evenpack.models.common.transformer import PackedTransformer

EncoderConfigT = TypeVar("EncoderConfigT", bound=TransformerConfig)


class PackedEncoder(PackedTransformer[EncoderConfigT]):
    """A model to which `evenpack finetune` can add a head."""

    @abstractmethod
    def hidden_states(self, batch: PackedBatch) -> Float[Tensor, " T C"]:
        """Returns the activations after the last block, which heads read.

        Raises: ValueError if positions may lie beyond a learned table; BackendError if the attention backend cannot
        serve on this device, dtype, head size or dropout.
        """

    @property
    @abstractmethod
    def pooler(self) -> nn.Linear | None:
        """The layer from a sequence's first token to the representation of the sequence, to be followed by tanh.

        None if pretraining did not train one.
        """
