"""Log-probabilities against torch's log_softmax, with ranks and lists in one stable order."""

import math

import pytest
import torch

from sglcore.sampling.logprobs import logprobs_of
from sglcore.sampling.params import SamplingParams
from tests.sampling.rows import drawn


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("block_elements", [1, 700, 1 << 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_logprobs_equal_log_softmax(block_elements, dtype, is_narrow):
    torch.manual_seed(1)
    logits, targets = (torch.randn(9, 300) * 5).to(dtype), torch.randint(0, 300, (9,))
    found = logprobs_of(logits, targets, 6, block_elements, is_narrow)
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(found.chosen.double(), exact.gather(1, targets[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    order = exact.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(found.top_ids.long(), order.indices[:, :6])
    torch.testing.assert_close(found.top.double(), order.values[:, :6], atol=1e-5, rtol=1e-5)
    assert torch.equal(found.ranks.long() - 1, (order.indices == targets[:, None]).int().argmax(-1))


@pytest.mark.parametrize("is_narrow", [False, True])
def test_ties_are_listed_by_id_and_ranked_alike(is_narrow):
    logits = torch.tensor([[0.0, 2.0, -0.0, 2.0, 0.0, -math.inf]]).expand(6, -1)
    found = logprobs_of(logits, torch.arange(6), 6, is_narrow=is_narrow)
    assert found.top_ids[0].tolist() == [1, 3, 0, 2, 4, 5]
    assert found.ranks.tolist() == [3, 1, 4, 2, 5, 6]
    assert found.chosen[5] == -math.inf


@pytest.mark.parametrize("forgets", [False, True])
def test_ties_are_listed_by_id_where_sorting_keeps_no_order_unless_asked_to(forgets, monkeypatch):
    real = torch.Tensor.sort

    def sort(tensor, *, dim, descending, stable=False):
        if stable and not forgets:
            return real(tensor, dim=dim, descending=descending, stable=True)
        found = real(tensor.flip(dim), dim=dim, descending=descending, stable=True)
        return torch.return_types.sort((found.values, tensor.shape[dim] - 1 - found.indices))

    monkeypatch.setattr(torch.Tensor, "sort", sort)
    found = logprobs_of(torch.zeros(2, 40), torch.zeros(2, dtype=torch.int32), 3, is_narrow=True)
    assert (found.top_ids.tolist() == [[0, 1, 2]] * 2) != forgets


def test_no_alternatives_no_rows_and_more_than_the_vocabulary_are_fine():
    assert logprobs_of(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int32), 0).top.shape == (3, 0)
    assert logprobs_of(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int32), 2).top_ids.shape == (0, 2)
    assert logprobs_of(torch.zeros(3, 4), torch.tensor([-1, 99, 2]), 9).top_ids.tolist() == [[0, 1, 2, 3]] * 3


def test_sampled_logprobs_are_those_of_the_raw_logits():
    torch.manual_seed(2)
    logits = torch.randn(2, 30)
    rows = [
        (SamplingParams(temperature=0.0, logit_bias={7: 100.0}, logprobs=2), 1),
        (SamplingParams(top_k=2, temperature=3.0), 1),
    ]
    result = drawn(logits, rows, [0, 0])
    assert result.logprobs is not None and result.token_ids[0] == 7
    torch.testing.assert_close(result.logprobs.chosen[0], logits[0].log_softmax(-1)[7])
    assert result.logprobs.top_ids[0].tolist() == logits[0].topk(2).indices.tolist()


def test_nobody_pays_for_logprobs_that_nobody_wants():
    assert drawn(torch.zeros(1, 5), [(SamplingParams(), 1)], [0]).logprobs is None


def test_a_bad_row_leaves_the_logprobs_of_others_alone():
    logits = torch.randn(3, 20)
    expected = logprobs_of(logits, torch.tensor([1, 2, 3]), 3)
    logits[1, 4] = math.nan
    found = logprobs_of(logits, torch.tensor([1, 2, 3]), 3)
    assert torch.equal(found.top[[0, 2]], expected.top[[0, 2]]) and found.chosen[1].isnan()
    assert ((found.top_ids >= 0) & (found.top_ids < 20)).all()
