"""The lines of docs/adapters.md that make the formats of other trainers from a batch."""

import re

import pytest
import torch
from host_trainers import own_loader
from repository import ROOT


@pytest.mark.parametrize("rows", [1, 4])
def test_the_formats_of_others_hold_the_segments_of_the_batch(rows: int) -> None:
    page = (ROOT / "docs/adapters.md").read_text("utf-8").partition("## Formats of others")[2]
    batch = own_loader(packs_per_step=rows).batches_of(1)[0]
    names = {"batch": batch}
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, names)
    packed, olmo, trl = names["packed"], names["olmo"], names["trl"]
    begins = (batch.position_ids == 0).nonzero().flatten().tolist()
    assert packed["cu_seqlens_q"].tolist() == packed["cu_seqlens_kv"].tolist() == [*begins, batch.slots]
    assert packed["cu_seqlens_q"].dtype == torch.int32
    ends = olmo["doc_lens"].cumsum(-1)
    assert ends.tolist() == [[*begins[1:], batch.slots]]
    assert olmo["max_doc_lens"] == [int(batch.position_ids.max()) + 1]
    assert packed["max_seqlen_q"] == packed["max_seqlen_kv"] >= olmo["max_doc_lens"][0]
    assert [position for length in trl["seq_lengths"] for position in range(length)] == batch.position_ids.tolist()
    assert len(trl["input_ids"]) == sum(trl["seq_lengths"])
