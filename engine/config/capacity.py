"""How many KV blocks an engine gets, and whether they and the weights fit the memory."""

import logging
from dataclasses import replace

from engine.config.engine import EngineConfig
from engine.config.machine import Machine
from engine.config.model import DrafterConfig, TargetConfig
from engine.kv_cache.block_bytes import bytes_per_block

logger = logging.getLogger(__name__)

GIB = 1 << 30
# Without a stated size a CPU engine takes what its requests can use, up to this.
DEFAULT_CPU_CACHE_BYTES = GIB
# Without a stated size a GPU engine measures what is free, and leaves the rest of this share to others.
DEFAULT_GPU_SHARE = 0.9
PENALTY_BYTES = 5  # per slot and vocabulary id: an int32 count of the output and whether the prompt has it


def with_blocks(
    config: EngineConfig,
    *,
    num_blocks: int | None,
    kv_cache_memory_bytes: int | None,
    num_parameters: int,
    machine: Machine,
) -> EngineConfig:
    """The config with its num_blocks set, the null block included.

    num_blocks, kv_cache_memory_bytes: the user's size, per rank; at most one of them.
    num_parameters: of both models.

    A GPU engine without a given size is left at 0 blocks: it measures its memory when it starts.

    Raises:
        ValueError: a cache that cannot hold one request of max_model_len, or that does not fit the memory beside the
            weights; the message shows the arithmetic.
    """
    block_bytes = bytes_per_block(config)
    if num_blocks is not None and kv_cache_memory_bytes is not None:
        raise ValueError("num_blocks and kv_cache_memory_bytes: give one of them, not both")
    if num_blocks is not None:
        name, blocks = "num_blocks", num_blocks
    elif kv_cache_memory_bytes is not None:
        name, blocks = "kv_cache_memory_bytes", kv_cache_memory_bytes // block_bytes
    elif config.device != "cuda":
        name, blocks = "num_blocks", _default_blocks(config, block_bytes)
    else:
        # Whether one request fits beside the weights is clear already.
        _check_memory(config, "num_blocks", config.max_blocks_per_seq + 1, block_bytes, num_parameters, machine)
        return config
    _check_one_request(config, name, blocks, block_bytes)
    if config.device != "simulated":  # there the size is a number and nothing is allocated
        _check_memory(config, name, blocks, block_bytes, num_parameters, machine)
    logger.info("KV cache: %d blocks of %d tokens, %s per rank", blocks, config.block_size, _size(blocks * block_bytes))
    return replace(config, num_blocks=blocks)


def num_matrix_elements(config: TargetConfig | DrafterConfig) -> int:
    """Elements of a model's matrices by its config alone, for weights that are not read from a checkpoint."""
    H, D = config.hidden_size, config.head_dim
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * D * H
    layers = config.num_layers * (attention + 3 * H * config.intermediate_size)
    if isinstance(config, DrafterConfig):
        own = config.draft_vocab_size + (config.vocab_size if config.own_embedding else 0)
        return layers + (len(config.target_layer_ids) * (config.target_hidden_size or H) + own) * H
    return layers + config.vocab_size * H * (1 if config.tie_word_embeddings else 2)


def weight_bytes(config: EngineConfig, num_parameters: int) -> int:
    """Bytes of both models in the engine's dtype, over all ranks. What is not sharded counts once a rank."""
    repeated = (config.tensor_parallel_size - 1) * _num_unsharded_elements(config)
    return (num_parameters + repeated) * (4 if config.dtype == "float32" else 2)


def _num_unsharded_elements(config: EngineConfig) -> int:
    """Elements of the matrices that every rank holds whole."""
    target, drafter = config.target, config.drafter
    total = target.vocab_size * target.hidden_size  # the embedding, of which a tied head is a view
    if drafter is None:
        return total
    H = drafter.hidden_size
    features = len(drafter.target_layer_ids) * (drafter.target_hidden_size or H) * H
    embedding = drafter.vocab_size * H if drafter.own_embedding else 0
    if not config.drafter_tensor_parallel:
        total += num_matrix_elements(drafter) - features - embedding - drafter.draft_vocab_size * H
    return total + embedding + (features if config.hidden_state_gather == "taps" else 0)


