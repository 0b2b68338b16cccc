"""A WebSocket session of a page in a real Chromium, with the token as a subprotocol."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.web_page import browsing, chromium, open_page
from tests.speech_server import serving

SESSION = """(token) => new Promise((done) => {
  const found = {events: [], bytes: 0};
  const protocols = ["sonant", "openai-insecure-api-key." + token];
  const socket = new WebSocket(`ws://${location.host}/v1/audio/speech/stream`, protocols);
  socket.binaryType = "arraybuffer";
  socket.onopen = () => {
    const first = {type: "config", response_format: "pcm", timestamps: "word"};
    const texts = [{type: "text", text: "Good mor"}, {type: "text", text: "ning."}];
    for (const message of [first, ...texts, {type: "end"}]) socket.send(JSON.stringify(message));
  };
  socket.onmessage = ({data}) => {
    if (data instanceof ArrayBuffer) found.bytes += data.byteLength;
    else found.events.push(JSON.parse(data));
  };
  socket.onclose = ({code}) => done({...found, code, protocol: socket.protocol});
})"""


@pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine")
def test_a_page_speaks_over_a_web_socket() -> None:
    flags = ["--http-port", "0", "--auth-token", "secret"]
    with serving(flags=flags) as server, browsing() as browser:
        page = open_page(browser, str(server.http))
        spoken: dict[str, Any] = page.evaluate(SESSION, "secret")
        refused: dict[str, Any] = page.evaluate(SESSION, "wrong")
    words = [word for event in spoken["events"] for word in event.get("words", [])]
    assert [word["word"] for word in words] == ["Good", "morning."]
    assert spoken["bytes"] > 24_000
    assert (spoken["code"], spoken["protocol"]) == (1000, "sonant")
    assert (refused["code"], refused["events"]) == (1006, [])
