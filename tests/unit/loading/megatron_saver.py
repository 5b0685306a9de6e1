"""Ranks of a training that save a model as Megatron-Core does: torch's own writer, shards of the whole tensors.

    python megatron_saver.py WORLD STORE MODEL TARGET stacked|numbered [MODEL TARGET stacked|numbered ...]

The layout is written down here a second time, from what each rank of Megatron-Core holds, so that a mistake in the
product's table does not hide in its tests.
"""

import io
import json
import multiprocessing
import sys
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, TensorProperties

VOCABULARY_MULTIPLE = 64


def sharded(parts: list[tuple[tuple[int, ...], torch.Tensor]], boxes: list[tuple], shape: tuple[int, ...], rank: int):
    """parts: this rank's (offset, values). boxes: every rank's (rank, offset, extent)."""
    owners = [ShardMetadata(list(at), list(extent), f"rank:{owner}/cpu") for owner, at, extent in boxes]
    dtype = parts[0][1].dtype
    properties = TensorProperties(dtype=dtype)
    metadata = ShardedTensorMetadata(shards_metadata=owners, size=torch.Size(shape), tensor_properties=properties)
    local = [Shard.from_tensor_and_offsets(values.contiguous(), list(at), rank) for at, values in parts]
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, sharded_tensor_metadata=metadata)


