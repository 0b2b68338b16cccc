"""Train the language model: text bytes and codes in, codes out; a little letters-to-phonemes too.

    python -m training.language_model --corpus runs/corpus.txt --codes runs/codes --until 1400 --out runs

A document is a voice token and one or more turns of that voice, each
`text <|start_of_speech|> codes <|end_of_speech|>`. With `<|voice_any|>` in front the voice must be
taken from the first turn, which teaches to follow a clip. The loss is on codes and ends only.
New files runs/codes*.npz are picked up while training goes on.
"""

from __future__ import annotations

import argparse
import math
import queue
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from decoder.embedded_modules import CodecConfig, FiniteScalarQuantizer
from training.distributed import Clock, Group
from training.vocabulary import (
    ANY_VOICE,
    END_OF_SPEECH,
    END_OF_TEXT,
    FIRST_CODE,
    FIRST_VOICE,
    PAD,
    PHONEMES,
    START_OF_SPEECH,
)

BUCKETS = (96, 128, 160, 192, 256, 320, 448, 640)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Llama sizes."""

    codebook_size: int
    hidden_size: int = 512
    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int = 4
    intermediate_size: int = 1536
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def vocab_size(self) -> int:
        return FIRST_CODE + self.codebook_size


class DecoderLayer(nn.Module):
    """One Llama layer on whole sequences, causal."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        dim, kv = config.hidden_size, config.num_kv_heads * config.head_dim
        self.input_layernorm = nn.RMSNorm(dim, eps=config.norm_eps)
        self.qkv_proj = nn.Linear(dim, dim + 2 * kv, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(dim, eps=config.norm_eps)
        self.gate_up_proj = nn.Linear(dim, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, D]; cos, sin [T, head_dim / 2]."""
        c = self.config
        batch, length, dim = x.shape
        qkv = self.qkv_proj(self.input_layernorm(x))
        qkv = qkv.view(batch, length, c.num_heads + 2 * c.num_kv_heads, c.head_dim).transpose(1, 2)
        q, k, v = qkv.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), dim=1)
        q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        groups = c.num_heads // c.num_kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).reshape(batch, length, dim))
        gate, up = self.gate_up_proj(self.post_attention_layernorm(x)).chunk(2, -1)
        return x + self.down_proj(F.silu(gate) * up)

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class LanguageModel(nn.Module):
    """Llama with a tied head; a code's embedding is its own row plus one row per FSQ level."""

    def __init__(self, config: ModelConfig, levels: tuple[int, ...]) -> None:
        super().__init__()
        self.config = config
        dim = config.hidden_size
        self.embedding = nn.Embedding(config.vocab_size, dim)
        self.level_embedding = nn.Embedding(sum(levels), dim)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(dim, eps=config.norm_eps)
        quantizer = FiniteScalarQuantizer(levels)
        codes = torch.arange(config.codebook_size)
        index = (codes[:, None] // quantizer.strides) % quantizer.levels
        starts = torch.tensor([sum(levels[:i]) for i in range(len(levels))])
        self.register_buffer("level_index", index + starts, persistent=False)
        steps = torch.arange(0, config.head_dim, 2) / config.head_dim
        angles = torch.arange(max(BUCKETS))[:, None] * config.rope_theta**-steps
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        small = 0.02 / math.sqrt(2 * len(self.layers))
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                branch = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=small if branch else 0.02)

    def table(self) -> Tensor:
        """The embedding that is used, and shipped: [V, D]."""
        levels = self.level_embedding(self.level_index).sum(1)
        return self.embedding.weight + F.pad(levels, (0, 0, FIRST_CODE, 0))

    def loss(self, ids: Tensor, chosen: Tensor, targets: Tensor) -> Tensor:
        """ids [B, T]; mean cross-entropy of `targets` at the flat positions `chosen`."""
        table = self.table()
        x = F.embedding(ids, table)
        if torch.is_autocast_enabled(x.device.type):
            x = x.bfloat16()
        length = ids.shape[1]
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        hidden = self.norm(x).reshape(-1, x.shape[-1])[chosen]
        return F.cross_entropy(F.linear(hidden, table.to(hidden.dtype)).float(), targets)


def checkpoint(model: LanguageModel) -> dict[str, Tensor]:
    """Weights under the names of Hugging Face's Llama, float32."""
    c = model.config
    kv = c.num_kv_heads * c.head_dim
    state = {"model.embed_tokens.weight": model.table(), "model.norm.weight": model.norm.weight}
    for i, layer in enumerate(model.layers):
        prefix = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"{prefix}{name}.weight"] = getattr(layer, name).weight
        split = layer.qkv_proj.weight.split((c.hidden_size, kv, kv))
        for name, weight in zip("qkv", split, strict=True):
            state[f"{prefix}self_attn.{name}_proj.weight"] = weight
        state[f"{prefix}self_attn.o_proj.weight"] = layer.o_proj.weight
        gate, up = layer.gate_up_proj.weight.chunk(2)
        state[f"{prefix}mlp.gate_proj.weight"], state[f"{prefix}mlp.up_proj.weight"] = gate, up
        state[f"{prefix}mlp.down_proj.weight"] = layer.down_proj.weight
    return {name: value.detach().float().cpu().contiguous() for name, value in state.items()}


