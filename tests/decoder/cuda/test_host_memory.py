"""Host memory that is allocated before requests come; pinning it needs a GPU."""

from __future__ import annotations

from fractions import Fraction

from decoder import CodecSpec, DecoderOptions, StreamingOptions
from decoder.codecs.ramp import RampDecoder
from decoder.cuda.host_memory import result_bytes


def test_results_are_as_long_as_the_longest_chunk_of_the_server() -> None:
    """Whatever the codec recommends: (6, 12, 25)."""
    spec = CodecSpec("ramp", 1000, Fraction(15, 2), codebook_size=64, receptive_field=0)
    decoder = RampDecoder(spec, DecoderOptions(max_batch=3))
    assert result_bytes(decoder, 7, StreamingOptions((5, 51, 11))) == 3 * (383 + 7) * 4
    assert result_bytes(decoder, 7, StreamingOptions()) == 0
