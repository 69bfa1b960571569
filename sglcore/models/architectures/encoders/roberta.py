"""RoBERTa and XLM-RoBERTa: BERT with positions that start after the padding token's id."""

from __future__ import annotations

from typing import ClassVar

from sglcore.models.architectures.encoders.bert import BertModel, ScoreHead
from sglcore.models.layer_kinds import Build


class RobertaModel(BertModel):
    """The encoder, with its classification head if it has labels."""

    ignored = (r"pooler\..*", r"lm_head\..*")
    stripped: ClassVar[str] = "roberta."

    def make_head(self, build: Build, labels: int) -> ScoreHead:
        """Return the classification head; both its layers are in `classifier`."""
        within, size = build.at("classifier"), self.config.hidden_size
        scores = within.linear("out_proj", size, labels, bias=True)
        return ScoreHead(within.linear("dense", size, size, bias=True), build.activation("tanh"), scores)
