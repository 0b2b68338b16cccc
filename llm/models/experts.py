"""Sparse MLPs of a checkpoint: which layers have experts, and their weights on this rank."""

from __future__ import annotations

from dataclasses import dataclass

from llm.errors import CheckpointError
from llm.layers.decoder import MLP, GatedMLP
from llm.layers.experts import (
    ExpertMatrix,
    Experts,
    ExpertsShape,
    GroupedExperts,
    SeparateExperts,
    SharedExpert,
    SparseExperts,
)
from llm.layers.factory import BY_EXPERT, LinearFactory
from llm.layers.weight import LinearWeight
from llm.models.hf_config import HuggingFaceConfig
from llm.models.llama import LayerLoader
from llm.models.llama_config import LlamaConfig
from llm.models.weights import WeightReader
from llm.parallel.group import NullGroup
from llm.parallel.shard import Shard


@dataclass(frozen=True, slots=True)
class SparseLayers:
    """The layers with experts, and their sizes."""

    numbers: frozenset[int]
    shape: ExpertsShape

    @classmethod
    def read(
        cls, config: HuggingFaceConfig, num_layers: int, default: ExpertsShape
    ) -> SparseLayers | None:
        """Read the keys of a model with `num_layers`; None where no layer is sparse.

        `default` are the sizes where a key is missing; without a shared expert there, there is
        none. Raises `CheckpointError`.
        """
        key = "num_local_experts" if config.get("num_experts") is None else "num_experts"
        if config.get(key, default.num_experts) == 0:
            return None
        num_experts = config.size(key, default.num_experts)
        chosen = config.size("num_experts_per_tok", default.num_chosen)
        if chosen > num_experts:
            raise CheckpointError(
                f"{config.path}: num_experts_per_tok={chosen} must be at most {key}={num_experts}"
            )
        shared = default.shared_size
        shape = ExpertsShape(
            num_experts,
            chosen,
            config.size("moe_intermediate_size", default.inner_size),
            config.size("shared_expert_intermediate_size", shared) if shared else 0,
            bool(config.get("norm_topk_prob", default.normalizes)),
        )
        step, dense = config.size("decoder_sparse_step", 1), config.get("mlp_only_layers", [])
        numbers = (n for n in range(num_layers) if (n + 1) % step == 0 and n not in dense)
        found = frozenset(numbers)
        return cls(found, shape) if found else None

    def num_mlp_weights(self, config: LlamaConfig) -> int:
        """Return the number of weights in the matrices of all MLPs of a model."""
        hidden, count = config.shape.hidden_size, len(self.numbers)
        num_dense = config.shape.num_layers - count
        dense = num_dense * 3 * hidden * config.intermediate_size
        return dense + count * self.shape.num_weights(hidden)


@dataclass(frozen=True, slots=True)
class SparseLoader(LayerLoader):
    """Creates layers of which some have experts.

    A rank has a part of all experts, each of them cut like a dense MLP, or with `is_spread` an
    equal number of whole ones. Experts have no adapters: they see other tokens. Routers and gates
    are never quantised.
    """

    sparse: SparseLayers | None
    is_spread: bool = False

    def mlp(self, index: int) -> MLP:
        """See `LayerLoader`."""
        if self.sparse is None or index not in self.sparse.numbers:
            return LayerLoader.mlp(self, index)
        name, shape = self.names.mlp.format(index), self.sparse.shape
        plain, hidden = self.factory.without_adapters(), self.config.shape.hidden_size
        router = self.reader.matrix(f"{name}.gate", shape.num_experts, hidden)
        shared = None
        if shape.shared_size:
            gate = self.reader.matrix(f"{name}.shared_expert_gate", 1, hidden)
            weights = self._expert(f"{name}.shared_expert", shape.shared_size, is_cut=True)
            mlp = gated_mlp(weights.gate_up(), weights.down(), self.factory)
            shared = SharedExpert(mlp, plain.exact().linear(gate))
        experts = self._experts(f"{name}.experts", shape, plain)
        return SparseExperts(plain.exact().linear(router), experts, shared, self.group)

    def _experts(self, name: str, shape: ExpertsShape, factory: LinearFactory) -> Experts:
        """Return the experts of this rank."""
        own = range(shape.num_experts)
        if self.is_spread:
            own = self._shard.heads(shape.num_experts)
            for number in set(range(shape.num_experts)).difference(own):
                for part in ("gate", "up", "down"):
                    self.reader.skip_matrix(f"{name}.{number}.{part}_proj")
        weights = [
            self._expert(f"{name}.{number}", shape.inner_size, is_cut=not self.is_spread)
            for number in own
        ]
        if not factory.groups_experts:
            mlps = [gated_mlp(each.gate_up(), each.down(), factory) for each in weights]
            return SeparateExperts(shape, own.start, mlps)
        factory.counts[BY_EXPERT] += 2
        return GroupedExperts(
            shape,
            own.start,
            ExpertMatrix.load((each.gate_up() for each in weights), len(own), factory),
            ExpertMatrix.load((each.down() for each in weights), len(own), factory),
        )

    def _expert(self, name: str, size: int, *, is_cut: bool) -> ExpertWeights:
        shard = self._shard if is_cut else Shard()
        return ExpertWeights(self.reader, name, self.config.shape.hidden_size, size, shard)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The matrices of one expert, read at each call."""

    reader: WeightReader
    name: str
    hidden_size: int
    size: int
    shard: Shard  # part of the inner size

    def gate_up(self) -> LinearWeight:
        """Return gate and up as one matrix."""
        part = self.shard.part(0, self.size)
        names = (f"{self.name}.{each}_proj" for each in ("gate", "up"))
        return LinearWeight.stack(
            [self.reader.matrix(name, self.size, self.hidden_size, part=part) for name in names]
        )

    def down(self) -> LinearWeight:
        """Return down."""
        part = self.shard.part(1, self.size)
        return self.reader.matrix(f"{self.name}.down_proj", self.hidden_size, self.size, part=part)


def gated_mlp(gate_up: LinearWeight, down: LinearWeight, factory: LinearFactory) -> GatedMLP:
    """Return a rank's part of an expert; `SparseExperts` adds the parts."""
    return GatedMLP(factory.linear(gate_up), factory.linear(down), NullGroup())
