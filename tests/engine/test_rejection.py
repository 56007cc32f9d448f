"""Rejection sampling keeps the target's distribution and accepts as often as theory says; a wrong rule is noticed.

Draws are deterministic (fixed seeds), so a p-value is a constant of the code: 1e-4 is far from the observed ones.
"""

import math
import sys
import types
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from scipy import stats
from torch import Tensor

import engine.sampling.rejection as rejection
from engine.sampling.chain import chain_tokens
from engine.sampling.filters import FilterFlags
from engine.sampling.noise import STREAM_DRAFT, STREAM_TOKEN, gumbel_noise
from engine.sampling.rejection import Proposals, verified_tokens
from engine.sampling.sampler import SamplingRows, kept_logits, sample
from engine.sampling.verify import verify

torch.set_num_threads(1)
NUM_DRAWS = 20000
ALPHA = 1e-4
VOCAB = 12
P_LOGITS = torch.tensor([2.0, 1.6, 1.1, 0.7, 0.7, 0.4, 0.0, -0.5, -1.1, -2.0, -math.inf, -9.0])
Q_LOGITS = torch.tensor([0.3, 2.1, -0.4, 1.5, 0.7, 0.4, -3.0, 1.2, -1.1, -0.2, 0.5, -2.0])
CASES: dict[str, dict[str, float]] = {
    "temperature 1": {},
    "temperature 0.6": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.25},
    "all": {"temperature": 1.4, "top_k": 7, "top_p": 0.8, "min_p": 0.15},
}


class OneRank:
    rank, size = 0, 1

    def all_gather(self, x: Tensor, *, dim: int) -> Tensor:
        return x


class RankOf(OneRank):
    """One of several ranks; the others' parts are known beforehand."""

    def __init__(self, rank: int, parts: list[Tensor]) -> None:
        self.rank, self.size, self.parts = rank, len(parts), parts

    def all_gather(self, x: Tensor, *, dim: int) -> Tensor:
        assert torch.equal(x, self.parts[self.rank])
        return torch.cat(self.parts, dim=dim)


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows have one row's logits and filters: those are applied once, not 20,000 times."""

    def once(logits_NV: Tensor, rows: SamplingRows) -> Tensor:
        first = rows.take(torch.zeros(1, dtype=torch.int64))
        return kept_logits(logits_NV[:1], first).expand(logits_NV.shape[0], -1)

    monkeypatch.setattr(rejection, "kept_logits", once)


