"""Time of the whole target and drafter forward of a decode step on a GPU, from CUDA graphs, and where it goes.

    python benchmarks/gpu_forward.py --model smollm2 --out gpu_forward.json

Random weights in the shapes of SmolLM2-135M with its drafter, or of Qwen3-8B with a DFlash drafter of five layers. The
graphs hold embedding, all layers, the context's K/V, the drafter's block and both heads with their argmax: a step but
for verification and bookkeeping. The environment variables of `engine.kernels.available` choose the kernels.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_timing import READ_BYTES_PER_S, graph_us, write
from torch.profiler import ProfilerActivity, profile

from engine.attention.context import AttentionContext, AttentionGroup
from engine.attention.cuda_paged import cuda_paged_attention
from engine.attention.kv_cache_tensors import KvCache
from engine.config.engine import EngineConfig
from engine.config.model import DrafterConfig, TargetConfig
from engine.config.rope import RopeConfig
from engine.models.dflash import DFlashDrafter
from engine.models.target import TargetModel
from engine.parallel.tp_group import TpGroup
from engine.sampling.sampler import argmax_pair
from engine.weights.loader import prepare_linears

SHAPES = {
    "smollm2": {
        "num_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
    },
    "qwen3-8b": {
        "num_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
}
BLOCK, TAPS, PAGE = 16, 5, 16


def engine_config(model: str, sequences: int, context: int, num_layers: int | None = None) -> EngineConfig:
    shape = {**SHAPES[model], "rms_norm_eps": 1e-6, "rope": RopeConfig(theta=1e6), "max_position_embeddings": 32768}
    layers = shape["num_layers"] = num_layers or int(shape["num_layers"])
    target = TargetConfig(
        architecture="Qwen3ForCausalLM" if model.startswith("qwen") else "LlamaForCausalLM",
        tie_word_embeddings=model == "smollm2",
        qkv_bias=False,
        qk_norm=model.startswith("qwen"),
        eos_token_ids=(2,),
        **shape,  # type: ignore[arg-type]
    )
    drafter = DrafterConfig(
        **{**shape, "num_layers": 5},  # type: ignore[arg-type]
        block_size=BLOCK,
        mask_token_id=16,
        target_layer_ids=tuple(range(1, layers - 1, (layers - 2) // TAPS))[:TAPS],
    )
    length = context + BLOCK
    return EngineConfig(
        model_dir="",
        target=target,
        drafter_dir="",
        drafter=drafter,
        identity="",
        dtype="bfloat16",
        device="cuda",
        num_threads=1,
        tensor_parallel_size=1,
        drafter_tensor_parallel=True,
        hidden_state_gather="fused",
        max_model_len=length,
        max_num_seqs=sequences,
        max_num_batched_tokens=8192,
        block_size=PAGE,
        num_blocks=1 + sequences * -(-(length + BLOCK) // PAGE),
        enable_prefix_caching=False,
        pipeline_depth=1,
        max_draft_len=BLOCK - 1,
        draft_len_choices=(0, BLOCK - 1),
        draft_len_schedule=(),
        gate_window=0,
        gate_threshold=0.0,
    )


class Step:
    """One decode step of `sequences` requests at a context length, K drafts each, on fixed inputs.

    num_layers: of the target, by default all; at least seven. drafter_weights: "int8" rounds them as an engine does.
    """

    def __init__(self, model: str, num_layers: int | None = None, drafter_weights: str = "model") -> None:
        self.num_layers = num_layers
        config = engine_config(model, 1, 64, num_layers)
        assert config.drafter is not None
        tp = TpGroup.solo()
        common = {"dtype": torch.bfloat16, "device": "cuda", "num_positions": 32768, "attention": cuda_paged_attention}
        self.target = TargetModel(config.target, tp=tp, **common)  # type: ignore[arg-type]
        self.drafter = DFlashDrafter(config.drafter, tp=tp, layer_tp=tp, hidden_state_gather="fused", **common)  # type: ignore[arg-type]
        for part in (self.target, self.drafter):
            for weight in part.parameters():
                if weight.dim() == 2:
                    weight.data.normal_(std=0.02)
        self.drafter.finish_loading()
        if drafter_weights == "int8":
            self.target.add_draft_head()
            prepare_linears(self.drafter, exact=False)
        self.model, self.tp = model, tp

    def prepare(self, *, sequences: int, context: int, draft_len: int) -> None:
        config = engine_config(self.model, sequences, context, self.num_layers)
        assert config.drafter is not None
        self.taps = config.drafter.target_layer_ids
        self.kv = KvCache.create(config, self.tp)
        self.columns = config.max_blocks_per_seq
        table = torch.randperm(config.num_blocks - 1, device="cuda") + 1
        self.table = table[: sequences * self.columns].view(sequences, self.columns)
        self.start = torch.full((sequences,), context, device="cuda")
        self.draft_len = draft_len
        self.ids = torch.randint(0, 1000, (sequences * (draft_len + 1),), device="cuda")
        self.block_ids = torch.randint(0, 1000, (sequences * BLOCK,), device="cuda")

    def context_of(self, queries: int, causal: bool) -> tuple[torch.Tensor, AttentionContext]:
        positions = self.start[:, None] + torch.arange(queries, device="cuda")
        slots = self.table.gather(1, positions // PAGE) * PAGE + positions % PAGE
        group = AttentionGroup(
            first_row=0,
            q_lens=(queries,) * self.start.shape[0],
            q_start_R=self.start,
            kv_len_R=self.start + queries,
            block_table_RB=self.table,
            max_kv_len=self.columns * PAGE,
            causal=causal,
        )
        return positions.flatten(), AttentionContext(slot_mapping_N=slots.flatten(), groups=(group,))

    def run_target(self) -> torch.Tensor:
        positions, ctx = self.context_of(self.draft_len + 1, True)
        out = self.target.forward(self.ids, positions, ctx, self.kv, self.taps)
        peaks_M = self.likeliest(out.hidden_NH, self.target.finds_peaks, self.target.logits)
        assert out.taps_NTH is not None
        self.drafter.write_context(self.drafter.context_features(out.taps_NTH), positions, ctx.slot_mapping_N, self.kv)
        return peaks_M

    def run_drafter(self) -> torch.Tensor:
        positions, ctx = self.context_of(BLOCK, False)
        block = self.drafter.enter(self.target.embedding, self.block_ids, positions)
        hidden = self.drafter.forward(block, ctx, self.kv)
        rows = hidden.view(self.start.shape[0], BLOCK, -1)[:, 1 : max(self.draft_len, 1) + 1].flatten(0, 1)
        return self.likeliest(rows, self.target.finds_draft_peaks, self.target.draft_logits)

    def likeliest(
        self, rows_MH: torch.Tensor, finds: Callable[[int], bool], logits: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Token ids, as the engine's greedy programs find them: target's and drafter's each ask their own `finds`."""
        if finds(rows_MH.shape[0]):
            return self.target.peaks(rows_MH)[1]
        return argmax_pair(logits(rows_MH), 0)[1]


