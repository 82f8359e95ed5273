"""BERT, a post-norm encoder that learns from masked tokens and next sentences (Devlin et al. 2019).

Its `model:` section, and the family.
"""

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from evenpack.losses import MASKED_TOKEN, NEXT_SENTENCE, Divisor, Loss
from evenpack.models.common.section import TransformerConfig
from evenpack.models.families import ModelFamily
from evenpack.units import Rows, Share


class BertConfig(TransformerConfig):
    """BERT, pretrained on masked tokens and, on pairs, next sentences."""

    presets: ClassVar[dict[str, dict[str, int]]] = {
        "tiny": {"layers": 2, "hidden_size": 128, "heads": 2},
        "mini": {"layers": 4, "hidden_size": 256, "heads": 4},
        "base": {"layers": 12, "hidden_size": 768, "heads": 12},
        "large": {"layers": 24, "hidden_size": 1024, "heads": 16},
    }
    """Devlin et al. 2019, section 3; tiny and mini are of Turc et al. 2019 (Well-Read Students Learn Better)."""

    kind: Literal["bert"]
    preset: Literal["tiny", "mini", "base", "large"] = "base"
    """Sizes of Devlin et al. 2019, section 3; tiny and mini are of Turc et al. 2019."""
    positions: Literal["learned"] = "learned"
    """Encoding of positions: a learned table."""
    dropout: Share = Field(default=0.1, ge=0.0, lt=1.0)
    """Dropout after embeddings and each residual branch, and of attention probabilities."""
    token_types: Rows = Field(default=2, ge=2, le=1 << 16)
    """Rows of the token-type table: the first and the second half of a pair."""
    mlm_reduction: Literal["token", "sequence"] = "token"
    """How the masked-token loss is averaged. token: mean over all masked tokens; sequence: mean over the masked tokens
    of each sequence, then over sequences."""
    loss_balancing: Literal["exact", "expected", "micro_batch"] = "exact"
    """Denominators of a step's loss sums. exact: the numbers of masked tokens and sequences in the step; expected:
    their means over all steps, the same for each step. For study, micro_batch: the numbers in each micro-batch,
    followed by a mean over micro-batches."""
    next_sentence_reduction: Literal["sequence", "pack"] = "sequence"
    """How the next-sentence loss is averaged. sequence: mean over all sequences of the step. For study, pack: mean over
    the sequences of each pack, then over packs."""
    next_sentence: bool = True
    """Whether the model is trained on next-sentence prediction, which needs pairs. false leaves out the pooler, the
    next-sentence head and its loss: the model learns from masked tokens alone, of documents (recipe documents or
    concat) or of pairs."""

    @property
    def losses(self) -> tuple[Loss, ...]:
        masked_token = replace(MASKED_TOKEN, divided_by="targets" if self.mlm_reduction == "token" else "sequences")
        pairs: Divisor = "packs" if self.next_sentence_reduction == "pack" else "sequences"
        next_sentence = (replace(NEXT_SENTENCE, divided_by=pairs),) if self.next_sentence else ()
        return masked_token, *next_sentence

    @property
    def denominators(self) -> Literal["exact", "expected", "micro_batch"]:
        return self.loss_balancing

    @property
    def study_switches(self) -> dict[str, str]:
        found = super().study_switches
        if self.next_sentence_reduction == "pack":
            found["model.next_sentence_reduction is pack"] = (
                "a sequence has a lower weight in the next-sentence loss the more sequences its pack holds"
            )
        if self.loss_balancing == "micro_batch":
            found["model.loss_balancing is micro_batch"] = (
                "a token has a higher weight in the loss the fewer its micro-batch holds"
            )
        return found


BERT = ModelFamily(
    config=BertConfig,
    causal=False,
    objective="masked_tokens",
    recipes=("sentence_pairs", "masked_pairs", "documents", "concat"),
    model="evenpack.models.bert.model:Bert",
    huggingface="evenpack.models.bert.huggingface:BERT_MAPPING",
)
