"""`DecodePacer`: when the decoder gets its next call, and a stream its first sound.

    block ready ─▶ held while later blocks would be late ─▶ gathered ─▶ call ─▶ played
                   (first blocks only)                       until one is urgent

Both models of speech share one device: each decoder call slows the language model's steps, and many
windows cost little more than one. So calls should be few and full, in time for every listener. All
times are seconds on one clock.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tts.engine.streams import SpeechStream

NEAR_S = 0.06
MAX_NEAR_S, MAX_SLOW_NEAR_S = 0.08, 0.12
MARGIN_S = 0.015  # for two turns of the engine, at least, and
WAY_S = 0.005  # the way to the client
FADING = 0.95  # of the longest call, at each later call
REST, FIRST_REST, SLOW_REST = 13.0, 1.0, 3.0  # after a call, relative to its duration
URGENT_REST = 2.0  # where the model is slow, before a call that is not full
BURST_S = 0.1
PACE = 3.0  # times real time
PROMPT_REST = 1.0  # of a step, before prompts get one that nothing else needs
MAX_HOLD_S = 0.1
SMOOTHING = 0.1  # share of the newest step in the mean
IDLE_S = 1.0  # without a step, after which the speed of the model is unknown


class DecodePacer:
    """Decides when a decoder that renders in parallel with the language model gets its next call.

    A call waits for more windows until a stream needs its audio:

        at once     a full batch, or a stream that would underrun within `near_s`
        when idle   windows of all streams
        after rest  other windows. After a call that took d the decoder rests `REST` times d.
                    While a stream waits for its first audio it rests `first_rest` times d, and
                    where the model is fast in the mean only: rest of the last `BURST_S` counts

    A single stream therefore never waits.
    """

    ahead_s = math.inf
    """Windows that are played later than that do not make a batch full."""
    lets_model_wait = False
    """Whether the model's steps may wait for a call."""

    def __init__(self) -> None:
        self._finished_s = self._free_s = -math.inf
        self._took_s = self._longest_s = 0.0
        self._turn_s: float | None = None  # time of the last turn, if a step ended in it
        self._stepped_s = -math.inf  # end of the last step
        # duration of a step, and per token of a stream, both smoothed; 0: unknown
        self._step_s = self._token_s = 0.0
        self._token_rate = 0.0  # of the newest stream, in real time

    @property
    def is_slow(self) -> bool:
        """Whether the model generates at less than `PACE` times real time."""
        return self._token_s * self._token_rate * PACE > 1.0

    @property
    def first_rest(self) -> float:
        """Rest after a call, relative to its duration, while a stream waits for its first audio."""
        return FIRST_REST

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(finished_s={self._finished_s:.3f}, took_s={self._took_s:.4f}, "
            f"step_s={self._step_s:.4f})"
        )

    def note(self, started_s: float, took_s: float) -> None:
        """Record a call that has ended."""
        self._finished_s, self._took_s = started_s + took_s, took_s
        burst_s = 0.0 if self.is_slow else BURST_S
        free_s = max(self._free_s, started_s - burst_s) + (1 + self.first_rest) * took_s
        self._free_s = min(free_s, self._finished_s + self.first_rest * took_s)
        self._longest_s = max(took_s, FADING * self._longest_s)

    def note_turn(self, now_s: float, num_tokens: int) -> None:
        """Record a turn of the engine, with so many tokens of each stream; 0: no step has ended."""
        if num_tokens:
            if now_s > self._stepped_s + IDLE_S:
                self._step_s = self._token_s = 0.0
            elif self._turn_s is not None:
                took_s = now_s - self._turn_s
                self._step_s += SMOOTHING * (took_s - self._step_s)
                self._token_s += SMOOTHING * (took_s / num_tokens - self._token_s)
            self._stepped_s = now_s
        self._turn_s = now_s if num_tokens else None

    @property
    def prompts_due_s(self) -> float:
        """Return the time until which new prompts wait for others after the last step, if no other
        request needs a step.
        """
        return self._stepped_s + PROMPT_REST * self._step_s

    def hold_s(self, stream: SpeechStream) -> float:
        """Return how long to hold a stream's first block."""
        self._token_rate = stream.token_rate
        return 0.0

    def near_s(self, num_in_flight: int) -> float:
        """Return how long before an underrun a stream needs a call, behind so many others."""
        return NEAR_S

    def gathers(self, now_s: float, num_in_flight: int) -> bool:
        """Return whether streams near an underrun wait for others."""
        return False

    def is_due(
        self,
        now_s: float,
        *,
        underrun_s: float = math.inf,
        awaits_first_audio: bool = False,
        fills_batch: bool = False,
        has_all_streams: bool = False,
        num_in_flight: int = 0,
    ) -> bool:
        """Return whether to launch the ready windows now.

        `underrun_s` is the time of the first underrun (inf: no stream has audio yet). A stream
        `awaits_first_audio`; the windows fill a batch; all streams have a window; so many batches
        are in flight.
        """
        if fills_batch:
            return True
        is_urgent = underrun_s < now_s + self.near_s(num_in_flight)
        is_late = underrun_s < now_s + WAY_S + (num_in_flight + 1) * self._longest_s
        if is_urgent and (is_late or not self.gathers(now_s, num_in_flight)):
            return True
        if num_in_flight:
            return False
        if awaits_first_audio and now_s >= self._free_s:
            return True
        return has_all_streams or now_s >= self._finished_s + REST * self._took_s


class DeadlinePacer(DecodePacer):
    """Gathers more, for more streams: what may wait follows from the deadlines of the listeners.

    A stream is near an underrun only if a later call would end too late, calls for first audio take
    at most a quarter of the time where the model is slow, a first block is held where later ones
    would be late, and the model's steps may wait for a call. Where the model is slow, streams near
    an underrun gather, too, and earlier: many small calls would slow it down further.
    """

    ahead_s = 1.0
    lets_model_wait = True

    @property
    def first_rest(self) -> float:
        """See DecodePacer."""
        return SLOW_REST if self.is_slow else FIRST_REST

    def hold_s(self, stream: SpeechStream) -> float:
        """Return how long to hold a stream's first block, so that no later one is late at the
        present speed of the model: 0 where that is fast enough.
        """
        super().hold_s(stream)
        late_s = stream.lateness_s(self._token_s) + self.near_s(1)
        return min(max(late_s, 0.0), MAX_HOLD_S)

    def near_s(self, num_in_flight: int) -> float:
        """See DecodePacer: by the longest call, the rest before it and the turns of the engine."""
        margin_s = max(MARGIN_S, WAY_S + 2 * self._step_s)
        calls, most_s = float(num_in_flight + 1), MAX_NEAR_S
        if self.is_slow:
            calls, most_s = calls + URGENT_REST, MAX_SLOW_NEAR_S
        return min(most_s, margin_s + calls * self._longest_s)

    def gathers(self, now_s: float, num_in_flight: int) -> bool:
        """See DecodePacer: while the decoder works or rests, where the model is slow."""
        rests = now_s < self._finished_s + URGENT_REST * self._took_s
        return self.is_slow and (rests or num_in_flight > 0)