def kernel_table(step: Step) -> list[dict[str, object]]:
    """GPU time of each kernel of one step, from the profiler, largest first."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run_target()
        step.run_drafter()
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        graph.replay()
        torch.cuda.synchronize()
    found = [
        {"kernel": event.key[:80], "calls": event.count, "us": round(event.self_device_time_total, 1)}
        for event in trace.key_averages()
        if event.self_device_time_total > 0
    ]
    return sorted(found, key=lambda row: -row["us"])  # type: ignore[operator,return-value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=tuple(SHAPES), default="smollm2")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[512])
    parser.add_argument("--draft-len", type=int, nargs="+", default=[0, 15])
    parser.add_argument("--drafter-weights", choices=("model", "int8"), default="model")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    results: list[dict[str, object]] = []
    with torch.inference_mode():
        step = Step(arguments.model, drafter_weights=arguments.drafter_weights)
        matrices = [p for m in (step.target, step.drafter) for p in m.parameters() if p.dim() == 2]
        weights = sum({p.data_ptr(): p.numel() for p in matrices}.values())
        for sequences in arguments.sequences:
            for context in arguments.context:
                for draft_len in arguments.draft_len:
                    step.prepare(sequences=sequences, context=context, draft_len=draft_len)
                    target_us, drafter_us = graph_us([step.run_target]), graph_us([step.run_drafter])
                    row = {"sequences": sequences, "context": context, "draft_len": draft_len}
                    results.append(
                        {
                            **row,
                            "target_us": round(target_us, 1),
                            "drafter_us": round(drafter_us, 1),
                            "kernels": kernel_table(step),
                        }
                    )
                    print(
                        f"{arguments.model} {row} target {target_us:.1f} us drafter {drafter_us:.1f} us",
                        file=sys.stderr,
                    )
                    for line in results[-1]["kernels"][:14]:  # type: ignore[index]
                        print(f"    {line}", file=sys.stderr)
    settings = {name: os.environ.get(name) for name in ("DFLASH_CUDA_KERNELS", "DFLASH_CUDA_DEPENDENT_LAUNCH")}
    floor = 2 * weights / READ_BYTES_PER_S * 1e6
    settings["drafter_weights"] = arguments.drafter_weights
    write(arguments.out, results, model=arguments.model, settings=settings, weights_once_us=round(floor, 1))


if __name__ == "__main__":
    main()
