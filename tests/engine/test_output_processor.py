"""What the client sees equals an oracle on the whole text, however the tokens are grouped into steps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.output_processor import RequestState
from engine.outputs import OutputChunk
from engine.request import TokenDelta
from engine.sampling_params import SamplingParams
from engine.step import TokenLogprobs
from tests.engine.test_detokenizer import bytewise
from tests.engine.toy_tokenizers import byte_level

MAX_DRAFTS = 7


def logprob(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id=token_id, logprob=-token_id / 1000, rank=1)


def deltas_of(groups: list[list[int]], finish: str | None, drafted: int = MAX_DRAFTS) -> list[TokenDelta]:
    deltas = []
    for index, group in enumerate(groups):
        deltas.append(
            TokenDelta(
                request_id="r",
                token_ids=tuple(group),
                logprobs=tuple(logprob(token_id) for token_id in group),
                num_drafted=drafted if index else 0,
                num_accepted=len(group) - 1 if index else 0,
                is_decode_step=index > 0,
                num_cached_tokens=4,
                finish_reason=finish if index == len(groups) - 1 else None,
            )
        )
    return deltas


def run(
    params: SamplingParams, groups: list[list[int]], finish: str | None = "length"
) -> tuple[RequestState, list[OutputChunk]]:
    state = RequestState("r", byte_level().encode("the"), params, byte_level(), num_spec_tokens=MAX_DRAFTS)
    return state, [state.update(delta) for delta in deltas_of(groups, finish)]


def oracle(ids: list[int], stops: tuple[str, ...], include: bool, min_tokens: int) -> tuple[str, int, str | None]:
    """(text, number of ids kept, stop string) by decoding every prefix of the ids."""
    decode = byte_level().decode
    begin = 0
    for count in range(1, len(ids) + 1):
        text = decode(ids[:count])
        if count < len(ids):
            text = text.rstrip("\ufffd")
        ends = [
            (end, end - len(stop), stop)
            for stop in stops
            for end in range(begin + 1, len(text) + 1)
            if text[:end].endswith(stop)
        ]
        if count > min_tokens and ends:
            end, start, stop = min(ends)
            return text[: end if include else start], count, stop
        begin = len(text)
    return decode(ids), len(ids), None


@st.composite
def grouped(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    groups, rest = [ids[:1]], ids[1:]
    while rest:
        size = draw(st.integers(1, MAX_DRAFTS + 1))
        groups.append(rest[:size])
        rest = rest[size:]
    return groups


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_stop_strings_equal_the_oracle(data: st.DataObject) -> None:
    piece = st.sampled_from(["a", "b", "ab", "the", " stop", "\u4f60", "\U0001f600", "\n"])
    text = "".join(data.draw(st.lists(piece, min_size=1, max_size=16)))
    ids = bytewise(byte_level(), text, data)
    stops = tuple(
        data.draw(
            st.lists(
                st.one_of(
                    st.sampled_from(["ab", "aab", "abab", "ba", "b", "stop", "p\n", "\u4f60a", "\U0001f600", "e s"]),
                    st.text("ab", min_size=1, max_size=4),
                ),
                max_size=3,
                unique=True,
            )
        )
    )
    include, min_tokens = data.draw(st.booleans()), data.draw(st.sampled_from([0, 0, 1, 4]))
    params = SamplingParams(
        stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=100, logprobs=0
    )
    groups = data.draw(grouped(ids))
    state, chunks = run(params, groups)
    expected_text, expected_count, stop = oracle(ids, stops, include, min_tokens)

    assert "".join(chunk.text for chunk in chunks) == state.text == expected_text
    assert [i for chunk in chunks for i in chunk.token_ids] == state.token_ids == ids[:expected_count]
    assert state.logprobs == [logprob(token_id) for token_id in ids[:expected_count]]
    assert (state.finish_reason, state.stop_reason) == (("stop", stop) if stop is not None else ("length", None))
    assert state.usage().completion_tokens == expected_count
    last = next(index for index, chunk in enumerate(chunks) if chunk.finish_reason)
    assert all(chunk == OutputChunk() for chunk in chunks[last + 1 :])
    assert [chunk.abort for chunk in chunks] == [
        index == last and stop is not None and index < len(groups) - 1 for index in range(len(chunks))
    ]
    # What was sent early is all that could be sent: the rest may still become a stop string.
    sent, seen = "", 0
    for chunk, group in zip(chunks[:last], groups, strict=False):
        sent, seen = sent + chunk.text, seen + len(group)
        complete = byte_level().decode(ids[:seen]).rstrip("\ufffd")
        held = 0
        if not include:
            held = max((n for s in stops for n in range(1, len(s)) if complete.endswith(s[:n])), default=0)
        assert sent == complete[: len(complete) - held]
    check_stats(state)


def check_stats(state: RequestState) -> None:
    """The rules that tools reading the object check."""
    stats = state.spec_stats()
    if stats is None:
        assert state.usage().accepted_prediction_tokens == state.usage().rejected_prediction_tokens == 0
        return
    histogram = stats.acceptance_histogram
    assert len(histogram) == stats.num_spec_tokens + 1 == MAX_DRAFTS + 1
    assert sum(histogram) == stats.num_spec_steps
    assert sum(count * steps for count, steps in enumerate(histogram)) == stats.num_accepted_draft_tokens
    assert stats.num_accepted_draft_tokens <= stats.num_draft_tokens <= stats.num_spec_steps * stats.num_spec_tokens
    assert stats.mean_acceptance_length == 1 + stats.num_accepted_draft_tokens / stats.num_spec_steps
    assert stats.draft_acceptance_rate == stats.num_accepted_draft_tokens / stats.num_draft_tokens
    # Every id came from the prefill, an accepted draft, or was the target's own in a step.
    own = 1 + stats.num_spec_steps
    assert stats.num_accepted_draft_tokens <= len(state.token_ids) <= own + stats.num_accepted_draft_tokens
    usage = state.usage()
    assert usage.accepted_prediction_tokens + usage.rejected_prediction_tokens == stats.num_draft_tokens


def one_by_one(text: str) -> list[int]:
    byte_ids = {byte_level().token_bytes(i): i for i in range(byte_level().vocab_size)}
    return [byte_ids[bytes([byte])] for byte in text.encode()]


def test_a_stop_inside_an_accepted_block_cuts_everything() -> None:
    ids = one_by_one("xyzENDtail")
    state, chunks = run(SamplingParams(stop="END", logprobs=0), [ids[:1], ids[1:8], ids[8:]], None)
    assert [chunk.text for chunk in chunks] == ["x", "yz", ""]
    assert chunks[1].token_ids == tuple(ids[1:6])
    assert chunks[1].abort
    assert (chunks[1].finish_reason, chunks[1].stop_reason) == ("stop", "END")
    stats = state.spec_stats()
    assert stats is not None
    assert (stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (5, 5)
    assert state.completion_output().cumulative_logprob == pytest.approx(sum(-i / 1000 for i in ids[:6]))


def test_held_back_text_is_flushed_at_the_end() -> None:
    ids = one_by_one("xEN")
    _, chunks = run(SamplingParams(stop=["END"]), [[i] for i in ids], "length")
    assert [chunk.text for chunk in chunks] == ["x", "", "EN"]
    _, chunks = run(SamplingParams(stop=["END"]), [[i] for i in [*ids, *one_by_one("Ez")]], "length")
    assert [chunk.text for chunk in chunks] == ["x", "", "", "EN", "Ez"]


@pytest.mark.parametrize("include", [False, True])
def test_the_text_of_a_stop_id_is_left_out_and_its_id_kept(include: bool) -> None:
    ids = one_by_one("xyz")
    params = SamplingParams(include_stop_str_in_output=include, stop_token_ids=(ids[-1],))
    state = RequestState("r", [], params, byte_level())
    chunk = state.update(
        TokenDelta(request_id="r", token_ids=tuple(ids), finish_reason="stop", stop_reason=ids[-1], num_cached_tokens=2)
    )
    assert chunk.text == ("xyz" if include else "xy")
    assert chunk.token_ids == tuple(ids)
    assert chunk.stop_reason == ids[-1]
    assert not chunk.abort
    assert state.usage().cached_tokens == 2
    assert state.spec_stats() is None


def test_a_stop_string_ahead_of_a_stop_id_wins() -> None:
    ids = one_by_one("aENDz")
    _, chunks = run(SamplingParams(stop="END"), [ids[:1], ids[1:]], "stop")
    assert chunks[-1].stop_reason == "END"
    assert chunks[-1].token_ids == tuple(ids[1:4])
    assert not chunks[-1].abort


def test_without_detokenisation_there_is_no_text() -> None:
    state = RequestState("r", [1, 2], SamplingParams(detokenize=False), None)
    chunk = state.update(TokenDelta(request_id="r", token_ids=(5, 6), finish_reason="length"))
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == ("", (5, 6), "length")


def test_errors_and_aborts_pass_through() -> None:
    ids = one_by_one("xE")
    for reason, error in (("error", "the engine failed"), ("abort", None)):
        state = RequestState("r", [], SamplingParams(stop="END"), byte_level())
        assert state.update(TokenDelta(request_id="r", token_ids=tuple(ids))).text == "x"
        chunk = state.update(TokenDelta(request_id="r", finish_reason=reason, error=error))
        assert (chunk.text, chunk.finish_reason, chunk.error, chunk.abort) == ("E", reason, error, False)


def test_steps_without_drafts_do_not_count() -> None:
    state = RequestState("r", [], SamplingParams(), byte_level(), num_spec_tokens=3)
    for drafted, accepted in ((0, 0), (3, 0), (2, 2)):
        ids = tuple(one_by_one("x") * (accepted + 1))
        state.update(
            TokenDelta(request_id="r", token_ids=ids, num_drafted=drafted, num_accepted=accepted, is_decode_step=True)
        )
    stats = state.spec_stats()
    assert stats is not None
    assert stats.acceptance_histogram == (1, 0, 1, 0)
    assert (stats.mean_acceptance_length, stats.draft_acceptance_rate) == (2.0, 0.4)


def test_a_stop_string_that_never_completes_holds_back_only_what_may_become_it() -> None:
    tokenizer = byte_level()
    params = SamplingParams(stop=["hello" + "z" * 100_000], max_tokens=None)
    state = RequestState("r", [1], params, tokenizer)
    ids = tokenizer.encode("hello hel" * 300 + "p")
    text = ""
    for position, token_id in enumerate(ids):
        finish = "length" if position == len(ids) - 1 else None
        text += state.update(TokenDelta(request_id="r", token_ids=(token_id,), finish_reason=finish)).text
        assert "hello".startswith(state.text[len(text) :])
    assert text == tokenizer.decode(ids)
