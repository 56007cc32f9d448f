"""Log-probabilities equal log_softmax in float64; order and ranks follow (value, id)."""

import math

import pytest
import torch

from engine.sampling.logprobs import to_messages, token_logprobs, top_ids
from tests.engine.test_sampling_rows import OneRank

torch.set_num_threads(1)


def test_values_ranks_and_alternatives() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * 4
    logits[:, 290:] = -math.inf
    tokens = torch.tensor([0, 17, 250, 3, 289])
    got = token_logprobs(logits, tokens, top_n=6, tp=OneRank())
    oracle = torch.log_softmax(logits.double(), dim=1)
    torch.testing.assert_close(got.logprob_M.double(), oracle.gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=0)
    torch.testing.assert_close(got.top_logprobs_Mn.double(), oracle.topk(6).values, atol=1e-5, rtol=0)
    assert torch.equal(got.top_ids_Mn, oracle.topk(6).indices)
    for row, token in enumerate(tokens.tolist()):
        assert got.rank_M[row] == (oracle[row].argsort(descending=True) == token).nonzero().item() + 1


@pytest.mark.parametrize("n", [0, 1, 3, 20, 64])
def test_equal_values_come_by_ascending_id(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    logits = torch.randint(-2, 3, (6, 64), generator=generator).float() / 2
    logits[0, 5], logits[0, 3], logits[1, 2] = -0.0, 0.0, -math.inf
    for row in range(6):
        values = logits[row].tolist()
        expected = sorted(range(64), key=lambda token: (-values[token], token))[:n]
        assert top_ids(logits, n)[row].tolist() == expected


def test_messages_keep_what_each_row_asked_for() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    messages = to_messages(token_logprobs(logits, logits.argmax(1), top_n=5, tp=OneRank()), [0, 5, 2])
    assert [len(message.top_ids) for message in messages] == [0, 5, 2]
    assert [message.rank for message in messages] == [1, 1, 1]
    assert messages[1].top_ids[0] == messages[1].token_id
    assert messages[1].top_logprobs[0] == messages[1].logprob