def quantise(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Matrices to int8 with one scale per row (compressed-tensors "int-quantized"); rest as is."""
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        if value.dim() == 2:
            scale = (value.abs().amax(1, keepdim=True) / 127).clamp_min(1e-12)
            out[name] = (value / scale).round().clamp(-127, 127).to(torch.int8)
            out[f"{name}_scale"] = scale
        else:
            out[name] = value
    return out


def flat_index(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Indices of ranges [start, start + length), one range after another."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


def restore(model: LanguageModel, state: dict[str, Tensor]) -> None:
    """Load what `checkpoint` or `quantise` gave; the level embeddings start again from zero."""
    full = {
        name: value.float() * state[f"{name}_scale"] if f"{name}_scale" in state else value.float()
        for name, value in state.items()
        if not name.endswith("_scale")
    }
    with torch.no_grad():
        model.level_embedding.weight.zero_()
        model.embedding.weight.copy_(full["model.embed_tokens.weight"])
        model.norm.weight.copy_(full["model.norm.weight"])
        for i, layer in enumerate(model.layers):
            get = {k.removeprefix(f"model.layers.{i}."): v for k, v in full.items()}.__getitem__
            qkv = [get(f"self_attn.{name}_proj.weight") for name in "qkv"]
            layer.qkv_proj.weight.copy_(torch.cat(qkv))
            layer.o_proj.weight.copy_(get("self_attn.o_proj.weight"))
            gate_up = [get(f"mlp.{name}_proj.weight") for name in ("gate", "up")]
            layer.gate_up_proj.weight.copy_(torch.cat(gate_up))
            layer.down_proj.weight.copy_(get("mlp.down_proj.weight"))
            for name in ("input_layernorm", "post_attention_layernorm"):
                getattr(layer, name).weight.copy_(get(f"{name}.weight"))


class Speech:
    """Tokenised clips as one flat array of turns."""

    def __init__(self, path: Path, lines: list[str], held_out: int) -> None:
        with np.load(path) as data:
            codes, clips, phones = data["codes"], data["clips"], data["phones"]
        encoded = [line.encode("ascii", "ignore") for line in lines]
        line_len = np.array([len(line) for line in encoded])
        line_start = np.cumsum(line_len) - line_len
        self.text = np.frombuffer(b"".join(encoded), np.uint8)
        self.text_start, self.text_len = line_start[clips[:, 2]], line_len[clips[:, 2]]
        self.code_len, self.voice = clips[:, 1], clips[:, 3]
        self.turn_len = self.text_len + self.code_len + 2
        self.start = np.cumsum(self.turn_len) - self.turn_len
        self.turns = np.empty(int(self.turn_len.sum()), np.int16)
        spoken = self.start + self.text_len
        self.turns[flat_index(self.start, self.text_len)] = self.text[
            flat_index(self.text_start, self.text_len)
        ]
        self.turns[spoken] = START_OF_SPEECH
        self.turns[flat_index(spoken + 1, self.code_len)] = FIRST_CODE + codes[
            flat_index(clips[:, 0], self.code_len)
        ].astype(np.int16)
        self.turns[spoken + 1 + self.code_len] = END_OF_SPEECH
        self.phones = phones
        breaks = np.flatnonzero(phones == ord("\n"))
        self.phone_start = np.concatenate([[0], breaks + 1])
        self.phone_len = np.concatenate([breaks, [len(phones)]]) - self.phone_start
        order = np.random.default_rng(0).permutation(len(clips))
        self.held_out, self.train = order[:held_out], order[held_out:]


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents as arrays: first token, span [at, at + count) of `clips`, whether the first turn
    goes without its text, and the length in tokens."""

    clips: np.ndarray
    first: np.ndarray
    at: np.ndarray
    count: np.ndarray
    textless: np.ndarray
    length: np.ndarray

    def tokens(self, speech: Speech, i: int) -> np.ndarray:
        """Document i, int16."""
        clips = self.clips[self.at[i] : self.at[i] + self.count[i]]
        first = np.array([self.first[i]], np.int16)
        if self.first[i] == PHONEMES:
            return np.concatenate([first, _phoneme_turn(speech, clips[0])])
        skip = speech.text_len[clips[0]] if self.textless[i] else 0
        starts = speech.start[clips]
        turns = [
            speech.turns[a + (skip if k == 0 else 0) : a + n]
            for k, (a, n) in enumerate(zip(starts, speech.turn_len[clips], strict=True))
        ]
        return np.concatenate([first, *turns])


def _phoneme_turn(speech: Speech, clip: int) -> np.ndarray:
    a, b = speech.text_start[clip], speech.phone_start[clip]
    text = speech.text[a : a + speech.text_len[clip]]
    phones = speech.phones[b : b + speech.phone_len[clip]]
    return np.concatenate([text, [END_OF_TEXT], phones, [END_OF_TEXT]]).astype(np.int16)


def single_turns(speech: Speech, clips: np.ndarray) -> Documents:
    """Every clip as a document of its own."""
    count = np.ones(len(clips), np.int64)
    first, length = FIRST_VOICE + speech.voice[clips], 1 + speech.turn_len[clips]
    return Documents(clips, first, np.arange(len(clips)), count, count < 1, length)


def phoneme_documents(speech: Speech, clips: np.ndarray) -> Documents:
    count = np.ones(len(clips), np.int64)
    length = speech.text_len[clips] + speech.phone_len[clips] + 3
    first = np.full(len(clips), PHONEMES)
    return Documents(clips, first, np.arange(len(clips)), count, count < 1, length)


def multi_turns(speech: Speech, clips: np.ndarray, rng: np.random.Generator) -> Documents:
    """Clips of one voice as documents of one to four turns; too long ones lose their last turns."""
    count = rng.choice((1, 2, 3, 4), size=len(clips), p=(0.62, 0.2, 0.1, 0.08))
    at = np.cumsum(count) - count
    count, at = count[at + count <= len(clips)], at[at + count <= len(clips)]
    total = np.concatenate([[0], np.cumsum(speech.turn_len[clips])])
    for _ in range(3):
        count = count - ((total[at + count] - total[at] >= BUCKETS[-1]) & (count > 1))
    chances = rng.random((2, len(count)))
    follow = (count > 1) & (chances[0] < 0.4)
    textless = follow & (chances[1] < 0.15)
    first = np.where(follow, ANY_VOICE, FIRST_VOICE + speech.voice[clips[0]])
    length = 1 + total[at + count] - total[at] - textless * speech.text_len[clips[at]]
    return Documents(clips, first, at, count, textless, length)


def compose(speech: Speech, rng: np.random.Generator, phoneme_share: float) -> list[Documents]:
    """One pass over the training clips."""
    parts = []
    for voice in np.unique(speech.voice):
        mine = speech.train[speech.voice[speech.train] == voice]
        parts.append(multi_turns(speech, rng.permutation(mine), rng))
    some = int(sum(len(p.first) for p in parts) * phoneme_share)
    parts.append(phoneme_documents(speech, rng.permutation(speech.train)[:some]))
    return parts


def target_mask(tokens: np.ndarray) -> np.ndarray:
    """True where a token is to be predicted: codes and ends, or everything after a phoneme text."""
    if tokens[0] == PHONEMES:
        return np.arange(len(tokens)) > np.argmax(tokens == END_OF_TEXT)
    return (tokens >= FIRST_CODE) | (tokens == END_OF_SPEECH)


@dataclass(frozen=True, slots=True)
class Batch:
    """ids [B, T] and what to predict: flat positions and their targets."""

    ids: Tensor
    chosen: Tensor
    targets: Tensor


def assemble(rows: list[np.ndarray], length: int, size: int) -> Batch:
    """Pad documents to one length; missing rows stay padding."""
    ids = np.full((size, length + 1), PAD, np.int64)
    mask = np.zeros((size, length + 1), bool)
    for row, tokens in enumerate(rows):
        tokens = tokens[: length + 1]
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = target_mask(tokens)
    chosen = np.flatnonzero(mask[:, 1:])
    targets = ids[:, 1:].reshape(-1)[chosen]
    inputs = np.ascontiguousarray(ids[:, :-1])
    return Batch(torch.from_numpy(inputs), torch.from_numpy(chosen), torch.from_numpy(targets))


Plan = tuple[int, list[tuple[int, int]]]  # bucket length, (part, document) of each row


def bucketed(parts: list[Documents], tokens: int, rng: np.random.Generator) -> list[Plan]:
    """Full batches of `tokens` tokens, each of one bucket's length, in random order."""
    part = np.concatenate([np.full(len(p.first), i) for i, p in enumerate(parts)])
    index = np.concatenate([np.arange(len(p.first)) for p in parts])
    bucket = np.searchsorted(BUCKETS, np.concatenate([p.length for p in parts]) - 1)
    plans: list[Plan] = []
    for number, length in enumerate(BUCKETS):
        members = rng.permutation(np.flatnonzero(bucket == number))
        rows = max(1, tokens // length)
        if 0 < len(members) < rows:
            members = rng.choice(members, rows)
        for i in range(0, len(members) - rows + 1, rows):
            chosen = members[i : i + rows]
            plans.append((length, list(zip(part[chosen], index[chosen], strict=True))))
    return [plans[i] for i in rng.permutation(len(plans))]


class Loader:
    """Assembles this rank's share of every batch one step ahead, on a thread."""

    def __init__(self, args: argparse.Namespace, group: Group, lines: list[str]) -> None:
        self.args, self.group, self.lines = args, group, lines
        self.speech: Speech | None = None
        self.source: Path | None = None
        self.epoch = 0
        self._queue: queue.Queue[Batch | None] = queue.Queue(8)
        self._stop = threading.Event()

    def newest(self) -> Path | None:
        files = sorted(self.args.codes.parent.glob(f"{self.args.codes.name}*.npz"))
        ready = [f for f in files if ".tmp" not in f.name]
        return ready[-1] if ready else None

    def load(self, path: Path) -> None:
        self.speech, self.source = Speech(path, self.lines, self.args.held_out), path

    def start_epoch(self) -> None:
        self._stop = threading.Event()
        self._queue = queue.Queue(8)
        thread = threading.Thread(target=self._fill, args=(self._queue, self._stop), daemon=True)
        thread.start()
        self.epoch += 1

    def stop_epoch(self) -> None:
        self._stop.set()

    def _fill(self, out: queue.Queue, stop: threading.Event) -> None:
        speech, size, rank = self.speech, self.group.size, self.group.rank
        rng = np.random.default_rng((self.args.seed, self.epoch))
        parts = compose(speech, rng, self.args.phoneme_share)
        for bucket, members in bucketed(parts, self.args.tokens * size, rng):
            rows = max(1, self.args.tokens // bucket)
            mine = members[rank * rows : (rank + 1) * rows]
            batch = assemble([parts[p].tokens(speech, i) for p, i in mine], bucket, rows)
            if torch.cuda.is_available():
                batch = Batch(*(getattr(batch, f).pin_memory() for f in ("ids", "chosen", "targets")))
            while not stop.is_set():
                try:
                    out.put(batch, timeout=0.2)
                    break
                except queue.Full:
                    continue
            if stop.is_set():
                return
        out.put(None)

    def batches(self) -> Iterator[Batch]:
        while (batch := self._queue.get()) is not None:
            yield batch


class Training:
    """The loop and what it needs."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.clock, self.group = args, Clock(), Group()
        torch.manual_seed(args.seed)
        torch.backends.cuda.matmul.allow_tf32 = True
        levels = CodecConfig().levels
        self.config = ModelConfig(math.prod(levels), num_layers=args.layers, hidden_size=args.dim,
                                  intermediate_size=3 * args.dim)  # fmt: skip
        self.model = LanguageModel(self.config, levels).to(self.group.device)
        if args.init:
            restore(self.model, load_file(args.init))
        self.group.broadcast(self.model.state_dict().values())
        self.parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in self.parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimiser = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.96),
                                           fused=self.group.is_cuda)  # fmt: skip
        self.noise = torch.Generator(self.group.device).manual_seed(args.seed + self.group.rank)
        count = sum(p.numel() for p in self.parameters)
        self.log(f"language model: {count / 1e6:.1f} M parameters, {asdict(self.config)}")
        if args.compile:
            torch._dynamo.config.recompile_limit = 64
            for layer in self.model.layers:
                layer.compile(dynamic=False)
            self.warm_up()

    def log(self, *parts: object) -> None:
        if self.group.is_first:
            self.clock.log(*parts)

    def warm_up(self) -> None:
        """Compile every bucket before there is anything to learn."""
        for length in BUCKETS:
            rows = max(1, self.args.tokens // length)
            ids = torch.randint(0, self.config.vocab_size, (rows, length), device=self.group.device)
            chosen = torch.arange(0, rows * length, 2, device=self.group.device)
            self.forward(ids, chosen, ids.reshape(-1)[chosen]).backward()
            self.optimiser.zero_grad(set_to_none=True)
        self.log("compiled")

    def forward(self, ids: Tensor, chosen: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self.group.is_cuda):
            return self.model.loss(ids, chosen, targets)

    def corrupt(self, ids: Tensor) -> Tensor:
        """A few input codes at random, so that the model recovers from its own slips."""
        shape, device = ids.shape, ids.device
        hit = torch.rand(shape, device=device, generator=self.noise) < self.args.noise
        other = torch.randint(FIRST_CODE, self.config.vocab_size, shape, device=device,
                              generator=self.noise)  # fmt: skip
        return torch.where(hit & (ids >= FIRST_CODE), other, ids)

    def step(self, batch: Batch, lr: float) -> Tensor:
        device = self.group.device
        ids, chosen, targets = (t.to(device, non_blocking=True)
                                for t in (batch.ids, batch.chosen, batch.targets))  # fmt: skip
        for setting in self.optimiser.param_groups:
            setting["lr"] = lr
        loss = self.forward(self.corrupt(ids), chosen, targets)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self.group.average_gradients(self.parameters)
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimiser.step()
        return loss.detach()

    @torch.no_grad()
    def validate(self, speech: Speech) -> float:
        """Mean loss per code of single turns that are not trained on."""
        documents = single_turns(speech, speech.held_out)
        total = count = 0.0
        for bucket, members in bucketed([documents], self.args.tokens, np.random.default_rng(0)):
            rows = [documents.tokens(speech, i) for _, i in members]
            batch = assemble(rows, bucket, max(1, self.args.tokens // bucket))
            device = self.group.device
            loss = self.forward(batch.ids.to(device), batch.chosen.to(device),
                                batch.targets.to(device))  # fmt: skip
            total, count = total + float(loss) * len(batch.targets), count + len(batch.targets)
        return total / max(count, 1)

    def save(self) -> None:
        if self.group.is_first:
            save_file(quantise(checkpoint(self.model)), self.args.out / "lm.tmp")
            (self.args.out / "lm.tmp").rename(self.args.out / "lm.safetensors")


def train(args: argparse.Namespace) -> None:
    training = Training(args)
    clock, group = training.clock, training.group
    loader = Loader(args, group, args.corpus.read_text().splitlines())
    while (path := loader.newest()) is None:
        time.sleep(0.5)
    time.sleep(1.0)
    loader.load(path)
    training.log(f"{path}: {len(loader.speech.train)} clips, {len(loader.speech.turns)} tokens")
    began = last = saved = group.agree(clock.now())
    step, seen, share, running = 0, 0, 0.0, 0.0
    while share < 1:
        loader.start_epoch()
        for batch in loader.batches():
            if step % 20 == 0:
                share = group.agree((clock.now() - began) / (args.until - began))
                if share >= 1:
                    break
            lr = args.lr * min(1.0, (step + 1) / 300) * max(0.0, 1 - 0.99 * share)
            running = running + training.step(batch, lr)
            step, seen = step + 1, seen + batch.ids.numel() * group.size
            if step % 200 == 0:
                value = training.validate(loader.speech)
                pace = seen / (clock.now() - last)
                training.log(f"step {step} epoch {loader.epoch} loss {float(running) / 200:.3f}",
                             f"held out {value:.3f} lr {lr:.2e} {pace / 1e6:.2f} M tokens/s")  # fmt: skip
                running, seen, last = 0.0, 0, clock.now()
                if group.agree(clock.now() - saved) > args.save_every:
                    training.save()
                    saved = last = clock.now()
                if group.agree(float(loader.newest() != loader.source)):
                    break
        loader.stop_epoch()
        if group.agree(float(loader.newest() != loader.source)):
            loader.load(loader.newest())
            training.log(f"{loader.source}: {len(loader.speech.train)} clips")
    training.save()
    training.log(f"done: {step} steps, held out {training.validate(loader.speech):.3f}")
    group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--codes", type=Path, required=True, help="prefix of codes*.npz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--until", type=float, required=True, help="seconds since RECIPE_START")
    parser.add_argument("--init", type=Path, help="go on from these weights")
    parser.add_argument("--tokens", type=int, default=65_536, help="tokens per step and rank")
    parser.add_argument("--lr", type=float, default=1.6e-3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--noise", type=float, default=0.04)
    parser.add_argument("--phoneme-share", type=float, default=0.06)
    parser.add_argument("--held-out", type=int, default=512)
    parser.add_argument("--save-every", type=float, default=90.0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()
    random.seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    train(args)


if __name__ == "__main__":
    main()
