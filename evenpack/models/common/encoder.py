"""The parts that encoders share: masked tokens predicted at chosen slots, and what heads for other tasks read.

Shapes: T = slots of the micro-batch, C = hidden size, V = vocabulary, M = masked tokens that a micro-batch can hold.
"""

from abc import abstractmethod
from typing import TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from evenpack.batch import ChosenTargets, PackedBatch
from evenpack.kernels.cross_entropy import linear_cross_entropy
from evenpack.losses import Loss
from evenpack.models.common.loss_sums import LossOutput
from evenpack.models.common.section import TransformerConfig
from evenpack.models.common.transformer import PackedTransformer

EncoderConfigT = TypeVar("EncoderConfigT", bound=TransformerConfig)


class MaskedTokenHead(nn.Module):
    """The layers between the encoder and the decoder, which is the token embedding with a bias of its own.

    Args:
        hidden_size: C.
        vocabulary_size: V.
        norm: after the activation.
        bias: whether the linear layer has one.
    """

    def __init__(self, hidden_size: int, vocabulary_size: int, *, norm: nn.Module, bias: bool = True) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.norm = norm
        self.decoder_bias = nn.Parameter(torch.zeros(vocabulary_size))

    def forward(self, hidden: Float[Tensor, " M C"]) -> Float[Tensor, " M C"]:
        return self.norm(F.gelu(self.dense(hidden)))


class Pooler(nn.Linear):
    """BERT's layer from a sequence's first token to the representation of the sequence.

    Args:
        hidden_size: C.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, hidden_size)

    def forward(self, first_tokens: Float[Tensor, " N C"]) -> Float[Tensor, " N C"]:
        return super().forward(first_tokens).tanh()


class PackedEncoder(PackedTransformer[EncoderConfigT]):
    """A model that learns from masked tokens, and to which `evenpack finetune` can add a head.

    A family's `_build` makes the layers, its `forward` returns `masked_token_loss` and any other losses.
    """

    masked_token_head: MaskedTokenHead

    @abstractmethod
    def hidden_states(self, batch: PackedBatch) -> Float[Tensor, " T C"]:
        """Returns the activations after the last block, which heads read.

        Raises: ValueError if positions may lie beyond a learned table; BackendError if the attention backend cannot
        serve on this device, dtype, head size or dropout.
        """

    @property
    @abstractmethod
    def pooler(self) -> nn.Module | None:
        """The layers from a sequence's first token to the representation of the sequence, which a task's head reads.

        None if pretraining did not train any: the head has a new `Pooler`.
        """

    def compile_parts(self, *, varying_slots: bool) -> None:
        """Compiles the layers before the masked tokens' output matrix too, for any number of masked tokens."""
        super().compile_parts(varying_slots=varying_slots)
        self.masked_token_head.compile()

    @property
    def token_layers(self) -> nn.Module | None:
        """The layers between the activations of each token and a task's classifier of tokens; None: there are none."""
        return None

    def masked_token_loss(self, hidden: Float[Tensor, " T C"], targets: ChosenTargets) -> LossOutput:
        """Returns the sum of the masked-token losses at the targets' slots; the logits never exist as a whole."""
        loss = linear_cross_entropy(
            self.masked_token_head(self._at_slots(hidden, targets.positions)),
            self.token_embedding.weight,
            targets.labels,
            targets.weights,
            bias=self.masked_token_head.decoder_bias,
            compiled=self.is_compiled,
        )
        return LossOutput(*loss)

    def _at_slots(self, hidden: Float[Tensor, " T C"], slots: Int[Tensor, " M"]) -> Float[Tensor, " M C"]:
        chosen = hidden.index_select(0, slots)
        if self.is_compiled:  # micro-batches differ in their number of targets
            torch._dynamo.maybe_mark_dynamic(chosen, 0)
        return chosen

    def chosen_targets(
        self, batch: PackedBatch, loss: Loss, *, remedy: str = "choose a model.kind that learns from those"
    ) -> ChosenTargets:
        """Returns the targets of one loss.

        Args:
            remedy: what to change in the model's section if batches are to stay as they are; for the message.

        Raises: ValueError if the batch has none at chosen slots.
        """
        targets = batch.targets.get(loss.name)
        if not isinstance(targets, ChosenTargets):
            raise ValueError(
                f"{type(self).__name__} learns from targets {loss.name}, the batch has {', '.join(batch.targets)}: "
                f"choose a data.recipe that has targets {loss.name}, or {remedy}"
            )
        return targets
