"""User turns to train on: functions described by their docstrings, word problems, turns the target writes itself.

Docstrings are read from Python sources installed on this machine and used as prompts only. Word problems come from the
package `reasoning-gym` (Apache-2.0; the extra `train`). What the target writes follows from `seeds.py`.
"""

import ast
import importlib.util
import json
import lzma
import random
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from engine.tokenizer import Tokenizer
from engine.training.overlap import OverlapIndex
from engine.training.sampler import Sample, SampleRequest
from engine.training.seeds import beginning, ending

_TASKS = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{code}\n```",
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{code}\n```",
    "Complete this Python function:\n```python\n{code}\n```",
    "Implement the function below.\n\n```python\n{code}\n```",
    "Fill in the body of this function:\n\n{code}",
    "Write a Python function `{name}` for this description: {summary}",
    "Write a Python function that does the following. {summary}",
    "I need a function called {name}. {summary} How would you write it in Python?",
)
# Generators of reasoning-gym whose questions are short and plain text, with their weights.
_WORD_PROBLEMS = {
    "gsm_symbolic": 10,
    "chain_sum": 2,
    "basic_arithmetic": 2,
    "leg_counting": 1,
    "products": 1,
    "simple_equations": 1,
    "simple_integration": 1,
    "polynomial_equations": 1,
    "fraction_simplification": 1,
    "decimal_arithmetic": 1,
    "gcd": 1,
    "lcm": 1,
    "prime_factorization": 1,
    "power_function": 1,
    "number_sequence": 1,
    "number_filtering": 1,
    "number_sorting": 1,
    "time_intervals": 1,
    "calendar_arithmetic": 1,
    "bitwise_arithmetic": 1,
    "simple_geometry": 1,
    "family_relationships": 1,
    "syllogism": 1,
    "letter_counting": 1,
    "word_sorting": 1,
    "sentence_reordering": 1,
    "spell_backward": 1,
    "caesar_cipher": 1,
    "count_primes": 1,
    "dice": 1,
    "coin_flip": 1,
}
_PROBLEM_ENDINGS = (
    "\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "\nPlease reason step by step, and put your final answer within \\boxed{}.",
    "\nExplain your steps.",
    "",
)
_SPACES = re.compile(r"[ \t]+")
MIN_CHARS, MAX_CHARS = 12, 1500
_MARK = "MARK-OF-CONTENT"


def docstring_prompts(roots: Iterable[Path], *, seed: int) -> Iterator[str]:
    """A prompt for every documented function below `roots`; files that do not parse are left out."""
    rng = random.Random(seed)
    seen: set[tuple[str, str]] = set()
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            for name, code, summary in _functions(path):
                if (name, summary) not in seen:
                    seen.add((name, summary))
                    yield rng.choice(_TASKS).format(name=name, code=code, summary=summary)


def _functions(path: Path) -> Iterator[tuple[str, str, str]]:
    """(name, signature with docstring, first paragraph of the docstring)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, RecursionError):  # other Python versions' test data, other encodings
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        doc = ast.get_docstring(node)
        if not doc or not doc.isascii() or len(doc) < 24:
            continue
        summary = _SPACES.sub(" ", doc.split("\n\n")[0].replace("\n", " ")).strip()
        body = doc if len(doc) <= 500 else doc.split("\n\n")[0]
        arguments = ast.unparse(node.args)
        returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
        if len(arguments) > 160 or len(body) > 600 or '"""' in body:
            continue
        indented = body.replace("\n", "\n    ")
        yield node.name, f'def {node.name}({arguments}){returns}:\n    """ {indented}\n    """', summary


def word_problems_installed() -> bool:
    """Whether the package that makes word problems is there."""
    return importlib.util.find_spec("reasoning_gym") is not None


