"""Text decoded id by id equals the decoding of the whole, for any split of characters over tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.detokenizer import Detokenizer
from engine.tokenizer import Tokenizer
from tests.engine.toy_tokenizers import SPECIAL, byte_fallback, byte_level

TEXT = st.text(
    st.one_of(
        st.sampled_from("the quick stop \n"),
        st.sampled_from("\u00e9\u00fc\u4f60\u597d\u3053\U0001f600\U0001f468\u200d\U0001f469\u0301\u0e33"),
        st.characters(exclude_categories=["Cs", "Cn"], exclude_characters="\ufffd\x00"),
    ),
    max_size=25,
)


def bytewise(tokenizer: Tokenizer, text: str, choose: st.DataObject) -> list[int]:
    """The text's ids, with single-byte tokens for randomly chosen characters: groupings no encoder would make."""
    ids: list[int] = []
    byte_ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}
    byte_ids |= {
        bytes([byte]): tokenizer.backend.token_to_id(f"<0x{byte:02X}>")
        for byte in range(256)
        if tokenizer.backend.token_to_id(f"<0x{byte:02X}>") is not None
    }
    rest = ""
    for char in text:
        if choose.draw(st.booleans()):
            ids += tokenizer.encode(rest, add_special_tokens=False) if rest else []
            ids += [byte_ids[bytes([byte])] for byte in char.encode()]
            rest = ""
        else:
            rest += char
    return ids + (tokenizer.encode(rest, add_special_tokens=False) if rest else [])


def stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [detokenizer.feed(token_id) for token_id in ids] + [detokenizer.flush()]


@settings(max_examples=150, deadline=None)
@given(text=TEXT, data=st.data())
def test_byte_level_pieces_equal_the_whole(text: str, data: st.DataObject) -> None:
    tokenizer = byte_level()
    ids = bytewise(tokenizer, text, data)
    prompt = tokenizer.encode(data.draw(st.sampled_from(["", "the", "hello \u4f60", "x " * 20])))
    pieces = stream(tokenizer, prompt, ids)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=150, deadline=None)
@given(text=TEXT, data=st.data())
def test_byte_fallback_pieces_equal_the_whole(text: str, data: st.DataObject) -> None:
    tokenizer = byte_fallback()
    ids = bytewise(tokenizer, text, data)
    prompt = tokenizer.encode(data.draw(st.sampled_from(["the", "hello", "dog " * 8 + "x"])))
    pieces = stream(tokenizer, prompt, ids)
    assert "".join(pieces) == tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_bytes_equal_the_whole(data: st.DataObject) -> None:
    """Arbitrary ids, broken characters included, decode to what the tokenizer makes of them together."""
    tokenizer = byte_level()
    ids = data.draw(st.lists(st.integers(len(SPECIAL), tokenizer.vocab_size - 1), max_size=30))
    assert "".join(stream(tokenizer, [], ids)) == tokenizer.decode(ids)
    raw = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
    assert raw.decode("utf-8", errors="replace") == tokenizer.decode(ids)


def test_a_character_waits_for_its_last_byte() -> None:
    tokenizer = byte_level()
    byte_ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [byte_ids[bytes([byte])] for byte in "\U0001f680".encode()]
    assert stream(tokenizer, [], ids) == ["", "", "", "\U0001f680", ""]
    assert stream(tokenizer, [], ids[:3]) == ["", "", "", "\ufffd"]


def test_a_character_begun_by_the_prompt_is_completed() -> None:
    tokenizer = byte_level()
    byte_ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [byte_ids[bytes([byte])] for byte in "\U0001f680".encode()]
    prompt = tokenizer.encode("the dog")
    assert "".join(stream(tokenizer, prompt + ids[:2], [*ids[2:], byte_ids[b"x"]])) == "\U0001f680x"
    assert Detokenizer(tokenizer, prompt + ids[:2], skip_special_tokens=True).flush() == ""


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_special_tokens(make) -> None:
    tokenizer = make()
    end = tokenizer.backend.token_to_id("<|im_end|>")
    the = tokenizer.encode("the")
    prompt = [*the, tokenizer.backend.token_to_id("<|im_start|>")]
    assert "".join(stream(tokenizer, prompt, [end], skip=True)) == ""
    assert "<|im_end|>" in "".join(stream(tokenizer, prompt, [end], skip=False))


def test_leading_space_is_kept_after_a_prompt() -> None:
    tokenizer = byte_fallback()
    space_dog = tokenizer.encode("the dog")[4:]
    assert "".join(stream(tokenizer, tokenizer.encode("the"), space_dog)) == " dog"


def test_an_invalid_prefix_restarts_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("the dog stops")
    detokenizer = Detokenizer(tokenizer, [], skip_special_tokens=True)
    text = detokenizer.feed(ids[0])

    class Broken:
        def step(self, *_: object) -> str:
            raise Exception("Invalid prefix encountered while decoding stream.")

    monkeypatch.setattr(detokenizer, "_stream", Broken())
    text += "".join(detokenizer.feed(token_id) for token_id in ids[1:]) + detokenizer.flush()
    assert text == "the dog stops"


def test_other_errors_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    detokenizer = Detokenizer(byte_level(), [], skip_special_tokens=True)

    class Broken:
        def step(self, *_: object) -> str:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(detokenizer, "_stream", Broken())
    with pytest.raises(RuntimeError, match="out of memory"):
        detokenizer.feed(5)
