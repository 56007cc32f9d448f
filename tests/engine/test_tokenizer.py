"""Loading, token bytes and chat templates."""

import threading
import time
from pathlib import Path

import pytest

from engine.tokenizer import Tokenizer
from tests.engine.toy_tokenizers import CHAT_TEMPLATE, byte_fallback, byte_level, wrap

MESSAGES = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
    {"role": "assistant", "content": None},
]
RENDERED = (
    "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
)


def test_saved_tokenizer_loads_and_behaves_alike(tmp_path: Path) -> None:
    byte_level().hf_tokenizer.save_pretrained(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    text = "the \u4f60\u597d \U0001f600 stop"
    assert loaded.encode(text) == byte_level().encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.eos_token_id == 0
    assert loaded.render_chat(MESSAGES) == RENDERED + "<|im_start|>assistant\n"


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^model: cannot load a tokenizer from {tmp_path}"):
        Tokenizer.load(tmp_path)


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^tokenizer object is not backed by the tokenizers library"):
        Tokenizer(object())


def test_chat_is_rendered_once_and_encoded_without_extra_tokens() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode_chat(MESSAGES, add_generation_prompt=False)
    assert tokenizer.decode(ids) == RENDERED
    assert ids[0] == tokenizer.backend.token_to_id("<|im_start|>")


def test_template_given_as_text_or_file(tmp_path: Path) -> None:
    template = "{{ greeting }}:{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
    path = tmp_path / "template.jinja"
    path.write_text(template)
    for given in (template, str(path)):
        tokenizer = Tokenizer(wrap(byte_level().backend), chat_template=given)
        text = tokenizer.render_chat([{"role": "user", "content": "a"}], template_kwargs={"greeting": "hi"})
        assert text == "hi:user=a;"
    with pytest.raises(ValueError, match=r"^chat_template: 'nowhere.jinja' is neither"):
        Tokenizer(wrap(byte_level().backend), chat_template="nowhere.jinja")
    (tmp_path / "latin.jinja").write_bytes("{{ 'caf\xe9' }}".encode("latin-1"))
    with pytest.raises(ValueError, match=r"^chat_template: cannot read .*latin.jinja: 'utf-8' codec"):
        Tokenizer(wrap(byte_level().backend), chat_template=str(tmp_path / "latin.jinja"))
    broken = "line one\n{% for m in messages %}\n{{ m.role"
    path.write_text(broken)
    for given in (broken, str(path)):
        with pytest.raises(ValueError, match=r"^chat_template: line 3: unexpected end of template"):
            Tokenizer(wrap(byte_level().backend), chat_template=given)


def test_template_with_tags_of_transformers(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    tokenizer = Tokenizer(wrap(byte_level().backend), chat_template=template)
    messages = [{"role": "system", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "b"


def test_continue_final_message() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the dog"}]
    text = byte_level().render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nthe dog")
    with pytest.raises(ValueError, match=r"^continue_final_message and add_generation_prompt"):
        byte_level().render_chat(messages, continue_final_message=True)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"content": "a"}], r"^messages\[0\].role must be a string"),
        ([{"role": "user", "content": 5}], r"^messages\[0\].content must be a string or a list"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"^messages\[0\].content\[0\] must be a text part, got 'image_url'",
        ),
    ],
)
def test_bad_messages(messages: list[dict[str, object]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        byte_level().render_chat(messages)


def test_template_errors_and_missing_template() -> None:
    refusing = Tokenizer(wrap(byte_level().backend), chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match=r"^messages: the chat template refused them: roles must alternate"):
        refusing.render_chat([{"role": "user", "content": "a"}])
    with pytest.raises(ValueError, match=r"^chat_template: the model's tokenizer has none"):
        Tokenizer(wrap(byte_level().backend, None)).render_chat([{"role": "user", "content": "a"}])
    assert Tokenizer(wrap(byte_level().backend, None), chat_template=CHAT_TEMPLATE).chat_template == CHAT_TEMPLATE


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_token_bytes_concatenate_to_the_text(make) -> None:
    tokenizer = make()
    text = "the caf\u00e9 \u4f60\u597d \U0001f600"
    raw = b"".join(tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text))
    assert raw.decode().removeprefix(" ") == text
    assert tokenizer.token_bytes(tokenizer.backend.token_to_id("<|im_end|>")) == b"<|im_end|>"
    assert tokenizer.token_bytes(10**6) == b""


def test_a_long_text_does_not_stop_other_threads() -> None:
    tokenizer = byte_level()
    text = "the quick brown fox " * 20_000
    begin_s = time.monotonic()
    expected = tokenizer.backend.encode(text).ids  # holds the interpreter lock throughout
    whole_s = time.monotonic() - begin_s
    may_encode = threading.Event()
    found: list[list[int]] = []

    def encode() -> None:
        may_encode.wait()
        found.append(tokenizer.encode(text))

    thread = threading.Thread(target=encode)
    thread.start()
    may_encode.set()
    num_turns = 0
    while thread.is_alive():
        time.sleep(whole_s / 50)
        num_turns += 1
    thread.join()
    assert found == [expected]
    assert num_turns >= 5