def word_problems(count: int, *, seed: int) -> Iterator[str]:
    """Questions of reasoning-gym's generators.

    Raises:
        ValueError: the package is not installed.
    """
    try:
        gym = importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ValueError("word problems need the package reasoning-gym: pip install reasoning-gym") from error
    rng = random.Random(seed)
    total = sum(_WORD_PROBLEMS.values())
    for name, weight in _WORD_PROBLEMS.items():
        if name not in gym.factory.DATASETS:
            continue
        for item in gym.create_dataset(name, size=max(1, count * weight // total), seed=seed):
            yield item["question"].strip() + rng.choice(_PROBLEM_ENDINGS)


class Cleaner:
    """Keeps a prompt once, unless its length is extreme or it overlaps an evaluation prompt."""

    def __init__(self, held_out: OverlapIndex) -> None:
        self.held_out = held_out
        self._seen: set[str] = set()

    def keeps(self, text: str) -> bool:
        key = " ".join(text.lower().split())
        if not MIN_CHARS <= len(text) <= MAX_CHARS or key in self._seen or self.held_out.overlaps(text):
            return False
        self._seen.add(key)
        return True

    def kept(self, texts: Iterable[str]) -> list[str]:
        return [text for text in texts if self.keeps(text)]


def save_prompts(prompts: Iterable[str], path: Path) -> None:
    with lzma.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(text) + "\n" for text in prompts)


def load_prompts(path: Path) -> list[str]:
    """One JSON string per line, xz-compressed.

    Raises:
        ValueError: another format.
    """
    try:
        with lzma.open(path, "rt", encoding="utf-8") as file:
            prompts = [json.loads(line) for line in file]
    except (lzma.LZMAError, EOFError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a prompt file (xz of one JSON string per line): {error}") from error
    if not all(isinstance(text, str) for text in prompts):
        raise ValueError(f"{path}: every line must be a JSON string.")
    return prompts


class TurnWriter:
    """Requests that let the target write user turns, and what becomes of them."""

    def __init__(self, tokenizer: Tokenizer, *, seed: int, max_new: int = 160, temperature: float = 1.0) -> None:
        """Raises ValueError for a chat template that does not show the user's words as they are."""
        text = tokenizer.render_chat([{"role": "user", "content": _MARK}])
        if text.count(_MARK) != 1:
            raise ValueError(
                "the chat template does not repeat the user's words once; turns cannot be written with it."
            )
        self.header = text.split(_MARK)[0]
        self.tokenizer, self.rng = tokenizer, random.Random(seed)
        self.max_new, self.temperature = max_new, temperature
        self._begun: list[tuple[str, str]] = []
        self._ids: dict[str, list[int]] = {}

    def requests(self, count: int) -> Iterator[SampleRequest]:
        for _ in range(count):
            kind, begin = beginning(self.rng)
            self._begun.append((kind, begin))
            if begin not in self._ids:
                self._ids[begin] = self.tokenizer.encode(self.header + begin, add_special_tokens=False)
            yield SampleRequest(
                prompt=self._ids[begin], max_new=self.max_new, temperature=self.temperature, tag=len(self._begun) - 1
            )

    def turn(self, sample: Sample) -> str | None:
        """The user turn, or None if it did not end by itself or holds control tokens or no plain text."""
        if not sample.ended:
            return None
        kind, begin = self._begun[sample.request.tag]
        written = self.tokenizer.decode(sample.tokens[len(sample.request.prompt) : -1])
        text = (begin + written).strip()
        if "<|" in text or "\ufffd" in text or not text.replace("\n", "").replace("\t", "").isprintable():
            return None
        if kind == "code" and text.count("```") == 1:
            text += "\n```"
        return text + ending(kind, self.rng)


def chat_prompts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The served form of single user turns: the model's chat template with its default system prompt.

    A template that shows the words as they are is rendered once; every other one for each text.
    """
    if not texts:
        return []
    parts = tokenizer.render_chat([{"role": "user", "content": _MARK}]).split(_MARK)
    rendered = [parts[0] + text + parts[-1] for text in texts]
    if len(parts) != 2 or rendered[0] != tokenizer.render_chat([{"role": "user", "content": texts[0]}]):
        rendered = [tokenizer.render_chat([{"role": "user", "content": text}]) for text in texts]
    return [encoding.ids for encoding in tokenizer.backend.encode_batch(rendered, add_special_tokens=False)]