def rows_at(
    position_N: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> SamplingRows:
    flags = FilterFlags.of([temperature], [top_k], [top_p], [min_p])
    count = position_N.shape[0]
    return SamplingRows(
        temperature_N=torch.full((count,), temperature),
        top_k_N=torch.full((count,), top_k),
        top_p_N=torch.full((count,), top_p),
        min_p_N=torch.full((count,), min_p),
        seed_N=torch.full((count,), 20),
        position_N=position_N,
        all_greedy=flags.all_greedy,
        any_filter=flags.any_filter,
        sort_width=flags.sort_width,
    )


def exact(case: dict[str, float]) -> Tensor:
    """p in float64, by the filters' own definition on one row; the filters have tests of their own."""
    rows = rows_at(torch.zeros(1, dtype=torch.int64), **case)
    return torch.softmax(kept_logits(P_LOGITS[None], rows)[0].double(), dim=0)


def goodness(tokens_N: Tensor, p_V: Tensor) -> float:
    """p-value of the tokens against the exact probabilities; 0 if a token outside the support was drawn."""
    counts_V = torch.bincount(tokens_N, minlength=p_V.numel()).double()
    if bool((counts_V[p_V == 0] > 0).any()):
        return 0.0
    kept_V = p_V * tokens_N.numel() > 3
    wanted, seen = p_V[kept_V], counts_V[kept_V]
    if seen.numel() == 1:
        return 1.0
    return float(stats.chisquare(seen.numpy(), (wanted * seen.sum() / wanted.sum()).numpy()).pvalue)


def one_hot(case: dict[str, float], draft: int) -> tuple[Tensor, Tensor]:
    """(tokens, accepted) of NUM_DRAWS rows that verify one draft."""
    rows = rows_at(torch.arange(NUM_DRAWS), **case)
    draft_N = torch.full((NUM_DRAWS,), draft)
    tokens_N = verified_tokens(P_LOGITS.expand(NUM_DRAWS, -1), rows, Proposals(token_N=draft_N), OneRank(), 0)
    return tokens_N, tokens_N == draft_N


def drawn_drafts(case: dict[str, float]) -> tuple[SamplingRows, Proposals]:
    rows = rows_at(torch.arange(NUM_DRAWS), **case)
    kept_NV = kept_logits(Q_LOGITS[None], rows.take(torch.zeros(1, dtype=torch.int64))).expand(NUM_DRAWS, -1)
    noise_NV = gumbel_noise(rows.seed_N, rows.position_N, torch.arange(VOCAB), stream=STREAM_DRAFT)
    return rows, Proposals(token_N=(kept_NV + noise_NV).argmax(1), logits_NV=kept_NV)


@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize("draft", [0, 3, 9, 10])
@pytest.mark.parametrize("name", CASES)
def test_one_hot_draft_keeps_the_distribution(name: str, draft: int) -> None:
    p_V = exact(CASES[name])
    tokens_N, accepted_N = one_hot(CASES[name], draft)
    assert goodness(tokens_N, p_V) > ALPHA
    assert stats.binomtest(int(accepted_N.sum()), NUM_DRAWS, float(p_V[draft])).pvalue > ALPHA


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_one_hot_acceptance_equals_exact_match_within_95_percent(temperature: float) -> None:
    case, draft = {"temperature": temperature}, 1
    rows = rows_at(torch.arange(NUM_DRAWS) + 10**6, **case)
    matches = int((sample(P_LOGITS.expand(NUM_DRAWS, -1), rows, OneRank(), 0) == draft).sum())
    accepted = int(one_hot(case, draft)[1].sum())
    half_width = 1.96 * math.sqrt(2 * float(exact(case)[draft]) * (1 - float(exact(case)[draft])) / NUM_DRAWS)
    assert abs(matches - accepted) / NUM_DRAWS < half_width


@pytest.mark.usefixtures("alike")
@pytest.mark.parametrize("name", CASES)
def test_drawn_drafts_keep_the_distribution_and_accept_the_overlap(name: str) -> None:
    rows, proposals = drawn_drafts(CASES[name])
    p_V, q_V = exact(CASES[name]), torch.softmax(proposals.logits_NV[0].double(), dim=0)
    assert goodness(proposals.token_N, q_V) > ALPHA
    tokens_N = verified_tokens(P_LOGITS.expand(NUM_DRAWS, -1), rows, proposals, OneRank(), 0)
    assert goodness(tokens_N, p_V) > ALPHA
    overlap = float(torch.minimum(p_V, q_V).sum())
    assert stats.binomtest(int((tokens_N == proposals.token_N).sum()), NUM_DRAWS, overlap).pvalue > ALPHA


@pytest.mark.parametrize("draft_case", ["one-hot", "drawn"])
@pytest.mark.parametrize("mistake", ["residual with the draft", "coin of the token stream", "always accept"])
def test_a_wrong_rule_fails(mistake: str, draft_case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = rejection._accept

    def wrong(target_NV: Tensor, rows: SamplingRows, proposals: Proposals) -> tuple[Tensor, Tensor]:
        accepted_N, residual_NV = real(target_NV, rows, proposals)
        if mistake == "residual with the draft":
            return accepted_N, target_NV
        return torch.ones_like(accepted_N) if mistake == "always accept" else accepted_N, residual_NV

    if mistake == "coin of the token stream":  # coin and residual draw are then not independent
        monkeypatch.setattr(rejection, "STREAM_ACCEPT", STREAM_TOKEN)
        monkeypatch.setattr(rejection, "STREAM_RESIDUAL", STREAM_TOKEN)
    monkeypatch.setattr(rejection, "_accept", wrong)
    if draft_case == "one-hot":
        tokens_N = one_hot({}, 1)[0]
    else:
        rows, proposals = drawn_drafts({})
        tokens_N = verified_tokens(P_LOGITS.expand(NUM_DRAWS, -1), rows, proposals, OneRank(), 0)
    assert goodness(tokens_N, exact({})) < ALPHA


def chains(table_VV: Tensor, draft_VV: Tensor, *, drawn: bool, num_chains: int, num_tokens: int, K: int) -> Tensor:
    """Speculative decoding of many sequences of a Markov chain: tokens [num_chains, num_tokens] after token 0.

    The drafter proposes from the last token alone (drafts do not see each other, as in DFlash); positions behind a
    rejection are drafted and judged again with the same noise.
    """
    V = table_VV.shape[0]
    seed_R, last_R = torch.arange(num_chains), torch.zeros(num_chains, dtype=torch.int64)
    length_R = torch.zeros(num_chains, dtype=torch.int64)
    out = torch.full((num_chains, num_tokens + K + 1), -1)
    while int(length_R.min()) < num_tokens:
        position_RK1 = length_R[:, None] + 1 + torch.arange(K + 1)
        q_RKV = draft_VV[last_R][:, None].expand(-1, K, -1)
        if drawn:
            noise = gumbel_noise(
                seed_R.repeat_interleave(K), position_RK1[:, :K].flatten(), torch.arange(V), stream=STREAM_DRAFT
            )
            draft_RK = (q_RKV.reshape(-1, V) + noise).argmax(1).view(num_chains, K)
        else:
            draft_RK = q_RKV.argmax(2)
        inputs_RK1 = torch.cat([last_R[:, None], draft_RK], dim=1)
        rows = replace(rows_at(position_RK1.flatten()), seed_N=seed_R.repeat_interleave(K + 1))
        token_RK1 = torch.cat([draft_RK, torch.full((num_chains, 1), -1)], dim=1)
        padded = torch.cat([q_RKV, torch.zeros(num_chains, 1, V)], dim=1).reshape(-1, V)
        proposals = Proposals(token_N=token_RK1.flatten(), logits_NV=padded if drawn else None)
        target_RK1 = verified_tokens(table_VV[inputs_RK1].view(-1, V), rows, proposals, OneRank(), 0)
        verdict = verify(
            target_RK1=target_RK1.view(num_chains, K + 1),
            draft_RK=draft_RK,
            k_R=torch.full((num_chains,), K),
            committed_R=length_R,
            max_len_R=torch.full((num_chains,), 10**6),
            min_len_R=torch.zeros(num_chains, dtype=torch.int64),
            stop_ids_RS=torch.empty(num_chains, 0, dtype=torch.int64),
            finished_R=length_R >= num_tokens,
        )
        emitted_R = verdict.num_emitted_R
        for column in range(K + 1):
            written = column < emitted_R
            out[written, length_R[written] + column] = target_RK1.view(num_chains, K + 1)[written, column]
        last_R = torch.where(emitted_R > 0, verdict.last_token_R, last_R)
        length_R = length_R + emitted_R
    return out[:, :num_tokens]


@pytest.mark.parametrize("drawn", [False, True], ids=["one-hot", "drawn"])
def test_whole_sequences_have_the_joint_distribution(drawn: bool) -> None:
    """Three tokens of a chain over four, in blocks of 2 drafts: the noise of positions judged again is fresh."""
    generator = torch.Generator().manual_seed(3)
    table_VV = torch.randn(4, 4, generator=generator)
    draft_VV = table_VV + torch.randn(4, 4, generator=generator) * 0.7
    tokens_RT = chains(table_VV, draft_VV, drawn=drawn, num_chains=NUM_DRAWS, num_tokens=3, K=2)
    p_VV = torch.softmax(table_VV.double(), dim=1)
    joint = p_VV[0][:, None, None] * p_VV[:, :, None] * p_VV[None]
    code = tokens_RT[:, 0] * 16 + tokens_RT[:, 1] * 4 + tokens_RT[:, 2]
    assert goodness(code, joint.flatten()) > ALPHA


def mixed() -> tuple[Tensor, SamplingRows, Proposals]:
    """Rows of every kind: greedy, sampled with different filters, with and without a draft, one with stops masked."""
    logits_NV = torch.randn(64, VOCAB, generator=torch.Generator().manual_seed(1))
    index_N = torch.arange(64)
    rows = replace(
        rows_at(index_N, top_p=0.9),
        temperature_N=torch.where(index_N % 3 == 0, 0.0, 0.8),
        top_k_N=torch.where(index_N % 2 == 0, 4, 0),
        stop_ids_NS=torch.tensor([[5, -1]]).expand(64, -1),
        mask_stops_N=index_N % 5 == 0,
    )
    token_N = torch.where(index_N % 4 == 0, -1, index_N % VOCAB)
    return logits_NV, rows, Proposals(token_N=token_N)


def test_greedy_rows_and_rows_without_drafts_are_those_of_exact_match() -> None:
    logits_NV, rows, proposals = mixed()
    tokens_N = verified_tokens(logits_NV, rows, proposals, OneRank(), 0)
    plain_N = sample(logits_NV, rows, OneRank(), 0)
    same_N = (rows.temperature_N == 0) | (proposals.token_N < 0)
    assert torch.equal(tokens_N[same_N], plain_N[same_N])
    assert not torch.equal(tokens_N, plain_N)
    assert not bool((tokens_N[rows.mask_stops_N] == 5).any())


def test_batch_order_and_ranks_change_nothing() -> None:
    logits_NV, rows, proposals = mixed()
    whole_N = verified_tokens(logits_NV, rows, proposals, OneRank(), 0)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    moved = replace(rows.take(order), stop_ids_NS=rows.stop_ids_NS[order], mask_stops_N=rows.mask_stops_N[order])
    assert torch.equal(verified_tokens(logits_NV[order], moved, proposals.take(order), OneRank(), 0), whole_N[order])
    unmasked = replace(rows, stop_ids_NS=None, mask_stops_N=None)
    parts = list(logits_NV.split(VOCAB // 2, dim=1))
    one = verified_tokens(logits_NV, unmasked, proposals, OneRank(), 0)
    for rank in range(2):
        two = verified_tokens(parts[rank], unmasked, proposals, RankOf(rank, parts), rank * VOCAB // 2)
        assert torch.equal(two, one)


def test_the_fixed_shape_path_gives_the_same_tokens() -> None:
    """What an accelerator runs: every row pays for all, nothing is read back."""
    logits_NV, rows, proposals = mixed()
    plain = replace(rows, stop_ids_NS=None, mask_stops_N=None)
    drawing_N = plain.temperature_N > 0
    whole_N = rejection._accept_or_draw(logits_NV, plain, proposals)
    tokens_N = verified_tokens(logits_NV, plain, proposals, OneRank(), 0)
    assert torch.equal(tokens_N[drawing_N], whole_N[drawing_N])


def scripted_chain(draft_probs, draft_token_ids, target_probs, *, deterministic, seed, offset):  # type: ignore[no-untyped-def]
    """The documented law of FlashInfer's kernel, row by row: one seed for the batch, the row's place beside it; tokens,
    how many drafts would have been accepted one by one, how many were."""
    assert deterministic and seed.dtype == offset.dtype == torch.int64 and seed.shape == offset.shape == (1,)
    R, K, V = draft_probs.shape
    assert target_probs.shape == (R, K + 1, V) and draft_token_ids.dtype == torch.int32 and V % 4 == 0
    out, emitted_R = torch.full((R, K + 1), -1, dtype=torch.int32), torch.zeros(R, dtype=torch.int32)
    for r in range(R):
        generator = torch.Generator().manual_seed((int(seed) + r) & (2**62 - 1))
        u = torch.rand(K, generator=generator)
        n = 0
        while n < K:
            token = int(draft_token_ids[r, n])
            if not u[n] * draft_probs[r, n, token] < target_probs[r, n, token]:
                break
            out[r, n] = token
            n += 1
        weights = target_probs[r, n] - (draft_probs[r, n] if n < K else 0.0)
        out[r, n] = torch.multinomial(weights.clamp(min=0), 1, generator=generator)
        emitted_R[r] = n
    return out, emitted_R.clone(), emitted_R


def chain_batch(num_chains: int) -> tuple[Tensor, SamplingRows, Proposals]:
    """Chains of two drafts and a bonus row, the second draft missing in every third, every fourth greedy; then as many
    single rows."""
    index_R = torch.arange(num_chains)
    chain_N = torch.cat([index_R.repeat_interleave(3), index_R])
    rows = rows_at(torch.arange(chain_N.shape[0]))
    rows = replace(rows, temperature_N=torch.where(chain_N % 4 == 0, 0.0, 1.0))
    kept_NV = Q_LOGITS.expand(chain_N.shape[0], -1)
    noise_NV = gumbel_noise(rows.seed_N, rows.position_N, torch.arange(VOCAB), stream=STREAM_DRAFT)
    token_N = torch.where(chain_N % 4 == 0, Q_LOGITS.argmax(), (kept_NV + noise_NV).argmax(1))
    column_RK1 = torch.arange(3).expand(num_chains, -1)
    missing = (column_RK1 == 2) | ((column_RK1 == 1) & (index_R[:, None] % 3 == 0))
    token_N[: 3 * num_chains][missing.flatten()] = -1
    token_N[3 * num_chains :] = -1
    return P_LOGITS.expand(chain_N.shape[0], -1), rows, Proposals(token_N=token_N, logits_NV=kept_NV)


def check_chain(device: str, num_chains: int) -> None:
    logits_NV, rows, proposals = chain_batch(num_chains)
    moved = SamplingRows(
        **{
            name: value.to(device) if isinstance(value := getattr(rows, name), Tensor) else value
            for name in rows.__slots__
        }
    )
    on_device = Proposals(token_N=proposals.token_N.to(device), logits_NV=proposals.logits_NV.to(device))
    tokens_N = chain_tokens(
        logits_NV.to(device), moved, on_device, width=3, num_chains=num_chains, tp=OneRank(), vocab_start=0
    ).cpu()
    tokens_R3, single_N = tokens_N[: 3 * num_chains].view(-1, 3), tokens_N[3 * num_chains :]
    draft_R3 = proposals.token_N[: 3 * num_chains].view(-1, 3)
    greedy_R = torch.arange(num_chains) % 4 == 0
    best, wrong = int(P_LOGITS.argmax()), int(Q_LOGITS.argmax())
    assert best != wrong, "greedy rows are meant to reject their draft"
    assert bool((tokens_R3[greedy_R, 0] == best).all()) and bool((single_N[greedy_R] == best).all())
    p_V, q_V = exact({}), torch.softmax(Q_LOGITS.double(), dim=0)
    drawn_R3, drawn_draft_R3 = tokens_R3[~greedy_R], draft_R3[~greedy_R]
    assert goodness(single_N[~greedy_R], p_V) > ALPHA
    assert goodness(drawn_R3[:, 0], p_V) > ALPHA
    accepted_R = drawn_R3[:, 0] == drawn_draft_R3[:, 0]
    overlap = float(torch.minimum(p_V, q_V).sum())
    assert stats.binomtest(int(accepted_R.sum()), accepted_R.numel(), overlap).pvalue > ALPHA
    with_second_R = drawn_draft_R3[:, 1] >= 0
    assert goodness(drawn_R3[accepted_R & with_second_R, 1], p_V) > ALPHA
    assert goodness(drawn_R3[accepted_R & ~with_second_R, 1], p_V) > ALPHA
    twice_R = accepted_R & with_second_R & (drawn_R3[:, 1] == drawn_draft_R3[:, 1])
    assert goodness(drawn_R3[twice_R, 2], p_V) > ALPHA


def script(monkeypatch: pytest.MonkeyPatch, chain: Callable[..., object]) -> None:
    module = types.ModuleType("flashinfer.sampling")
    module.chain_speculative_sampling = chain  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", module)


def test_chain_hands_flashinfer_the_right_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, scripted_chain)
    check_chain("cpu", 1500)


def test_the_seed_of_a_chain_batch_is_new_whenever_any_row_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour that starts again with an equal seed must not bring back the noise of an earlier step."""
    seeds = []

    def note(*args: object, seed: Tensor, **kwargs: object) -> object:
        seeds.append(int(seed))
        return scripted_chain(*args, seed=seed, **kwargs)

    script(monkeypatch, note)
    logits_NV, rows, proposals = chain_batch(4)
    for moved in ([], [9], [0], [0, 3, 6, 9]):  # each chain has three rows; the first carries its key
        position_N = rows.position_N.clone()
        position_N[moved] += 100
        own = replace(rows, position_N=position_N)
        chain_tokens(logits_NV, own, proposals, width=3, num_chains=4, tp=OneRank(), vocab_start=0)
    assert len(set(seeds)) == 4


@pytest.mark.gpu
def test_chain_of_flashinfer() -> None:
    pytest.importorskip("flashinfer")
    check_chain("cuda", 20000)
