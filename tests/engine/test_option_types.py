"""Options of a wrong type are refused by name: nothing else is taken for a number, or for True or False."""

import inspect
import math
import re
import typing
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from cluster.config import ConfigError, parse_config
from engine.config.decoding import DFlashDecodingConfig
from engine.config.resolve import resolve_engine_config
from engine.llm import LLM
from engine.simulated.profile import SimulationOptions, load_simulation
from tests.engine.resolving import CPU, DRAFTER, TARGET, resolve, spec, write_checkpoint

WHOLE = (
    "max_model_len",
    "tensor_parallel_size",
    "threads",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "num_blocks",
    "kv_cache_memory_bytes",
    "pipeline_depth",
    "draft_block_width",
)
REAL = ("inter_token_target_ms", "synthetic_acceptance_length", "shadow_time_share")
FLAGS = ("drafter_tensor_parallel", "enable_prefix_caching", "debug_checks")
NOT_WHOLE = ["4", 4.0, True, [4], math.nan]
NOT_REAL = ["5", True, [5.0], 5j, math.nan, math.inf, -math.inf]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return write_checkpoint(root / "target", TARGET), write_checkpoint(root / "drafter", DRAFTER)


def test_every_option_of_these_types_is_tried() -> None:
    found: dict[str, set[str]] = {"int": set(), "float": set(), "bool": set()}
    for name, option in inspect.signature(resolve_engine_config).parameters.items():
        for part in typing.get_args(option.annotation) or (option.annotation,):
            if part in (int, float, bool):
                found[part.__name__].add(name)
    assert found == {"int": set(WHOLE), "float": set(REAL), "bool": set(FLAGS)}


@pytest.mark.parametrize("value", NOT_WHOLE, ids=repr)
@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers(checkpoints: tuple[Path, Path], name: str, value: Any) -> None:
    message = "must be 0 or 1" if name == "pipeline_depth" else "must be a whole number"
    with pytest.raises(ValueError, match=rf"^{name}: {message}, got {re.escape(repr(value))}$"):
        resolve(checkpoints[0], spec(checkpoints[1]), **{name: value})


@pytest.mark.parametrize("value", ["07", [0, "7"], [0, 7.0], [False, 7], [0, math.nan], [0, [7]], 7, True, np.array(7)])
def test_lists_of_whole_numbers(checkpoints: tuple[Path, Path], value: Any) -> None:
    with pytest.raises(ValueError, match=r"^draft_len_choices: must be (a list of )?whole numbers, got "):
        resolve(checkpoints[0], spec(checkpoints[1]), draft_len_choices=value)


