"""`EngineConfig`: every resolved fact an engine rank needs, frozen and picklable. Built by `engine.config.resolve`."""

from dataclasses import dataclass
from typing import Literal

from engine.config.attention_backend import AttentionBackend
from engine.config.model import DrafterConfig, TargetConfig
from engine.simulated.profile import Simulation


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """All ranks of one engine share one EngineConfig; nothing writes to it.

    max_draft_len:   K's upper limit, 0 without a drafter.
    draft_len_choices: the declared program widths, ascending, containing 0 and max_draft_len.
    draft_len_schedule: ((batch size upper bound inclusive, K), ...) ascending; above the last key K = 0.
    draft_block_width: W, the rows of the drafter's block when it is not the trained one, from max_draft_len + 1. The
        block is not causal, so the drafts of another width are another drafter's: see `block_width`.
    num_blocks:      KV blocks including the null block 0; 0: a GPU engine measures its memory (see `engine.rank`).
    drafter_weights: int8: the drafter's matrices, and the head where it drafts, are rounded to 8 bits: on the CPU
        where the kernel for them runs; on CUDA beside the others, for few rows (`engine.kernels.int8_choice`).
    decode_programs: how decode rows run: "graphs" (fixed shapes, captured, CUDA only), "repeated" (the same shapes and
        buffers, called each time), "eager" (shapes that follow the batch, decode rows and prompts in one forward).
    synthetic_acceptance_length: mean tokens a drafting row emits per step, drafts accepted by decree
        (`engine.sampling.synthetic`); for measurements, the output means nothing. None: verification decides.
    load_format, drafter_load_format: auto, safetensors, or dummy (random weights, for measurements).
    draft_sampling:  how drafts of sampled requests are chosen, see `engine.runner.draft_tokens`.
    use_rejection_sampling: False verifies by exact match. True: `engine.sampling.rejection`.
    pipeline_depth:  steps launched before a result is read: 0 (synchronous) or 1.
    inter_token_target_ms: prompts share a step with decode rows as far as it takes no longer than this (see
        `engine.prefill_pace`); None: one as far as the token budget allows, several that arrive together in turns.
    enable_penalty:  requests may use penalties, whose counts take `capacity.penalty_workspace_bytes`.
    enable_top_k, enable_top_p: the sampler has these filters.
    """

    model_dir: str
    target: TargetConfig
    drafter_dir: str | None
    drafter: DrafterConfig | None
    identity: str  # target and drafter identity and dtype, part of every prefix-cache key
    load_format: str = "auto"
    drafter_load_format: str = "auto"
    dtype: Literal["float32", "bfloat16"]
    device: Literal["cpu", "cuda", "simulated"]
    num_threads: int
    tensor_parallel_size: int
    drafter_tensor_parallel: bool
    hidden_state_gather: Literal["taps", "fused"]
    drafter_weights: Literal["model", "int8"] = "model"
    drafter_attention: AttentionBackend = "VANILLA"
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    enable_prefix_caching: bool
    pipeline_depth: Literal[0, 1]
    max_draft_len: int
    draft_len_choices: tuple[int, ...]
    draft_len_schedule: tuple[tuple[int, int], ...]
    draft_block_width: int | None = None
    gate_window: int  # 0: no gate
    gate_threshold: float
    decode_programs: Literal["graphs", "repeated", "eager"] = "eager"
    synthetic_acceptance_length: float | None = None
    enable_penalty: bool = False
    enable_top_k: bool = True
    enable_top_p: bool = True
    shadow_time_share: float = 0.0  # of device time, for scoring drafts beyond K (`engine.speculative.shadow`)
    inter_token_target_ms: float | None = None
    simulation: Simulation | None = None  # of device "simulated", and only there
    draft_sampling: Literal["greedy", "coupled", "probabilistic"] = "greedy"
    use_rejection_sampling: bool = False
    debug_checks: bool = False
    context_bucket: int = 64  # attention lengths are padded to its multiples, so that shapes repeat

    @property
    def block_width(self) -> int:
        """W: rows of the drafter's block, its anchor included; 0 without a drafter. One for the life of an engine, so
        that all its counts are of one drafter."""
        if self.drafter is None:
            return 0
        return self.drafter.block_size if self.draft_block_width is None else self.draft_block_width

    @property
    def lookahead(self) -> int:
        """Slots past committed_len that the drafter's block may write: one for each of its rows."""
        return self.block_width

    @property
    def max_upload_len(self) -> int:
        """Numbers that the logits rules of one step's new slots may hold: at least those of one request, which are its
        tokens, 1,024 biases with their ids, 1,024 allowed ids and 1,024 ids of bad words."""
        return self.max_model_len + 4 * 1024

    @property
    def max_blocks_per_seq(self) -> int:
        """Block-table width: max_model_len plus the drafter's lookahead, rounded up to a block."""
        return -(-(self.max_model_len + self.lookahead) // self.block_size)

    @property
    def padded_vocab_size(self) -> int:
        """Columns of the target's logits once the ranks' equal shards are joined."""
        ranks = self.tensor_parallel_size
        return -(-self.target.vocab_size // ranks) * ranks

    @property
    def draft_logits_bytes(self) -> int:
        """What the logits that probabilistic drafts were drawn from take on each rank."""
        if self.draft_sampling != "probabilistic":
            return 0
        return 4 * (self.max_num_seqs + 1) * self.max_draft_len * self.padded_vocab_size