def packed_copies_bytes(config: EngineConfig, machine: Machine) -> int:
    """Bytes over all ranks of what a CPU holds of the weights beside `weight_bytes`: the head in the kernels' order
    where the embedding is it, its 8-bit form for drafts, and where both orders are kept every other matrix again.

    A drafter of 8 bits alone takes less than `weight_bytes` counts for it; this difference is left out.
    """
    if config.device != "cpu" or not machine.packs_weights:
        return 0
    target, drafter = config.target, config.drafter
    size = 4 if config.dtype == "float32" else 2
    vocabulary = target.vocab_size * target.hidden_size
    total = vocabulary * size if target.tie_word_embeddings else 0
    if config.drafter_weights == "int8" and drafter is not None and not drafter.draft_vocab_size:
        total += vocabulary
    if machine.keeps_both_orders and config.dtype == "bfloat16":
        total += (num_matrix_elements(target) - vocabulary * (1 if target.tie_word_embeddings else 2)) * size
        if drafter is not None:
            total += num_matrix_elements(drafter) * (1 if config.drafter_weights == "int8" else size)
    return total


def int8_copies_bytes(config: EngineConfig) -> int:
    """Bytes over all ranks of a GPU engine's second weights for drafts, in 8 bits: of the drafter's matrices, of the
    copies of K's and V's rows that make the context, and of the head. What is not sharded counts once a rank. Small
    matrices have none; their bytes are counted all the same."""
    target, drafter, ranks = config.target, config.drafter, config.tensor_parallel_size
    if config.device != "cuda" or config.drafter_weights != "int8" or drafter is None:
        return 0
    H = drafter.hidden_size
    features = len(drafter.target_layer_ids) * (drafter.target_hidden_size or H) * H
    own_head = drafter.draft_vocab_size * H
    embedding = drafter.vocab_size * H if drafter.own_embedding else 0
    layers = num_matrix_elements(drafter) - features - own_head - embedding
    context = 2 * drafter.num_layers * drafter.num_kv_heads * drafter.head_dim * H
    return (
        (layers + context) * (1 if config.drafter_tensor_parallel else ranks)
        + features * (1 if config.hidden_state_gather == "fused" else ranks)
        + (own_head or target.vocab_size * target.hidden_size)
    )


