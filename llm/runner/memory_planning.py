"""`MemoryPlanning`: division of a device's memory before anything is allocated.

pages(rows) = (available × utilization − weights − scratch of a batch of `rows`) / page
rows        = max_batch_size, or the most, up to MAX_ROWS, for which pages(rows) hold
              EXPECTED_TOKENS of each
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from llm.attention.base import AttentionLoad
from llm.attention.registry import attention_bytes
from llm.batch import ScheduledRow
from llm.config import ModelConfig, PipelineConfig
from llm.kv_cache.state_pool import StatePart, state_bytes
from llm.kv_cache.state_slots import FIRST_STATE
from llm.lora.manager import reserved_bytes
from llm.memory.plan import MemoryPlan, PageLayout, infer_batch_size
from llm.models.base import PipelineModel
from llm.models.hf_config import HuggingFaceConfig
from llm.parallel.group import Group
from llm.runner.device_memory import usable_bytes
from llm.runner.graphs.shapes import decode_shapes, estimate_graph_bytes, prompt_shapes
from llm.sampling.device.sampler import MAX_VOCABULARY, sampler_bytes

MAX_CPU_KV_BYTES = 512 * 2**20  # applies unless the configuration sets the number of pages
MAX_ROWS = 1024
"""Applies unless the configuration sets another number. With 200,000 tokens in the vocabulary,
sampling takes half a megabyte per row, and logits take more, whether or not so many requests
arrive.
"""

EXPECTED_TOKENS = 1024
"""Expected length of one request, prompt and generated: half a minute of speech, at 25 tokens a
second and more.

