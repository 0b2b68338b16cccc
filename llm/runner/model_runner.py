"""`ModelRunner`: runs the forward passes of one model on one device. It owns no queue.

runner = ModelRunner(config)
runner.initialize()                          # device, memory plan, weights, pool, attention
inputs = runner.prepare(batch)               # ScheduledBatch -> ForwardBatch -> ModelInputs
outputs = runner.forward(inputs)             # attention was planned by prepare
token_ids = runner.sample_tokens(outputs, runner.token_sampler.prepare(rows))

Without a scheduler it is driven by tensors: see `TensorInterface`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from llm.attention.base import AttentionBackend, AttentionOptions, PlannedAttention
from llm.attention.registry import create_attention_backend
from llm.batch import (
    ForwardBatch,
    ForwardMode,
    ModelInputs,
    ModelOutputs,
    ReturnHiddenStates,
    ScheduledBatch,
    ScheduledRow,
    frame_rows,
    vectors_of,
)
from llm.config import ModelConfig, PipelineConfig, PipelineRole, default_config
from llm.errors import ConfigError
from llm.kernels.together import compile_together
from llm.kv_cache.kv_pool import KVPool
from llm.kv_cache.layer_marks import LayerMarks
from llm.kv_cache.state_pool import StatePool
from llm.memory.plan import MemoryPlan
from llm.memory.transfer import to_device
from llm.models.base import PipelineModel
from llm.models.encoding import choose_encoding
from llm.models.hf_config import HuggingFaceConfig
from llm.models.pooling import read_pooling
from llm.models.random_weights import open_weights
from llm.models.registry import model_class
from llm.models.session import EngineSession
from llm.models.weights import Weights, WeightsAdapter, WeightsFormat
from llm.parallel.group import Group, NullGroup
from llm.parallel.shard import Shard
from llm.request import FrameShape, SamplingParams
from llm.runner.future_tokens import NOTHING_AWAITED, FutureTokens
from llm.runner.graphs.capture import CudaCapture, GraphCapture
from llm.runner.graphs.cuda_graphs import GraphInputs, GraphRunner
from llm.runner.graphs.rows import PADDING_PAGES
from llm.runner.graphs.shapes import GraphLimits
from llm.runner.memory_planning import MemoryPlanning
from llm.runner.tensor_api.interface import LogitsProcessorOutput, TensorInterface
from llm.sampling.device.frames import DeviceFrameSampler
from llm.sampling.device.sampler import BufferedSampler, DeviceSampler
from llm.sampling.frames import FrameSampler
from llm.sampling.sampler import Sampler, TokenSampler

logger = logging.getLogger(__name__)

WARM_UP_SIZES = (1, 2, 8, 16, 64, 256, 2048)  # tokens of a batch
WARM_UP_ROWS = 64  # up to here a batch has a row for each token, if it may have so many


class ModelRunner(MemoryPlanning, TensorInterface):
    """Runner of one model; see the module for the life cycle."""

    layer_marks: LayerMarks | None = None
    """Marks of the newest forward, if it runs eagerly on a GPU with `prefill_only`."""

    def __init__(
        self,
        server_config: PipelineConfig | None = None,
        model_config: ModelConfig | None = None,
        gpu_id: int | None = None,
        *,
        model_type: type[PipelineModel[ScheduledRow]] | None = None,
        weight_adapters: Mapping[WeightsFormat, WeightsAdapter] | None = None,
        is_draft: bool = False,
        group: Group | None = None,
    ) -> None:
        """Read the checkpoint's configuration; nothing is allocated yet.

        Defaults: the process's default configuration, the configuration's model and its device, the
        architecture that the checkpoint names. `is_draft`: the model drafts for another runner.
        `group`: the ranks that share the model, one for each of `device_specs`; this runner is one
        of them, and the others run the same batches.

        Raises `ConfigError` for a model that cannot be split over the ranks.
        """
        config = default_config() if server_config is None else server_config
        if not config.is_resolved:
            raise RuntimeError("resolve the configuration before a runner is made from it")
        config = with_model(config, model_config, gpu_id)
        if not config.model.model_path:
            raise RuntimeError("model.model_path is not set: there is nothing to load")
        self.server_config = config
        self.model_config: ModelConfig = config.model
        self.group: Group = NullGroup() if group is None else group
        if self.group.size != len(config.model.device_specs):
            raise ConfigError(
                f"model.device_specs names {len(config.model.device_specs)} devices for "
                f"{self.group.size} ranks"
            )
        self.device = torch.device(config.model.device_specs[self.group.rank])
        self.gpu_id = self.device.index or 0
        self.huggingface_config = HuggingFaceConfig.read(config.model.model_path)
        self.pooling = read_pooling(config.model.model_path)
        self._model_class = model_type or model_class(
            self.huggingface_config, runs_alone=config.runs_alone
        )
        self.is_draft = is_draft
        self._weight_adapters = weight_adapters or {}
        self._read_sizes()
        self._windows = self._model_class.attention_windows(self.huggingface_config)
        self.context_len = self._model_class.calculate_max_seq_len(config, self.huggingface_config)
        self.max_running_requests = 0  # rows of a batch; set by the memory plan
        self.max_total_num_tokens = 0  # of the KV cache; set by the memory plan
        self.forward_pass_id = 0  # forwards so far, idle ones included
        self.session = EngineSession(self.device, group=self.group)
        self.memory_plan: MemoryPlan | None = None
        self.model: PipelineModel[ScheduledRow] | None = None
        self.token_to_kv_pool: KVPool | None = None
        self.attn_backend: AttentionBackend[Any] | None = None
        self.graph_runner: GraphRunner | None = None  # None: every forward runs eagerly
        self.gdn_pool: StatePool | None = None  # None: the model has no recurrent states
        self._logits_dtype: torch.dtype = getattr(torch, config.sampling.in_dtype)
        self.sampler = Sampler(self.vocab_size, self.device)
        self.token_sampler: TokenSampler[Any] = self.sampler
        self.frames: FrameShape | None = None  # None: a token is one id

    def _read_sizes(self) -> None:
        """Read the model's sizes, those of heads for this rank. Raises `ConfigError` for a model
        that cannot be split.
        """
        facts, ep_size = self.huggingface_config, self.server_config.ep_size
        self._model_class.check_shards(facts, self.group.size, ep_size)
        shape, shard = self._model_class.shape(self.huggingface_config), Shard(0, self.group.size)
        self.num_hidden_layers = shape.num_layers
        self.num_attention_heads = shard.num_heads(shape.num_heads)  # of this rank
        self.num_kv_heads = shard.num_heads(shape.num_kv_heads)
        self.head_dim = shape.head_dim
        self.hidden_size = shape.hidden_size
        self.vocab_size = shape.vocab_size

    @property
    def is_generation(self) -> bool:
        """Whether the model generates tokens; else it embeds texts."""
        return self.pooling is None

    @property
    def sliding_window_size(self) -> int | None:
        """Attention span in tokens of the layers that have one; None: all layers use the full
        context.
        """
        return next((window for window in self._windows if window is not None), None)

    @property
    def loaded_model(self) -> PipelineModel[ScheduledRow]:
        """Return `model`. Raises `RuntimeError` before `initialize` and after `shutdown`."""
        if self.model is None:
            raise RuntimeError("initialize the runner before it is used")
        return self.model

    @property
    def page_size(self) -> int:
        """Number of tokens of a KV page."""
        return self.model_config.kv_cache.kv_cache_page_size

    @property
    def dtype(self) -> torch.dtype:
        """Number format of activations."""
        return choose_encoding(self.model_config, self.huggingface_config).dtype

    @property
    def kv_cache_dtype(self) -> torch.dtype:
        """Number format of keys and values: `kv_cache_format`, or the model's."""
        kv_format = self.model_config.kv_cache.kv_cache_format
        found: torch.dtype = self.dtype if kv_format is None else getattr(torch, kv_format)
        return found

    def initialize(self, draft: ModelRunner | None = None) -> None:
        """Prepare everything for the first forward. Raises `RuntimeError` the second time.

        `draft` is the runner of a draft model that shares the device and the page ids.
        """
        if self.model is not None:
            raise RuntimeError("the runner is initialized already")
        if draft is not None and (self.recurrent_state or draft.recurrent_state):
            raise ConfigError(
                "draft_model: a recurrent state cannot go back behind a rejected draft; run "
                "models with such states without one"
            )
        started = time.perf_counter()
        self._check_device()
        self.server_config.configure_session(self.session)
        self.session.check_device()
        self.plan_memory(draft)
        self.load_model()
        self.init_memory_pool()
        self.init_attention_backend()
        self.init_cuda_graphs()
        if self.device.type == "cuda":
            self.warm_up()
        logger.info(
            "%s on %s in %.2f s: %s, keys and values %s, %d tokens, %d requests",
            self.huggingface_config.architecture,
            self.device,
            time.perf_counter() - started,
            self.loaded_model.encoding,
            self.kv_cache_dtype,
            self.max_total_num_tokens,
            self.max_running_requests,
        )

    def _check_device(self) -> None:
        if self.device.type != "cuda":
            return
        count = torch.cuda.device_count()
        if self.gpu_id >= count:
            raise ConfigError(f"device {self.device} requested, {count} CUDA devices found")
        torch.cuda.set_device(self.device)

    def load_model(self) -> None:
        """Create the model and read its weights."""
        config = self.model_config
        weights = open_weights(self.server_config)
        adapter = self._weight_adapters.get(weights.format)
        if adapter is None and not self.is_generation:
            adapter = with_root(weights)
        self.model = self._model_class(
            self.server_config,
            self.session,
            [self.device],
            config.kv_cache,
            weights,
            adapter,
            return_hidden_states=(
                ReturnHiddenStates.NONE if self.is_generation else ReturnHiddenStates.ALL_NORMALIZED
            ),
        )
        if self.model.frame_decoder is not None:
            self.frames = self.model.frame_decoder.shape
            self.token_sampler = FrameSampler(self.model.frame_decoder, self.device)

    def init_memory_pool(self) -> None:
        """Allocate the planned KV pool, and the pool of recurrent states if the model has them."""
        if self.memory_plan is None:
            raise RuntimeError("plan the memory before the pool is allocated")
        num_layers = self._model_class.num_kv_layers(self.huggingface_config)
        self.token_to_kv_pool = KVPool(
            num_layers=num_layers if self._model_class.uses_kv_pool else 0,
            num_pages=self.memory_plan.num_pages,
            page_size=self.memory_plan.page_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.kv_cache_dtype,
            device=self.device,
            is_shared=self.server_config.pipeline_role is PipelineRole.DecodeOnly,
        )
        if parts := self.recurrent_state:
            num_states = self.num_states(self.max_running_requests)
            self.gdn_pool = self.loaded_model.states = StatePool(parts, num_states, self.device)
            text = "recurrent states next to the pages, no prefix cache: %s"
            logger.info(text, self.gdn_pool)

    def init_attention_backend(self) -> None:
        """Create the attention backend over the pool."""
        if self.token_to_kv_pool is None:
            raise RuntimeError("allocate the pool before the attention backend is made")
        kernels, has_float8 = self.session.kernels(), self.kv_cache_dtype.itemsize == 1
        attends = ("attend_float8_pages" if has_float8 else "attend_few_rows") in kernels
        options = AttentionOptions(
            num_heads=self.num_attention_heads,
            dtype=self.dtype,
            windows=self._windows,
            soft_cap=self._model_class.attention_soft_cap(self.huggingface_config),
            enable_pdl=self.session.pdl_level > 0,
            batch_invariant=self.model_config.batch_invariant,
            decode_level=self.session.pdl_level if attends else None,
            max_rows=self.max_running_requests,
        )
        self.attn_backend = create_attention_backend(
            self.model_config.attention_backend, self.token_to_kv_pool, options
        )

    def init_cuda_graphs(self) -> None:
        """Capture forwards, where that is possible.

        `graph_runner` stays None without CUDA, with `disable_cuda_graph`, for embedding models, for
        models that return hidden states, and for models and attention backends that cannot be
        captured.
        """
        if self.attn_backend is None:
            raise RuntimeError("make the attention backend before forwards are captured")
        if self.samples_on_device:
            self.sample_on_device()
        if self.loaded_model.return_hidden_states is not ReturnHiddenStates.NONE:
            return
        if self.captures_decoding and self.attn_backend.can_capture:
            self.use_graphs(CudaCapture(self.device))
            # memory of eager runs before capture, which has its own stream
            torch.cuda.empty_cache()
        elif self.captures_decoding:
            text = "nothing runs as a CUDA graph: attention by %s cannot be captured here"
            logger.warning(text, self.attn_backend.description)

    def sample_on_device(self) -> None:
        """Sample in one program on the device from now on."""
        decoder, rows = self.loaded_model.frame_decoder, self.max_running_requests
        histories, level = self.num_histories(rows), self.session.pdl_level
        if decoder is None:
            sampler = DeviceSampler(self.vocab_size, self.device, rows, histories, level=level)
            self.token_sampler = BufferedSampler(sampler)
        else:
            self.token_sampler = DeviceFrameSampler(decoder, self.device, rows, histories, level)

    def use_graphs(self, capture: GraphCapture) -> None:
        """Replay forwards from now on: batches up to the largest, contexts up to the size of the
        pool.
        """
        if self.attn_backend is None:
            raise RuntimeError("make the attention backend before forwards are captured")
        self.graph_runner = GraphRunner(
            self.loaded_model,
            self.attn_backend,
            capture,
            GraphLimits(
                self.max_running_requests,
                self.server_config.max_batch_input_tokens,
                min(self.context_len, self.max_total_num_tokens),
            ),
            logits_dtype=self._logits_dtype,
            sampling=self.token_sampler.captured,
            common_ids=self.server_config.common_ids,
        )
        if self._compiles_together:
            self._compile_graphs(self.graph_runner)
        self.graph_runner.capture()

    @property
    def _compiles_together(self) -> bool:
        """Whether `compile_together` is possible: not for frames, whose codes are places in tables,
        nor for ranks, which wait for each other.
        """
        is_alone = self.group.size == 1 and self.frames is None
        return self.device.type == "cuda" and is_alone

    @staticmethod
    def _compile_graphs(graphs: GraphRunner) -> None:
        """Compile the kernels of all shapes if those of the smallest and the largest are new."""
        ends = {graphs.shapes[0], graphs.shapes[-1]}
        if compile_together(partial(graphs.run, ends)):
            compile_together(partial(graphs.run, set(graphs.shapes) - ends))

    def warm_up(self) -> None:
        """Run small and large batches in the padding page, so that kernels are compiled and
        selected.

        Graphs need no warm-up and are not used.
        """
        if not (self.is_generation and self._model_class.uses_kv_pool):
            self.token_sampler.warm_up()
            return
        if self._compiles_together:
            compile_together(self._run_padding)
        self._run_padding()

    def _run_padding(self) -> None:
        longest = min(self.server_config.max_batch_input_tokens, self.context_len)
        most_rows = min(self.max_running_requests, WARM_UP_ROWS)
        for size in sorted({min(size, longest) for size in WARM_UP_SIZES}):
            rows: tuple[ScheduledRow, ...] = (self._padding_row(size),)
            if size <= most_rows:
                rows = (self._padding_row(1),) * size
            with torch.inference_mode():
                outputs = self._execute_padding(*rows)
                self.sample_tokens(outputs, self.token_sampler.prepare(rows))
            self.token_sampler.release("")

    def _padding_row(self, length: int) -> ScheduledRow:
        """Return a prompt of so many tokens in the padding page."""
        return ScheduledRow(
            request_id="",
            token_ids=(0,) * length,
            start=0,
            pages=PADDING_PAGES * -(-length // self.page_size),
            is_extend=True,
            samples=True,
            sampling=SamplingParams(),
            embeds=not self.is_generation,
        )

    def _execute_padding(self, *rows: ScheduledRow) -> ModelOutputs:
        inputs = self._prepare_eagerly(ScheduledBatch(rows, ForwardMode.EXTEND))
        return self.loaded_model.execute(inputs)

    def prepare(
        self,
        batch: ScheduledBatch,
        awaited: FutureTokens = NOTHING_AWAITED,
        sampled: Tensor | None = None,
    ) -> ModelInputs:
        """Return the inputs of a batch's first forward, with attention planned.

        Tokens that are `awaited` are taken from those `sampled` [B] by the previous forward. Run
        the forward before the next `prepare`: a captured forward reads buffers that are filled
        here.
        """
        with self.session.profiler.detail("prepare"):
            graphs = self.graph_runner
            loaded = None if graphs is None else graphs.prepare(batch, awaited, sampled)
            if loaded is not None:
                self.layer_marks = None
                return loaded
            inputs = self._prepare_eagerly(batch)
            if sampled is not None:
                awaited.fill(inputs.forward_batch.input_ids, sampled)
            return inputs

    def _prepare_eagerly(self, batch: ScheduledBatch) -> ModelInputs:
        if self.attn_backend is None:
            raise RuntimeError("initialize the runner before its first forward")
        num_ids = 1 if self.frames is None else self.frames.num_ids
        page_size = self.attn_backend.pool.page_size
        forward_batch = batch_of_rows(batch.rows, batch.mode, page_size, self.device, num_ids)
        is_copied = self.server_config.pipeline_role is PipelineRole.PrefillOnly
        self.layer_marks = LayerMarks() if is_copied and self.device.type == "cuda" else None
        planned = PlannedAttention.create(forward_batch, self.attn_backend, self.layer_marks)
        return self.loaded_model.prepare_initial_token_inputs([batch.rows], planned)

    def prepare_next(self, next_tokens: Tensor, inputs: ModelInputs) -> ModelInputs:
        """Return the inputs of the forward that feeds the tokens [B] sampled after `inputs`."""
        if self.graph_runner is not None and isinstance(inputs, GraphInputs):
            return self.graph_runner.advance(next_tokens, inputs)
        return self.loaded_model.prepare_next_token_inputs(next_tokens, inputs)

    @overload
    def forward(self, batch: ForwardBatch) -> LogitsProcessorOutput: ...

    @overload
    def forward(self, batch: ModelInputs) -> ModelOutputs: ...

    def forward(self, batch: ForwardBatch | ModelInputs) -> LogitsProcessorOutput | ModelOutputs:
        """Run one forward: of a tensor batch by its mode, or of inputs that `prepare` has
        planned.
        """
        if isinstance(batch, ForwardBatch):
            return self._dispatch(batch)
        model = self.loaded_model
        self.forward_pass_id += 1
        with self.session.profiler.detail("forward"):
            if self.graph_runner is not None and isinstance(batch, GraphInputs):
                return self.graph_runner.replay(batch)
            outputs = model.execute(batch)
            dtype = self._logits_dtype
            return outputs if outputs.logits.dtype == dtype else _as_sampled(outputs, dtype)

    def forward_idle(self) -> ModelOutputs:
        """Run a forward of one padding token: this rank takes part in the collectives of all
        layers; returns [0, V] logits.
        """
        self.forward_pass_id += 1
        with torch.inference_mode():
            self._execute_padding(self._padding_row(1))
        nothing = torch.empty(0, self.vocab_size, device=self.device)
        return ModelOutputs(nothing, nothing, (0,))

    def sample_tokens(self, outputs: ModelOutputs, plan: Any) -> Tensor:
        """Return int32 [B] token ids, or [B, K] frames, for the rows of a plan of
        `self.token_sampler`.
        """
        with self.session.profiler.detail("sample"):
            logits, states = outputs.next_token_logits, outputs.hidden_states
            return self.token_sampler.sample(logits, plan, states)

    def step(
        self, inputs: ModelInputs, plan: Any, *, reads_logits: bool = False
    ) -> tuple[ModelOutputs, Tensor]:
        """Run `forward` and `sample_tokens`, in one launch if both were captured: then logits that
        no row samples from may be those of an earlier step, unless the caller `reads_logits`.
        """
        graphs = self.graph_runner
        if graphs is None or not (graphs.samples and isinstance(inputs, GraphInputs)):
            return (outputs := self.forward(inputs)), self.sample_tokens(outputs, plan)
        self.forward_pass_id += 1
        load = partial(self.token_sampler.load, plan)
        with self.session.profiler.detail("forward"):
            outputs = graphs.replay(inputs, load, reads_logits=reads_logits)
            return outputs, graphs.tokens(inputs)

    def release(self, request_id: str) -> None:
        """Free what is kept for a request that has ended; no effect for unknown ids."""
        self.token_sampler.release(request_id)
        if self.model is not None:
            self.model.release(request_id)

    def shutdown(self) -> None:
        """Free model and memory. Idempotent."""
        if self.graph_runner is not None:
            self.graph_runner.free()
        self.graph_runner = self.attn_backend = None
        self.token_to_kv_pool = self.gdn_pool = self.model = None
        self.token_sampler = self.sampler
        self._req_to_token_pool = self._allocator = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


ROOT = "model."


def with_model(
    config: PipelineConfig, model: ModelConfig | None, gpu_id: int | None
) -> PipelineConfig:
    """Return the configuration with another model, or the same model on another GPU."""
    wanted = config.model if model is None else model
    changes = {}
    if gpu_id is not None and not wanted.on_cpu and wanted.device_specs != [f"cuda:{gpu_id}"]:
        changes = {"device_specs": [f"cuda:{gpu_id}"]}
    if wanted is config.model and not changes:
        return config
    changed = wanted.model_dump() | changes
    kept = config.model_dump(exclude_unset=True, exclude={"config_file", "section_name"})
    return type(config)(**kept | {"model": changed})


def with_root(weights: Weights) -> WeightsAdapter | None:
    """Add the prefix that checkpoints of models without a head leave out of tensor names."""
    if any(name.startswith(ROOT) for name in weights.info()):
        return None
    return lambda name: name if name.startswith("lm_head") else ROOT + name


def _as_sampled(outputs: ModelOutputs, dtype: torch.dtype) -> ModelOutputs:
    """Return logits rounded to `sampling.in_dtype`, in the format they are given in."""
    logits, last = (t.to(dtype).float() for t in (outputs.logits, outputs.next_token_logits))
    return replace(outputs, logits=logits, next_token_logits=last)


def batch_of_rows(
    rows: Sequence[ScheduledRow],
    mode: ForwardMode,
    page_size: int,
    device: torch.device,
    num_ids: int = 1,
) -> ForwardBatch:
    """Create a batch in which row b feeds its tokens at the positions from its `start` on.

    `num_ids`: ids of a token, 1 or the K of a frame.
    """
    tokens = [token for row in rows for token in row.token_ids]
    numbers = np.empty((num_ids + 2, len(tokens)), dtype=np.int64)
    numbers[:-2] = tokens if num_ids == 1 else frame_rows(tokens, num_ids).T
    _write_places(rows, page_size, numbers[-2], numbers[-1])
    *ids, positions, slot_mapping = to_device(torch.from_numpy(numbers), device)
    vectors = None if num_ids == 1 else vectors_of(tokens)
    return ForwardBatch(
        mode=mode,
        request_ids=tuple(row.request_id for row in rows),
        query_lens=tuple(len(row.token_ids) for row in rows),
        context_lens=tuple(row.context_len for row in rows),
        pages=tuple(row.pages for row in rows),
        page_size=page_size,
        input_ids=ids[0] if num_ids == 1 else torch.stack(ids, dim=1),
        positions=positions,
        slot_mapping=slot_mapping,
        vectors=None if vectors is None else to_device(torch.tensor(vectors), device),
    )


def _write_places(
    rows: Sequence[ScheduledRow], size: int, positions: np.ndarray, slots: np.ndarray
) -> None:
    """Write the position and the slot of each token, int64 [T]."""
    first = 0
    for row in rows:
        start, pages, end = row.start, row.pages, first + len(row.token_ids)
        if end - first == 1:
            positions[first] = start
            slots[first] = pages[start // size] * size + start % size
        else:
            each = np.arange(start, start + end - first)
            positions[first:end] = each
            slots[first:end] = np.asarray(pages)[each // size] * size + each % size
        first = end
