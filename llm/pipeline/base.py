"""`TextGenerationPipelineInterface`: common part of the two pipelines, which is all but the step.

It implements the engine's `Pipeline`: one model on one device, or one rank of a model on several,
loaded at construction and used from one thread at a time. It makes no scheduling decisions.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from llm.batch import ModelInputs, ModelOutputs, ScheduledBatch, ScheduledRow, StepOutput
from llm.config import KVCacheConfig, PipelineConfig, PipelineRole, SpeculativeConfig
from llm.errors import CapacityError, ConfigError, RequestError
from llm.kv_cache.host_pool import HostPool
from llm.kv_cache.kv_pool import KVPool
from llm.kv_cache.manager import KVCacheManager
from llm.kv_cache.transfer import PageTransfer
from llm.memory.plan import MemoryPlan
from llm.models.base import PipelineModel
from llm.models.hf_config import read_eos_token_ids
from llm.models.identity import weights_identity
from llm.models.pooling import PoolingSpec
from llm.models.weights import WeightsAdapter, WeightsFormat
from llm.parallel.group import Group
from llm.pipeline.ranks import RankLeader
from llm.request import FrameShape, Request, Token, TokenLogprob, as_ids, check_switches
from llm.runner.device_memory import GIB, available_bytes
from llm.runner.device_stream import DeviceStream, create_stream
from llm.runner.graphs.stats import GraphStats
from llm.runner.model_runner import ModelRunner
from llm.sampling.log_probabilities import log_probabilities
from llm.speculative.draft import DraftModel, create_draft_runner
from llm.speculative.metrics import SpeculativeDecodingMetrics
from llm.speculative.verify import SpeculativeDecoding
from llm.structured.bitmask import StructuredOutput
from llm.structured.grammar import TokenSpelling


class TextGenerationPipelineInterface(ABC):
    """Base class of the pipelines, for text and speech tokens alike; see the module."""

    while_waiting: Callable[[Callable[[], bool]], object] | None = None
    """See the engine's `Pipeline`."""

    def __init__(
        self,
        pipeline_config: PipelineConfig,
        pipeline_model: type[PipelineModel[ScheduledRow]] | None = None,
        eos_token_id: int | None = None,
        weight_adapters: Mapping[WeightsFormat, WeightsAdapter] | None = None,
        tokenizer: TokenSpelling | None = None,
        *,
        stream: DeviceStream | None = None,
        group: Group | None = None,
    ) -> None:
        """Load the model.

        `pipeline_model` None: the architecture that the checkpoint names. `eos_token_id` is added
        to those of the checkpoint. `tokenizer` spells the vocabulary; structured output needs it.
        `stream` None: the device's own. `group`: the ranks that share the model, see `ModelRunner`.

        Raises `CheckpointError`, `ConfigError`, `CapacityError`; `ValueError` for structured output
        without a tokenizer; `TypeError` for a model that is an instance, not a class.
        """
        if pipeline_model is not None and not isinstance(pipeline_model, type):
            raise TypeError(f"pipeline_model must be a class, not {pipeline_model!r}")
        self._config = pipeline_config
        self._tokenizer = tokenizer
        is_structured = pipeline_config.sampling.enable_structured_output
        if is_structured and tokenizer is None:
            raise ValueError("enable_structured_output needs the model's tokenizer")
        self.runner = ModelRunner(
            pipeline_config,
            model_type=pipeline_model,
            weight_adapters=weight_adapters,
            group=group,
        )
        self.leader: RankLeader | None = None
        """The other ranks' processes, where this is rank 0 of several."""
        draft = self._load_models()
        self._stream = create_stream(self.runner.device) if stream is None else stream
        cache = pipeline_config.model.kv_cache
        runners = [self.runner] if draft is None else [self.runner, draft.runner]
        self._kv_manager = create_kv_manager(cache, runners, self._stream)
        self.structured = StructuredOutput(
            self.vocab_size, self.runner.device, tokenizer, enabled=is_structured
        )
        self.speculation: SpeculativeDecoding | None = None
        if draft is not None:
            speculative = pipeline_config.speculative or SpeculativeConfig()
            self.speculation = SpeculativeDecoding(speculative, self.runner, draft, self.structured)
        self.prompt_scores = PromptScores(enabled=pipeline_config.enable_echo)
        self.embeddings = Embeddings(self.runner.pooling, pools=pipeline_config.pool_embeddings)
        self.eos_token_ids: set[Token] = set() if eos_token_id is None else {eos_token_id}
        frames = self.frames
        if frames is None:
            self.eos_token_ids |= read_eos_token_ids(pipeline_config.model.model_path)
        else:
            self.eos_token_ids.add(frames.end)

    def _load_models(self) -> DraftModel | None:
        """Load the model, and the draft model if there is one."""
        if self._config.draft_model is None:
            self.runner.initialize()
            return None
        planned = create_draft_runner(self._config, self.max_seq_len)
        self.runner.initialize(planned)
        running = self.runner.server_config  # its batch size is resolved at this point
        draft = create_draft_runner(running, self.max_seq_len, self.memory_plan.num_pages)
        draft.initialize()
        return DraftModel(draft)

    @property
    def pipeline_config(self) -> PipelineConfig:
        """Return the configuration that was passed."""
        return self._config

    @property
    def tokenizer(self) -> TokenSpelling | None:
        """Return the tokenizer that was passed; the core only uses it to spell tokens."""
        return self._tokenizer

    @property
    def kv_manager(self) -> KVCacheManager:
        """Return the manager of the pages that the scheduler claims and releases."""
        return self._kv_manager

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: token ids are [0, vocab_size)."""
        return self.runner.vocab_size

    @property
    def frames(self) -> FrameShape | None:
        """Shape of the frames that the model generates; None: it generates token ids."""
        return self.runner.frames

    @property
    def media_ids(self) -> frozenset[int]:
        """Ids that stand for images and videos, which the model does not see."""
        return self.runner.loaded_model.media_ids

    @property
    def max_seq_len(self) -> int:
        """Maximum number of tokens of one sequence, prompt and generated."""
        return self.runner.context_len

    @property
    def memory_plan(self) -> MemoryPlan:
        """Return the division of the device's memory."""
        plan = self.runner.memory_plan
        assert plan is not None  # `initialize` has set it
        return plan

    @property
    def draft_kv_blocks(self) -> list[KVPool] | None:
        """Return the keys and values of the draft model, one pool per replica; None without one."""
        return None if self.speculation is None else self.speculation.draft.kv_blocks

    def spec_decode_metrics(self) -> SpeculativeDecodingMetrics | None:
        """Return statistics of drafted tokens; None without a draft model."""
        return None if self.speculation is None else self.speculation.metrics()

    def graph_stats(self) -> GraphStats | None:
        """Return the number of graph replays; None where decoding is not captured."""
        graphs = self.runner.graph_runner
        return None if graphs is None else graphs.stats()

    def page_transfer(self) -> PageTransfer | None:
        """Return the transfer of prompts' pages to or from other engines; None for an engine that
        needs none, by its role.

        Raises `ConfigError` for a model whose prompts leave more behind than pages.
        """
        role = self._config.pipeline_role
        if role is PipelineRole.PrefillAndDecode:
            return None
        pool, states = self.runner.token_to_kv_pool, self._kv_manager.available_states
        has_pages = pool is not None and pool.num_layers > 0
        if pool is None or not has_pages or states is not None or self.embeddings.spec is not None:
            raise ConfigError(
                f"pipeline_role={role} needs a model that generates and keeps nothing but KV pages "
                f"of a prompt; {type(self.runner.loaded_model).__name__} does not"
            )
        identity, runner = weights_identity(self._config), self.runner
        return PageTransfer(pool, self._kv_manager, identity, lambda: runner.layer_marks)

    def warmup_graph_capture(self) -> None:
        """Capture the decode forward before the first request. Loading does this where capture is
        possible.

        Raises `RuntimeError` where it cannot be captured.
        """
        graphs = self.runner.graph_runner
        if graphs is None:
            raise RuntimeError(
                "decoding cannot be captured: CUDA graphs need a GPU, an attention backend and a "
                "model that can be captured, no draft model, and disable_cuda_graph off"
            )
        graphs.capture()

    @property
    @abstractmethod
    def overlap_active(self) -> bool:
        """Whether `execute` returns the results of the previous batch."""

    @abstractmethod
    def has_pending_outputs(self) -> bool:
        """Whether the next call, also one with an empty batch, returns results."""

    def is_alive(self) -> bool:
        """Whether further steps can run after a step that raised: never with several ranks."""
        return self.leader is None and self._stream.is_alive()

    def hold(self, *, is_held: bool) -> None:
        """Have a step wait between its layers, or continue. Callable from any thread.

        For steps of a CPU: a GPU's layers are launched long before they run.
        """
        may_run = self.runner.session.may_run
        may_run.clear() if is_held else may_run.set()

    def use_device(self) -> None:
        """Make the model's device the current one of the calling thread: threads start with the
        first GPU.
        """
        self._stream.use_device()

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Start a batch on all ranks; return the results that are due.

        Raises `RanksLostError` when it failed on one of several ranks.
        """
        return self.run(batch) if self.leader is None else self.leader.execute(batch, self.run)

    @abstractmethod
    def run(self, batch: ScheduledBatch) -> StepOutput:
        """Start a batch on this rank; return the results that are due."""

    def release(self, request_id: str) -> None:
        """Free what is kept for a request that has ended; no effect the second time.

        The scheduler owns its pages; everything else that is kept per request is freed here.
        """
        if self.leader is not None:
            self.leader.release(request_id)
        self.runner.release(request_id)
        self.structured.release(request_id)
        self.prompt_scores.release(request_id)
        self.embeddings.release(request_id)

    def admit(self, request: Request) -> None:
        """Raise `RequestError` for a request that this pipeline cannot run. Thread-safe."""
        switches = self._config.sampling
        penalties, min_tokens = switches.enable_penalties, switches.enable_min_tokens
        if not (penalties and min_tokens):
            check_switches(request, penalties=penalties, min_tokens=min_tokens)
        if request.sampling.json_schema:
            self.structured.admit(request)
        if request.sampling.echo:
            self.prompt_scores.admit()
        if request.embeds or self.embeddings.spec is not None:
            self.embeddings.admit(request)
        self.runner.token_sampler.admit(request.sampling)
        model = self.runner.loaded_model
        if request.sampling.top_logprobs is not None and model.no_log_probabilities:
            raise RequestError(model.no_log_probabilities)
        manager = model.lora_manager
        if manager is not None:
            manager.admit(request)
        elif request.lora:
            raise RequestError("adapters need lora.enable_lora")

    def initialize_bitmask(self, batch: list[ScheduledRow]) -> np.ndarray | None:
        """Return int32 [B, V] of ones; None when no request of the batch has a schema."""
        return self.structured.initialize_bitmask(batch)

    def update_for_structured_output(
        self, context: ScheduledRow, bitmask: np.ndarray, index: int
    ) -> None:
        """Set one row of a bitmask to the tokens that the request may sample. Raises
        `ValueError`.
        """
        self.structured.update_for_structured_output(context, bitmask, index)

    def shutdown(self) -> None:
        """Free model and memory, and end the other ranks. Idempotent."""
        if self.leader is not None:
            self.leader.end()
        self.runner.shutdown()
        if self.leader is not None:
            self.leader.close()
        if self.speculation is not None:
            self.speculation.draft.shutdown()


class Embeddings:
    """Collects embeddings. `spec` None: the model generates. `pools`: one vector per text, else one
    per token.
    """

    def __init__(self, spec: PoolingSpec | None, *, pools: bool) -> None:
        self.spec = spec
        self._pools = pools
        self._chunks: dict[str, list[Tensor]] = {}  # tensors [T, H]

    def admit(self, request: Request) -> None:
        """Raise `RequestError` for a request that this kind of model cannot run. Thread-safe."""
        if request.embeds and self.spec is None:
            raise RequestError("this model generates; it does not embed")
        if not request.embeds and self.spec is not None:
            raise RequestError("this model embeds; it does not generate")

    def release(self, request_id: str) -> None:
        """Free what is kept for a request; no effect for unknown ids."""
        self._chunks.pop(request_id, None)

    def take(
        self, rows: Sequence[ScheduledRow], inputs: ModelInputs, outputs: ModelOutputs
    ) -> dict[str, tuple[bytes, ...]]:
        """Return the embeddings of every row whose text has been fed completely."""
        if self.spec is None or outputs.hidden_states is None:
            return {}
        found = {}
        offsets = inputs.forward_batch.row_offsets
        for index, row in enumerate(rows):
            hidden = outputs.hidden_states[offsets[index] : offsets[index + 1]]
            if row.start == 0:
                self._chunks[row.request_id] = []
            chunks = self._chunks[row.request_id]
            chunks.append(hidden)
            if row.samples:
                found[row.request_id] = self._finish(self.spec, torch.cat(chunks))
                self.release(row.request_id)
        return found

    def _finish(self, spec: PoolingSpec, hidden: Tensor) -> tuple[bytes, ...]:
        vectors = spec.pool(hidden)[None] if self._pools else spec.finish(hidden)
        return tuple(vector.tobytes() for vector in vectors.cpu().numpy().astype("<f4"))


logger = logging.getLogger(__name__)

HOST_SHARE = 0.8  # largest share of the host's free memory


def create_kv_manager(
    cache: KVCacheConfig, runners: Sequence[ModelRunner], stream: DeviceStream
) -> KVCacheManager:
    """Create the manager for an initialized runner and one that shares its page ids (a draft
    model's).

    Copies to and from the host run on `stream`.
    """
    plan = runners[0].memory_plan
    assert plan is not None  # `initialize` has set it
    host = None
    if cache.enable_kvcache_swapping_to_host:
        host = _host_pool(cache.host_kvcache_swap_space_gb, plan.page_bytes, runners, stream)
    states = runners[0].gdn_pool
    return KVCacheManager(
        plan.num_pages,
        cache.kv_cache_page_size,
        cache.enable_prefix_caching,
        host=host,
        num_states=0 if states is None else states.num_states,
    )


def _host_pool(
    space_gb: float, page_bytes: int, runners: Sequence[ModelRunner], stream: DeviceStream
) -> HostPool:
    pools = [runner.token_to_kv_pool for runner in runners if runner.token_to_kv_pool is not None]
    wanted = int(space_gb * GIB)
    most = int(available_bytes(torch.device("cpu")) * HOST_SHARE)
    if wanted < page_bytes:
        raise ConfigError(
            f"model.kv_cache.host_kvcache_swap_space_gb={space_gb} holds no page of "
            f"{page_bytes} bytes"
        )
    if most < page_bytes:
        raise CapacityError(f"the host has no memory for a KV page of {page_bytes} bytes")
    if wanted > most:
        logger.warning(
            "host_kvcache_swap_space_gb is cut from %.1f to %.1f GiB, %.0f %% of the free memory",
            space_gb,
            most / GIB,
            100 * HOST_SHARE,
        )
    return HostPool(pools, min(wanted, most) // page_bytes, stream.launch)


# rows of logits normalised at once: a prompt has many rows and the vocabulary is large
ROW_BLOCK = 256


class PromptScores:
    """Computes log-probabilities of prompts. Keeps one row of logits per partly fed prompt."""

    def __init__(self, *, enabled: bool) -> None:
        self.is_enabled = enabled
        self._last: dict[str, Tensor] = {}  # [1, V]

    def admit(self) -> None:
        """Raise `RequestError` for `echo` while `enable_echo` is off. Thread-safe."""
        if not self.is_enabled:
            raise RequestError("echo needs enable_echo")

    def release(self, request_id: str) -> None:
        """Free what is kept for a request; no effect for unknown ids."""
        self._last.pop(request_id, None)

    def score(
        self, rows: Sequence[ScheduledRow], outputs: ModelOutputs
    ) -> dict[str, tuple[TokenLogprob, ...]]:
        """Return the entries of every echoing row of a forward, one for each token fed."""
        found = {}
        for index, row in enumerate(rows):
            if row.echoes:
                start, end = outputs.logit_offsets[index : index + 2]
                found[row.request_id] = self._score(row, outputs.logits[start:end])
        return found

    def _score(self, row: ScheduledRow, logits: Tensor) -> tuple[TokenLogprob, ...]:
        fed = as_ids(row.token_ids)
        tokens = torch.tensor(fed, device=logits.device)
        entries: list[TokenLogprob] = []
        if row.start == 0:
            entries.append(TokenLogprob(fed[0], None))
        else:
            entries += _entries(self._last[row.request_id], tokens[:1], row)
        entries += _entries(logits[:-1], tokens[1:], row)
        if row.samples:
            self.release(row.request_id)
        else:
            self._last[row.request_id] = logits[-1:].clone()
        return tuple(entries)


def _entries(logits: Tensor, tokens: Tensor, row: ScheduledRow) -> list[TokenLogprob]:
    """Return the log-probabilities of tokens [n] under logits [n, V]."""
    top_n = row.sampling.top_logprobs or 0
    entries = []
    for block, chosen in zip(logits.split(ROW_BLOCK), tokens.split(ROW_BLOCK), strict=True):
        found = log_probabilities(block, chosen, top_n)
        pairs = zip(found.token_log_probabilities, found.top_log_probabilities, strict=True)
        entries += [
            TokenLogprob(token, logprob, tuple((best or {}).items()))
            for token, (logprob, best) in zip(chosen.tolist(), pairs, strict=True)
        ]
    return entries
