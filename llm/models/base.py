"""`PipelineModel`: the interface of an architecture. It owns no requests, pages or graphs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from llm.batch import (
    ForwardBatch,
    KVCacheInputs,
    ModelInputs,
    ModelOutputs,
    ReturnHiddenStates,
    ReturnLogits,
)
from llm.config import KVCacheConfig, PipelineConfig
from llm.config.sections import switch
from llm.errors import ConfigError
from llm.kv_cache.state_pool import StatePart, StatePool
from llm.lora.manager import LoRAManager
from llm.models.encoding import Encoding, choose_encoding
from llm.models.hf_config import HuggingFaceConfig, ModelShape
from llm.models.pooling import read_pooling
from llm.models.random_weights import open_weights
from llm.models.session import EngineSession
from llm.models.weights import Weights, WeightsAdapter
from llm.parallel.group import Group
from llm.request import IdRange
from llm.sampling.frames import FrameDecoder
from llm.sampling.log_probabilities import LogProbabilities

ContextT = TypeVar("ContextT")


NO_LOG_PROBABILITIES = "does not compute log-probabilities"


class PipelineModel(ABC, Generic[ContextT]):
    """Setup, input preparation and execution of one model on one group of devices.

    `ContextT` is the model's view of a request; text and speech requests share it.

    A subclass must have the four abstract methods, and its checkpoints' config.json the sizes that
    `ModelShape.read` requires. All other methods have defaults: no weights to read, no scratch in
    the memory plan, no adapters, no log-probabilities and no captured decoding.
    """

    uses_kv_pool: ClassVar[bool] = True  # otherwise it keeps keys and values itself, if any
    can_capture: ClassVar[bool] = False  # whether `write_logits` is implemented
    unread: ClassVar[tuple[str, ...]] = ()  # beginnings of names of tensors that are not loaded
    can_shard: ClassVar[bool] = False  # whether `session.group` may have several ranks
    vocab_size: int

    def __init__(  # noqa: PLR0913, PLR0917 - the interface of plug-ins
        self,
        pipeline_config: PipelineConfig,
        session: EngineSession,
        devices: Sequence[torch.device],
        kv_cache_config: KVCacheConfig,
        weights: Weights,
        adapter: WeightsAdapter | None = None,
        return_logits: ReturnLogits = ReturnLogits.LAST_TOKEN,
        return_hidden_states: ReturnHiddenStates = ReturnHiddenStates.NONE,
    ) -> None:
        """Create the model and load its weights. `devices` are in rank order; logits and sampled
        tokens are on the first.

        Raises `RuntimeError` for an unresolved configuration, `CheckpointError` for weights that do
        not match the architecture.
        """
        if not pipeline_config.is_resolved:
            raise RuntimeError("resolve the configuration before a model is made from it")
        self.pipeline_config = pipeline_config
        self.session = session
        self.devices = list(devices)
        self.kv_cache_config = kv_cache_config
        self.weights = weights
        self.adapter = adapter
        self.return_logits = return_logits
        self.return_hidden_states = return_hidden_states
        self.group: Group = session.group
        self.linear_backends: Mapping[str, int] = {}
        """Number of linear layers by implementation."""
        # None for models that generate
        self.pooling = read_pooling(pipeline_config.model.model_path)
        self._huggingface_config = HuggingFaceConfig.read(pipeline_config.model.model_path)
        self.encoding: Encoding = choose_encoding(pipeline_config.model, self._huggingface_config)
        self.max_seq_len = self.calculate_max_seq_len(pipeline_config, self._huggingface_config)
        lora = pipeline_config.lora
        self.frame_decoder: FrameDecoder | None = None
        """Decoder of a frame's further codes; None for models of one token per position."""
        self.media_ids: frozenset[int] = frozenset()
        """Ids that stand for images and videos, which no prompt can have."""
        self.states: StatePool | None = None
        """Recurrent states, set by the runner before the first forward; None without any."""
        self.lora_manager: LoRAManager | None = None
        """The adapters; None unless the configuration enables them."""
        if lora is not None and lora.enable_lora:
            self.lora_manager = LoRAManager(lora, self.devices[0])
        self.load_weights()
        if self.lora_manager is not None:
            self.lora_manager.check_claimed()
        weights.close()

    def load_weights(self) -> None:
        """Read `self.weights`, for models that have weights. Called at the end of construction."""
        return

    @classmethod
    @abstractmethod
    def calculate_max_seq_len(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """Return the maximum number of tokens of one sequence. Needs no weights.

        Raises `ValueError` with both numbers when `max_length` is above the model's limit.
        """

    @classmethod
    def shape(cls, huggingface_config: HuggingFaceConfig) -> ModelShape:
        """Return the sizes for the memory plan and the sampler. Needs no weights."""
        return ModelShape.read(huggingface_config)

    @classmethod
    def num_kv_layers(cls, huggingface_config: HuggingFaceConfig) -> int:
        """Return the number of layers that keep keys and values; all by default.

        Needs no weights.
        """
        return cls.shape(huggingface_config).num_layers

    @classmethod
    def recurrent_state(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> tuple[StatePart, ...]:
        """Return the parts of a sequence's recurrent state; () for a model without one.

        The model finds the states of all sequences in `states`. Needs no weights.
        """
        return ()

    @classmethod
    def attention_windows(cls, huggingface_config: HuggingFaceConfig) -> tuple[int | None, ...]:
        """Return by layer how many keys a query attends to, None for all; () when no layer has a
        limit.

        Needs no weights.
        """
        return ()

    @classmethod
    def attention_soft_cap(cls, huggingface_config: HuggingFaceConfig) -> float | None:
        """Return c if attention's scores s are mapped to c × tanh(s / c), else None.

        Needs no weights.
        """
        return None

    @classmethod
    def estimate_weights_size(cls, pipeline_config: PipelineConfig) -> int:
        """Return the bytes of the weights in memory, from the files' headers alone."""
        model = pipeline_config.model
        encoding = choose_encoding(model, HuggingFaceConfig.read(model.model_path))
        total, matrix_width = 0, product_bytes(encoding, pipeline_config)
        weights = open_weights(pipeline_config)
        is_packed = encoding.packed and not expands(pipeline_config)
        packed = weights.packed_bytes() if is_packed else {}
        if not model.on_cpu:  # the product of all experts has them in floating point
            packed = {name: size for name, size in packed.items() if ".experts." not in name}
        for name, info in weights.info().items():
            if name.startswith(cls.unread):
                continue
            if name in packed:
                total += packed[name]
                continue
            is_matrix = len(info.shape) == 2 and min(info.shape) > 1
            width = matrix_width if is_matrix else encoding.dtype.itemsize
            total += info.num_values * width
        return total

    @classmethod
    def estimate_activation_memory(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """Return the bytes of scratch of the largest step; 0 by default."""
        return 0

    @classmethod
    def estimate_token_memory(
        cls, pipeline_config: PipelineConfig, huggingface_config: HuggingFaceConfig
    ) -> int:
        """Return the part of it per token, without logits; 0 by default."""
        return 0

    @classmethod
    def check_shards(
        cls, huggingface_config: HuggingFaceConfig, num_ranks: int, ep_size: int = 1
    ) -> None:
        """Raise `ConfigError` when the model cannot be split over so many ranks, its experts by
        columns or (with an `ep_size` of the number of ranks) whole. Needs no weights.
        """
        if num_ranks > 1 and not cls.can_shard:
            raise ConfigError(
                f"model.device_specs names {num_ranks} devices, and {cls.__name__} runs on one"
            )

    @property
    def dtype(self) -> torch.dtype:
        """Number format of activations and of weights that are not quantised."""
        return self.encoding.dtype

    @property
    def huggingface_config(self) -> HuggingFaceConfig:
        """The checkpoint's top-level config.json."""
        return self._huggingface_config

    @property
    def signal_buffers(self) -> list[Tensor]:
        """Return scratch of collectives, one tensor per device of several, created at the first
        forward.
        """
        return self.group.signal_buffers()

    @abstractmethod
    def prepare_initial_token_inputs(
        self,
        replica_batches: Sequence[Sequence[ContextT]],
        kv_cache_inputs: KVCacheInputs | None = None,
        return_n_logits: int = 1,
    ) -> ModelInputs:
        """Return the inputs of a step's first forward, for `execute`.

        The outer list is data-parallel replicas. `return_n_logits` counts rows of logits from the
        end of each request, for `ReturnLogits.VARIABLE`.
        """

    @abstractmethod
    def prepare_next_token_inputs(
        self, next_tokens: Tensor, prev_model_inputs: ModelInputs
    ) -> ModelInputs:
        """Return the inputs of the forward that feeds the sampled tokens [B], without waiting."""

    @abstractmethod
    def execute(self, model_inputs: ModelInputs) -> ModelOutputs:
        """Run one forward."""

    def write_logits(
        self,
        batch: ForwardBatch,
        cache: KVCacheInputs,
        target: Tensor,
        tokens: Tensor | None = None,
        states: Tensor | None = None,
        needed: Tensor | None = None,
    ) -> None:
        """Run a captured forward: write float32 logits of the `tokens` (int64 [R]; None: of all T)
        into target [R, V], and for a frame decoder their normalised hidden states into states
        [R, H]. `needed`: see `limit_head`.

        Host values of `batch` and `cache` are not read: they are those of the capture.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be captured")

    def limit_head(self, common: IdRange) -> bool:
        """Prepare for forwards that need no logits but those of ids in the range `needed` int32 [2]
        on the device, mostly within `common`. Returns whether they take less time, see `Head`.
        """
        return False

    def release(self, request_id: str) -> None:
        """Free what is kept for a request that has ended; no effect the second time."""
        return

    def compute_log_probabilities(
        self,
        session: EngineSession,
        model_inputs: ModelInputs,
        model_outputs: ModelOutputs,
        next_tokens: Tensor,
        batch_top_n: list[int],
        batch_echo: list[bool],
    ) -> list[LogProbabilities | None]:
        """Return one entry for each sampling request, None if its top n is 0. Optional."""
        raise NotImplementedError(f"{type(self).__name__} {NO_LOG_PROBABILITIES}")

    @property
    def no_log_probabilities(self) -> str:
        """Return why log-probabilities are not supported; empty if they are."""
        own = type(self).compute_log_probabilities
        if own is not PipelineModel.compute_log_probabilities:
            return ""
        return f"{type(self).__name__} {NO_LOG_PROBABILITIES}"


def product_bytes(encoding: Encoding, pipeline_config: PipelineConfig) -> int:
    """Return the bytes of one element of a layer's matrix in products."""
    if encoding.float8:
        return encoding.matrix_bytes
    return encoding.dtype.itemsize if expands(pipeline_config) else encoding.matrix_bytes


def expands(pipeline_config: PipelineConfig) -> bool:
    """Return whether int8 and packed matrices are expanded, for torch's BLAS."""
    return switch("use_vendor_blas", pipeline_config.use_vendor_blas)


def upper_bounded_default(upper_bound: int, default: int | None) -> int:
    """Return `default`, or the bound when it is None. Raises `ValueError` when it is above the
    bound.
    """
    if default is None:
        return upper_bound
    if default > upper_bound:
        raise ValueError(f"{default} is above the limit of {upper_bound}")
    return default