def penalty_workspace_bytes(config: EngineConfig) -> int:
    """Bytes over all ranks of what penalties keep for every slot: for each vocabulary id an int32 count and a flag, and
    on every rank the ids said so far (int32)."""
    if not config.enable_penalty:
        return 0
    ranks = config.tensor_parallel_size
    padded_vocab = -(-config.target.vocab_size // ranks) * ranks
    return (config.max_num_seqs + 1) * (padded_vocab * PENALTY_BYTES + ranks * (config.max_model_len + 1) * 4)


def check_measured_blocks(
    config: EngineConfig, blocks: int, total_bytes: int, taken_bytes: int, reserved_bytes: int
) -> None:
    """Raises ValueError unless one request fits into the blocks that a GPU's memory leaves.

    total_bytes: the GPU's. taken_bytes: by weights, libraries and other processes. reserved_bytes: for activations,
    recorded programs, and the share that stays free.
    """
    needed = config.max_blocks_per_seq + 1
    block_bytes = bytes_per_block(config)
    left = total_bytes - taken_bytes - reserved_bytes
    logger.info(
        "KV cache: %s of GPU memory - %s taken - %s for activations, programs and reserve = %s: %d blocks of %d tokens",
        _size(total_bytes),
        _size(taken_bytes),
        _size(reserved_bytes),
        _size(left),
        blocks,
        config.block_size,
    )
    if blocks < needed:
        raise ValueError(
            f"max_model_len: one request of {config.max_model_len} tokens needs {needed} blocks x {block_bytes} bytes "
            f"= {_size(needed * block_bytes)} of KV cache, but {_size(total_bytes)} of GPU memory - "
            f"{_size(taken_bytes)} taken (weights, libraries, other processes) - {_size(reserved_bytes)} for "
            f"activations, recorded programs and a reserve leave {_size(left)}. Lower max_model_len, max_num_seqs or "
            "max_num_batched_tokens"
        )


def check_given_blocks(config: EngineConfig, *, total_bytes: int, free_bytes: int) -> None:
    """Raises ValueError if a GPU has less free memory, weights loaded, than the cache that the user asked for."""
    left = free_bytes - config.num_blocks * bytes_per_block(config)
    if left < 0:
        raise ValueError(not_enough_beside_the_cache(config, total_bytes, free_bytes, left))


def not_enough_beside_the_cache(config: EngineConfig, total_bytes: int, free_bytes: int, left_bytes: int) -> str:
    """Why a cache of a given size is refused. free_bytes: before it. left_bytes: behind it; too few for the rest."""
    block_bytes = bytes_per_block(config)
    return (
        f"KV cache size: {_size(total_bytes)} of GPU memory - {_size(total_bytes - free_bytes)} taken (weights, "
        f"libraries, other processes) - {config.num_blocks} blocks x {block_bytes} bytes = "
        f"{_size(config.num_blocks * block_bytes)} of KV cache leave {_size(left_bytes)}, too little for activations "
        "and recorded programs. Ask for a smaller KV cache or for none (it is then measured), or lower max_num_seqs or "
        "max_num_batched_tokens"
    )


def _default_blocks(config: EngineConfig, block_bytes: int) -> int:
    usable = config.max_num_seqs * config.max_blocks_per_seq + 1
    if config.device == "simulated":
        return usable
    affordable = DEFAULT_CPU_CACHE_BYTES // block_bytes
    # One request of full length is the least that works, even above the default size.
    return min(usable, max(affordable, config.max_blocks_per_seq + 1))


def _check_one_request(config: EngineConfig, name: str, blocks: int, block_bytes: int) -> None:
    needed = config.max_blocks_per_seq + 1
    if blocks >= needed:
        return
    lookahead = f" + {config.lookahead} drafting slots" if config.lookahead else ""
    raise ValueError(
        f"{name}: {blocks} blocks are fewer than one request can need: ({config.max_model_len} tokens of "
        f"max_model_len{lookahead}) / {config.block_size} tokens per block + 1 unused block = {needed} blocks = "
        f"{needed} x {block_bytes} bytes = {_size(needed * block_bytes)}. Raise {name} or lower max_model_len"
    )


def _check_memory(
    config: EngineConfig, name: str, blocks: int, block_bytes: int, num_parameters: int, machine: Machine
) -> None:
    weights, copies = weight_bytes(config, num_parameters), packed_copies_bytes(config, machine)
    penalties = penalty_workspace_bytes(config)
    cache = blocks * block_bytes
    ranks = config.tensor_parallel_size
    if config.device == "cpu":
        # All ranks share the machine's memory.
        total, where = machine.memory_bytes, "this machine"
        needed = weights + copies + penalties + (cache + config.draft_logits_bytes) * ranks
        cache_term = _size(cache) if ranks == 1 else f"{_size(cache)} x {ranks} ranks"
        weights_term = _size(weights) + (f" + copies for the CPU kernels {_size(copies)}" if copies else "")
    else:
        assert machine.accelerator is not None
        total, where = machine.accelerator.memory_bytes, machine.accelerator.name
        drafting = int8_copies_bytes(config)
        needed = (weights + drafting + penalties) // ranks + cache + config.draft_logits_bytes
        cache_term = _size(cache)
        weights_term = _size(weights) + (f" + 8-bit copies for drafts {_size(drafting)}" if drafting else "")
        weights_term += "" if ranks == 1 else f" / {ranks} ranks"
    if needed > total:
        penalties_term = f" + penalty counts {_size(penalties)}" if penalties else ""
        drafts = config.draft_logits_bytes
        drafts_term = f" + draft probabilities {_size(drafts)} per rank" if drafts else ""
        model_weights = ", or set drafter_weights to 'model'" if int8_copies_bytes(config) else ""
        raise ValueError(
            f"{name}: weights {weights_term}{penalties_term}{drafts_term} + KV cache {cache_term} ({blocks} blocks x "
            f"{block_bytes} bytes) = {_size(needed)}, but {where} has {_size(total)}. Lower {name}, max_model_len or "
            f"max_num_seqs{model_weights}"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if abs(num_bytes) >= GIB // 8 else f"{num_bytes / (1 << 20):.2f} MiB"