@pytest.mark.parametrize("value", NOT_REAL, ids=repr)
@pytest.mark.parametrize("name", REAL)
def test_real_numbers(checkpoints: tuple[Path, Path], name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: must .*, got {re.escape(repr(value))}$"):
        resolve(checkpoints[0], spec(checkpoints[1]), **{name: value})


@pytest.mark.parametrize("name", ["tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "block_size"])
def test_what_cannot_be_left_open(checkpoints: tuple[Path, Path], name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: must be a whole number, got None$"):
        resolve(checkpoints[0], spec(checkpoints[1]), **{name: None})


@pytest.mark.parametrize("name", [*WHOLE, *REAL])
def test_numbers_beyond_every_type(checkpoints: tuple[Path, Path], name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: must "):
        resolve(checkpoints[0], spec(checkpoints[1]), **{name: 10**400})


@pytest.mark.parametrize("value", ["false", "", 0, 1, [], None], ids=repr)
@pytest.mark.parametrize("name", FLAGS)
def test_flags(checkpoints: tuple[Path, Path], name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: must be True or False, got {re.escape(repr(value))}$"):
        resolve(checkpoints[0], spec(checkpoints[1]), **{name: value})


@pytest.mark.parametrize("value", NOT_REAL, ids=repr)
def test_speed_of_a_simulation(value: Any) -> None:
    files = Path(__file__).parents[2] / "configs" / "sim"
    options = SimulationOptions(
        steps=str(files / "steps" / "cpu2-smollm2-135m.yaml"),
        acceptance=str(files / "acceptance" / "easy-and-hard.yaml"),
        speed=value,
    )
    with pytest.raises(ValueError, match=r"^simulation\.speed: must be a finite number above 0, got "):
        load_simulation(options, max_num_seqs=1, draft_len_choices=(0,))


def test_numbers_of_other_types_become_python_s(checkpoints: tuple[Path, Path]) -> None:
    given = {
        name: np.int32(1 if name in ("tensor_parallel_size", "threads", "pipeline_depth") else 64) for name in WHOLE
    }
    given |= {"draft_block_width": np.int32(12), "draft_len_choices": np.array([0, 7])}
    given |= {name: Fraction(1, 2) for name in REAL} | {"synthetic_acceptance_length": np.float32(2.5)}
    for size in ("num_blocks", "kv_cache_memory_bytes"):  # one or the other; 2 GiB are one more than 32 bits hold
        sizes = {"num_blocks": np.int32(64)} if size == "num_blocks" else {size: np.int64(2 << 30)}
        options = {name: value for name, value in given.items() if name not in ("num_blocks", "kv_cache_memory_bytes")}
        config = resolve(checkpoints[0], spec(checkpoints[1]), **options, **sizes)
        for name in {*WHOLE, *REAL, "num_threads"} - {"threads", "kv_cache_memory_bytes"}:
            assert type(getattr(config, name)) is (float if name in REAL else int), name
        assert [type(choice) for choice in config.draft_len_choices] == [int, int]
        assert (config.max_num_seqs, config.draft_len_choices, config.draft_block_width) == (64, (0, 7), 12)
        assert (config.inter_token_target_ms, config.synthetic_acceptance_length) == (0.5, 2.5)


@pytest.mark.parametrize("given", [{"max_draft_len": 7}, "drafter"], ids=str)
def test_a_speculative_config_that_is_none(checkpoints: tuple[Path, Path], given: Any) -> None:
    with pytest.raises(ValueError, match=r"speculative_config: must be a DFlashDecodingConfig, got a (dict|str)"):
        resolve(checkpoints[0], given)


@pytest.mark.parametrize("value", ["5", True], ids=repr)
def test_the_offline_api_says_so_too(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^inter_token_target_ms: must be a positive number of milliseconds"):
        LLM("nowhere", inter_token_target_ms=value, machine=CPU)


@pytest.mark.parametrize(
    "given",
    [
        {"max_draft_len": True},
        {"max_total_draft_tokens": True},
        {"max_concurrency": True},
        {"acceptance_rate_window_size": False},
        {"acceptance_rate_threshold": True},
        {"mask_token_id": False},
        {"target_layer_ids": [0, True]},
        {"target_layer_ids": (True,)},
        {"max_draft_len": np.True_},
        {"draft_len_schedule": {True: 7}},
        {"draft_len_schedule": {4: True}},
    ],
    ids=str,
)
def test_booleans_in_a_speculative_config(given: dict[str, Any]) -> None:
    name = next(iter(given))
    with pytest.raises(ValidationError, match=f"{name}: must be a number, not true or false, got"):
        DFlashDecodingConfig(**given)
    with pytest.raises(ConfigError, match=rf"speculative_config\.{name}: must be a number, not true or false, got"):
        parse_config({"model": {"source": "owner/model"}, "speculative_config": given}, base_dir=Path("/"))


@pytest.mark.parametrize("value", ["5", True, math.nan, math.inf, 0.0, -1.0], ids=repr)
@pytest.mark.parametrize("name", ["inter_token_target_ms", "synthetic_acceptance_length"])
def test_a_config_file_says_so_too(name: str, value: Any) -> None:
    given = {"model": {"source": "owner/model"}, "engine": {name: value}}
    with pytest.raises(ConfigError, match=rf"engine\.{name}: input should be "):
        parse_config(given, base_dir=Path("/"))