class Saver:
    def __init__(self, model: Path, rank: int, world: int, *, numbered: bool) -> None:
        self.config = json.loads((model / "config.json").read_text())
        self.tensors = load_file(model / "model.safetensors")
        self.rank, self.world, self.numbered = rank, world, numbered
        self.layers = self.config["num_hidden_layers"]
        self.state: dict[str, object] = {}

    def local(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(self.world, dim)[self.rank]

    def qkv(self, name: str) -> torch.Tensor:
        """Of this rank: for each of its key-value heads the queries, the key, the value."""
        size, groups = self.config["head_dim"], self.config["num_key_value_heads"]
        q, k, v = (
            self.tensors[name.format(letter)].unflatten(0, (groups, -1, size)).chunk(self.world)[self.rank]
            for letter in "qkv"
        )
        return torch.cat([q, k, v], dim=1).flatten(0, 2)

    def add_experts(self, key: str, hf: str, names: tuple[str, ...], layer: int) -> None:
        """Expert parallel: each rank holds some experts whole, and saves each part of one as a box of its own."""
        count = self.config["num_experts"]
        shape = list(self.tensors[hf.format(0, names[0])].shape)
        extent = (1, 1, *shape)
        each = count // self.world
        name = key.format(f".{layer}" if self.numbered else "")
        held = self.held.setdefault(name, ([], [], (self.layers, count, shape[0] * len(names), *shape[1:])))
        for expert in range(count):
            for part, piece in enumerate(names):
                at = (layer, expert, part * shape[0], 0)
                held[1].append((expert // each, at, extent))
                if expert // each == self.rank:
                    held[0].append((at, self.tensors[hf.format(expert, piece)].view(extent)))

    def add(self, key: str, local: list[torch.Tensor], *, split: int | None, layer: int | None, parts: int = 1) -> None:
        """local: this rank's values, one for each of the `parts` that are split over the ranks one by one."""
        shape = list(local[0].shape)
        extent = tuple(shape)
        if split is not None:
            shape[split] *= self.world * parts
        grid = () if layer is None or self.numbered else (self.layers,)
        place = () if not grid else (layer,)
        name = key.format(f".{layer}" if self.numbered else "")

        def at(owner: int, part: int) -> tuple[int, ...]:
            offset = [0] * len(shape)
            if split is not None:
                offset[split] = (part * self.world + owner) * extent[split]
            return (*place, *offset)

        owners = range(self.world) if split is not None else range(1)
        mine = [(at(self.rank, part), values.view(*(1 for _ in grid), *extent)) for part, values in enumerate(local)]
        boxes = [(owner, at(owner, part), (*(1 for _ in grid), *extent)) for owner in owners for part in range(parts)]
        held = self.held.setdefault(name, ([], [], (*grid, *shape)))
        held[0].extend(mine if self.rank in owners else [])
        held[1].extend(boxes)

    def build(self) -> dict[str, object]:
        self.held: dict[str, tuple] = {}
        for layer in range(self.layers):
            self.add_layer(layer)
        vocabulary = self.config["vocab_size"]
        padded = -(-vocabulary // (VOCABULARY_MULTIPLE * self.world)) * VOCABULARY_MULTIPLE * self.world
        for key, name in (("embedding.word_embeddings", "model.embed_tokens"), ("output_layer", "lm_head")):
            if f"{name}.weight" in self.tensors:
                table = self.tensors[f"{name}.weight"]
                padding = torch.full((padded - vocabulary, table.shape[1]), 7, dtype=table.dtype)
                self.add(f"{key}.weight", [self.local(torch.cat([table, padding]), 0)], split=0, layer=None)
        self.add("decoder.final_layernorm.weight", [self.tensors["model.norm.weight"]], split=None, layer=None)
        state: dict[str, object] = {}
        for key, (parts, boxes, shape) in self.held.items():
            if parts:
                state[key] = sharded(parts, boxes, shape, self.rank)
                # What a training saves beside the weights.
                moments = [(at, torch.zeros_like(values)) for at, values in parts]
                state[f"optimizer.state.exp_avg.{key}"] = sharded(moments, boxes, shape, self.rank)
        state["decoder.layers.self_attention.linear_qkv._extra_state/shard_0_1"] = io.BytesIO(b"extra")
        return state

    def add_layer(self, layer: int) -> None:
        hf, key = f"model.layers.{layer}.", "decoder.layers{}."
        norm = self.tensors[hf + "input_layernorm.weight"]
        self.add(key + "self_attention.linear_qkv.layer_norm_weight", [norm], split=None, layer=layer)
        qkv = self.qkv(hf + "self_attn.{}_proj.weight")
        self.add(key + "self_attention.linear_qkv.weight", [qkv], split=0, layer=layer)
        if hf + "self_attn.q_proj.bias" in self.tensors:
            bias = self.qkv(hf + "self_attn.{}_proj.bias")
            self.add(key + "self_attention.linear_qkv.bias", [bias], split=0, layer=layer)
        proj = self.local(self.tensors[hf + "self_attn.o_proj.weight"], 1)
        self.add(key + "self_attention.linear_proj.weight", [proj], split=1, layer=layer)
        for letter in "qk":
            if f"{hf}self_attn.{letter}_norm.weight" in self.tensors:
                norm = self.tensors[f"{hf}self_attn.{letter}_norm.weight"]
                self.add(f"{key}self_attention.{letter}_layernorm.weight", [norm], split=None, layer=layer)
        norm = self.tensors[hf + "post_attention_layernorm.weight"]
        if "num_experts" in self.config:
            self.add(key + "pre_mlp_layernorm.weight", [norm], split=None, layer=layer)
            self.add(key + "mlp.router.weight", [self.tensors[hf + "mlp.gate.weight"]], split=None, layer=layer)
            experts, own = key + "mlp.experts.experts.", hf + "mlp.experts.{}.{}_proj.weight"
            self.add_experts(experts + "linear_fc1.weight", own, ("gate", "up"), layer)
            self.add_experts(experts + "linear_fc2.weight", own, ("down",), layer)
            return
        self.add(key + "mlp.linear_fc1.layer_norm_weight", [norm], split=None, layer=layer)
        halves = [self.local(self.tensors[f"{hf}mlp.{part}_proj.weight"], 0) for part in ("gate", "up")]
        self.add(key + "mlp.linear_fc1.weight", halves, split=0, layer=layer, parts=2)
        down = self.local(self.tensors[hf + "mlp.down_proj.weight"], 1)
        self.add(key + "mlp.linear_fc2.weight", [down], split=1, layer=layer)


def arguments(config: dict) -> Namespace:
    return Namespace(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=config["num_attention_heads"],
        group_query_attention=True,
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        vocab_size=config["vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        normalization="RMSNorm",
        norm_epsilon=config["rms_norm_eps"],
        position_embedding_type="rope",
        rotary_base=int(config["rope_theta"]),
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=config["architectures"] == ["Qwen2ForCausalLM"],
        qk_layernorm="Qwen3" in config["architectures"][0],
        num_experts=config.get("num_experts"),
        moe_router_topk=config.get("num_experts_per_tok"),
        moe_ffn_hidden_size=config.get("moe_intermediate_size"),
        untie_embeddings_and_output_weights=not config["tie_word_embeddings"],
        # Objects of the training's own: a reader has no such classes.
        params_dtype=torch.bfloat16,
        load=Path("/elsewhere"),
        activation=torch.nn.functional.silu,
    )


def main(rank: int, world: int, store: Path, jobs: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for model, target, layers in zip(jobs[0::3], jobs[1::3], jobs[2::3], strict=True):
        saver = Saver(Path(model), rank, world, numbered=layers == "numbered")
        dcp.save(saver.build(), checkpoint_id=target)
        if rank == 0:
            common = {"args": arguments(saver.config), "checkpoint_version": 3.0, "iteration": 12, "r": torch.zeros(3)}
            torch.save(common, Path(target, "common.pt"))
            Path(target, "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    dist.destroy_process_group()


if __name__ == "__main__":
    # The ranks are forked from here: importing torch takes longer than all they do.
    fork = multiprocessing.get_context("fork")
    world = int(sys.argv[1])
    ranks = [fork.Process(target=main, args=(rank, world, Path(sys.argv[2]), sys.argv[3:])) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))