When sequences are longer and pages run out, the youngest wait or are preempted.
"""


class MemoryPlanning:
    """Base class of `ModelRunner`, which sets the attributes declared here."""

    device: torch.device
    server_config: PipelineConfig
    model_config: ModelConfig
    huggingface_config: HuggingFaceConfig
    num_hidden_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_len: int
    max_running_requests: int
    max_total_num_tokens: int
    memory_plan: MemoryPlan | None
    is_draft: bool
    group: Group
    _model_class: type[PipelineModel[ScheduledRow]]

    @property
    def is_generation(self) -> bool:
        """Whether the model generates tokens."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """Number format of activations."""
        raise NotImplementedError

    @property
    def kv_cache_dtype(self) -> torch.dtype:
        """Number format of keys and values."""
        raise NotImplementedError

    @property
    def page_layout(self) -> PageLayout:
        """Contents of a page of this model."""
        cache = self.model_config.kv_cache
        return PageLayout(
            num_layers=self._model_class.num_kv_layers(self.huggingface_config),
            page_size=cache.kv_cache_page_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            bytes_per_value=self.kv_cache_dtype.itemsize,
        )

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights as they will be stored, and of the adapter slots."""
        own = self._model_class.estimate_weights_size(self.server_config)
        return own + reserved_bytes(self.server_config.lora)

    def activation_bytes(self, rows: int) -> int:
        """Return the bytes of scratch of the largest step with so many rows."""
        own = self._model_class.estimate_activation_memory(
            self.server_config.with_batch_size(rows), self.huggingface_config
        )
        return own + self.attention_bytes(rows)

    def attention_bytes(self, rows: int) -> int:
        """Return the part of it that the attention backend takes."""
        if not self._model_class.uses_kv_pool:
            return 0
        layout = self.page_layout
        load = AttentionLoad(
            num_rows=rows,
            num_tokens=self.server_config.max_batch_input_tokens,
            context_len=self.context_len,
            expected_len=min(EXPECTED_TOKENS, self.context_len),
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            num_groups=self.num_attention_heads // self.num_kv_heads,
            head_dim=layout.head_dim,
            itemsize=self.dtype.itemsize,
            kv_itemsize=layout.bytes_per_value,
            windows=self._model_class.attention_windows(self.huggingface_config),
        )
        return attention_bytes(self.model_config.attention_backend, self.device, load)

    def graph_bytes(self, rows: int) -> int:
        """Return the bytes of captured forwards of up to so many rows; 0 when nothing is
        captured.
        """
        if not self.captures_decoding:
            return 0
        token_bytes = self._model_class.estimate_token_memory(
            self.server_config, self.huggingface_config
        )
        shapes = decode_shapes(rows)
        if not self.recurrent_state:
            shapes += prompt_shapes(rows, self.server_config.max_batch_input_tokens)
        return estimate_graph_bytes(
            shapes,
            rows,
            logit_bytes=self.vocab_size * (4 + self.dtype.itemsize),
            token_bytes=token_bytes,
            num_layers=self.num_hidden_layers,
        )

    def sampling_bytes(self, rows: int) -> int:
        """Return the bytes of a device sampler's state for so many requests."""
        if not self.samples_on_device:
            return 0
        return sampler_bytes(self.vocab_size, rows, self.num_histories(rows))

    def num_histories(self, rows: int) -> int:
        """Return how many requests with penalties a device sampler keeps the tokens of."""
        return rows if self.server_config.sampling.enable_penalties else 1

    @property
    def recurrent_state(self) -> tuple[StatePart, ...]:
        """Parts of one sequence's recurrent state; () for models without one."""
        return self._model_class.recurrent_state(self.server_config, self.huggingface_config)

    def num_states(self, rows: int) -> int:
        """Return the size of the pool of states for batches of so many rows; 0 without states."""
        if not self.recurrent_state:
            return 0
        return FIRST_STATE + max(rows, self.server_config.max_queue_size_tg or rows)

    def plan_memory(self, draft: MemoryPlanning | None = None) -> MemoryPlan:
        """Divide the device's memory; includes a draft model's weights and pages.

        If `max_batch_size` is not set, it becomes the largest that fits. The KV cache gets at most
        what that many sequences of full length need (`MAX_ROWS` if it was not set), and on the CPU
        no more than `MAX_CPU_KV_BYTES`. Raises `CapacityError` with the numbers when memory is
        insufficient.
        """
        rows = self.server_config.max_batch_size
        most = min(MAX_ROWS, self.server_config.max_batch_input_tokens) if rows is None else rows
        plan_for = self._planner([self] if draft is None else [self, draft], most)
        if rows is None:
            rows = infer_batch_size(plan_for, min(EXPECTED_TOKENS, self.context_len), most)
            self.server_config = self.server_config.with_batch_size(rows)
        self.memory_plan = plan_for(rows)
        self.max_running_requests = rows
        self.max_total_num_tokens = self.memory_plan.max_tokens
        return self.memory_plan

    def _planner(
        self, models: Sequence[MemoryPlanning], most_rows: int
    ) -> Callable[[int], MemoryPlan]:
        """Return a function that plans for so many rows; parts that do not depend on it are
        computed once.
        """
        cache, layout = self.model_config.kv_cache, self.page_layout
        for draft in models[1:]:
            layout = replace(layout, draft_bytes=draft.page_layout.page_bytes)
        available = self._available_bytes()
        weights_bytes = sum(model.weights_bytes for model in models)
        max_pages = self._useful_pages(layout, most_rows)

        def plan_for(rows: int) -> MemoryPlan:
            return MemoryPlan.create(
                layout,
                available_bytes=available,
                weights_bytes=weights_bytes,
                activation_bytes=sum(model.activation_bytes(rows) for model in models),
                graph_bytes=self.graph_bytes(rows) + self.sampling_bytes(rows),
                state_bytes=self.num_states(rows) * state_bytes(self.recurrent_state),
                num_pages=cache.num_pages,
                max_pages=max_pages,
            )

        return plan_for

    def _available_bytes(self) -> int:
        """Return the bytes that each rank may use, the same number on all ranks."""
        own = usable_bytes(self.device, self.model_config.kv_cache.device_memory_utilization)
        if self.device.type == "cpu":
            own //= self.group.size  # all ranks are on this machine
        return self.group.minimum(own)

    def _useful_pages(self, layout: PageLayout, rows: int) -> int:
        pages_each = -(-self.context_len // layout.page_size)
        useful = 1 + rows * pages_each
        if self.device.type != "cpu":
            return useful
        return min(useful, max(MAX_CPU_KV_BYTES // layout.page_bytes, 1 + pages_each))

    @property
    def captures_decoding(self) -> bool:
        """Whether decode forwards are replayed, if the attention backend supports it."""
        can_capture = self._model_class.can_capture and not self.model_config.disable_cuda_graph
        return can_capture and self._decodes_on_gpu

    @property
    def samples_on_device(self) -> bool:
        """Whether one program on the device samples the tokens."""
        return self._decodes_on_gpu and self.vocab_size <= MAX_VOCABULARY

    @property
    def _decodes_on_gpu(self) -> bool:
        """Whether this runner decodes token by token on a GPU.

        Drafting and verifying do not: they use the logits of several forwards at once, and graphs
        write all logits to one place.
        """
        is_speculative = self.is_draft or self.server_config.draft_model is not None
        return self.device.type == "cuda" and self.is_generation and not is_speculative
