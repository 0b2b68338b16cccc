"""The web page in a real Chromium: sound, marked words, files, errors, tokens, clips, dialogue."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
from playwright.sync_api import Browser, Page, Request, Route, expect

from tests.clients.web_page import WAIT_MS, browsing, chromium
from tests.fakes import LlamaShape, build_text_checkpoint
from tests.speech_server import serving
from tts.config.defaults import embedded_folder

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="needs Chromium; on Debian: apt install chromium"
)

TEXT = "Good morning. Seven ships sailed north."
WORDS = ["Good", "morning.", "Seven", "ships", "sailed", "north."]
RATE = 24_000
VOICES = json.loads((embedded_folder() / "voices.json").read_text(encoding="utf-8"))["voices"]
TOKEN = "open sesame"
SPEECH = "/v1/audio/speech"

STATE = """async () => {
  const {player} = await import('/app.js');
  return {duration: player.duration, position: player.position, isPlaying: player.isPlaying,
          peak: Math.max(0, ...player.peaks)};
}"""
WATCH = """() => {
  window.marked = [];
  new MutationObserver(() => {
    const word = document.querySelector('.now')?.textContent;
    if (word && word !== window.marked.at(-1)) window.marked.push(word);
  }).observe(document.body, {attributes: true, subtree: true, attributeFilter: ['class']});
}"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving(flags=["--http-port", "0"]) as server:
        yield str(server.http)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as browser:
        yield browser


@contextmanager
def page_of(browser: Browser, address: str, **options: Any) -> Iterator[Page]:
    """Open the page; it must stay without failures and ask no other server for anything."""
    failures: list[str] = []
    hosts: set[str] = set()
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    page.on("pageerror", lambda error: failures.append(str(error)))
    page.on(
        "request", lambda request: hosts.add(re.sub(r"^(\w+:(//[^/]*)?).*", r"\1", request.url))
    )
    page.on("console", lambda line: failures.append(line.text) if is_failure(line.text) else None)
    page.goto(f"http://{address}/")
    yield page
    assert failures == []
    assert hosts <= {f"http://{address}", "blob:http://" + address, "blob:"}
    context.close()


def is_failure(line: str) -> bool:
    """Return whether a line of the console is more than a status, which the page shows."""
    return "Failed to load resource: the server responded with a status of" not in line


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    with page_of(browser, address) as page:
        page.wait_for_selector(".voice")
        yield page


def state(page: Page) -> dict[str, Any]:
    found: dict[str, Any] = page.evaluate(STATE)
    return found


def speak(page: Page, text: str = TEXT) -> None:
    """Speak a text from the keyboard."""
    page.fill("#text", text)
    page.press("#text", "Enter")
    expect(page.locator("#stop")).to_be_enabled()


def wait_for_sound(page: Page) -> None:
    while not state(page)["position"]:
        page.wait_for_timeout(20)


def finish(page: Page) -> dict[str, Any]:
    """Wait for the end of the sound; return the player's state."""
    expect(page.locator("#stop")).to_be_disabled()
    return state(page)


def saved(page: Page, button: str) -> tuple[str, np.ndarray, int]:
    """Return the name, the samples and the rate of a file that the page saves."""
    with page.expect_download() as download:
        page.click(button)
    data = Path(download.value.path()).read_bytes()
    samples, rate = soundfile.read(BytesIO(data))
    return download.value.suggested_filename, samples, rate


def test_a_text_is_played_and_its_words_are_marked(page: Page) -> None:
    page.evaluate(WATCH)
    speak(page)
    wait_for_sound(page)
    ended = finish(page)
    assert ended["duration"] > 1
    assert ended["peak"] > 0.05
    marked = page.evaluate("window.marked")
    assert [word for word in WORDS if word in marked] == marked
    assert len(marked) >= 3  # a busy browser draws few pictures in a second
    assert page.inner_text("#spoken") == TEXT
    page.click("#replay")
    expect(page.locator("#status")).to_have_text("Speaking …")
    assert finish(page)["duration"] == ended["duration"]


def test_blocks_are_played_without_a_gap(page: Page) -> None:
    rendered = page.evaluate(
        """async ([sizes, rate]) => {
          const {Player} = await import('/audio.js');
          const context = new OfflineAudioContext(1, rate, rate);
          const player = new Player(context);
          let value = 0;
          for (const size of sizes) {
            player.append(Float32Array.from({length: size}, () => ++value / 32768));
          }
          const audio = await context.startRendering();
          return Array.from(audio.getChannelData(0), (sample) => Math.round(sample * 32768));
        }""",
        [[320, 1, 479, 5000, 200], RATE],
    )
    heard = [value for value in rendered if value]
    assert heard == list(range(1, 6001))
    first = rendered.index(1)
    assert rendered[first : first + 6000] == heard


def test_files_are_saved(page: Page) -> None:
    speak(page)
    duration = finish(page)["duration"]
    name, samples, rate = saved(page, "#wav")
    assert (name, rate, len(samples)) == ("speech.wav", RATE, round(duration * RATE))
    assert np.abs(samples).max() > 0.05
    name, compressed, rate = saved(page, "#mp3")
    assert name == "speech.mp3"
    assert len(compressed) / rate == pytest.approx(duration, abs=0.15)
    assert np.abs(compressed).max() > 0.05


def cancelled(address: str) -> float:
    """Return how many sequences of the engine were cancelled."""
    text = httpx.get(f"http://{address}/metrics").text
    found = re.search(r'^sonant_sequences_finished_total\{reason="cancelled"\} (\S+)', text, re.M)
    return float(found[1]) if found else 0.0


def sequences(address: str, prefix: str) -> float:
    """Return how many sequences an engine has, in any state."""
    text = httpx.get(f"http://{address}/metrics").text
    found = re.findall(rf"^{prefix}engine_sequences\{{.*\}} (\S+)", text, re.M)
    assert found
    return sum(map(float, found))


def test_escape_cancels_the_request(page: Page, address: str) -> None:
    before = cancelled(address)
    speak(page, "This is a long sentence, which is not heard to its end. " * 100)
    wait_for_sound(page)
    page.keyboard.press("Escape")
    assert not finish(page)["isPlaying"]
    while cancelled(address) == before:
        page.wait_for_timeout(50)
    expect(page.locator("#error")).to_be_hidden()


def test_errors_of_the_server_are_shown(page: Page, address: str) -> None:
    error = page.locator("#error")
    speech = httpx.post(f"http://{address}{SPEECH}", json={"input": TEXT, "response_format": "wav"})
    files = {"audio_sample": speech.content}
    voices = f"http://{address}/v1/audio/voices"
    assert httpx.post(voices, data={"name": "guest", "ref_text": TEXT}, files=files).is_success
    page.reload()
    page.check("input[value=guest]")
    assert httpx.delete(f"{voices}/guest").is_success
    page.fill("#text", TEXT)
    page.click("#speak")
    expect(error).to_contain_text("no voice 'guest'")
    page.check("input[value=owen]")
    page.fill("#text", "a " * 6000)
    page.click("#speak")
    expect(error).to_contain_text("the limit is 10000")
    speak(page, "Now it works.")
    expect(error).to_be_hidden()
    assert finish(page)["peak"] > 0.05


def test_a_sample_of_each_voice(page: Page) -> None:
    samples = page.get_by_role("button", name="Play a sample of")
    assert samples.count() == page.locator("[name=voice]").count() == len(VOICES)
    with page.expect_request(f"**{SPEECH}") as request:
        page.get_by_role("button", name="Play a sample of Owen").click()
    assert request.value.post_data_json["voice"] == "owen"
    assert finish(page)["peak"] > 0.05


def test_a_dialogue_has_several_voices_without_a_pause(page: Page) -> None:
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(body_of(request)))
    page.get_by_text("Dialogue").click()
    page.fill("#script", "Anna: Hello there.\nedith: Hello, Anna.\nHow do you do?")
    page.get_by_label("Anna").select_option("opal")
    page.evaluate(WATCH)
    page.press("#script", "Control+Enter")
    expect(page.locator("#stop")).to_be_enabled()
    ended = finish(page)
    asked = [(body["voice"], body["input"]) for body in bodies if body]
    assert asked == [
        ("opal", "Hello there."),
        ("edith", "Hello, Anna."),
        ("edith", "How do you do?"),
    ]
    assert page.inner_text("#spoken").split("\n")[:2] == [
        "Anna: Hello there.",
        "edith: Hello, Anna.",
    ]
    marked = page.evaluate("window.marked")
    assert {"there.", "Anna.", "do?"} & set(marked)
    assert len(saved(page, "#wav")[1]) == round(ended["duration"] * RATE)
    expect(page.locator("#mp3")).to_be_disabled()  # a file of the server has one request


def body_of(request: Request) -> Any:
    return request.post_data_json if request.url.endswith(SPEECH) else None


def test_a_clip_is_imitated(page: Page, address: str, tmp_path: Path) -> None:
    clip = tmp_path / "clip.flac"
    asked = {"input": TEXT, "response_format": "flac", "voice": "edith"}
    clip.write_bytes(httpx.post(f"http://{address}{SPEECH}", json=asked).content)
    page.set_input_files("#upload", clip)
    expect(page.get_by_label("Your recording", exact=True)).to_be_checked()
    page.fill("#transcript", TEXT)
    with page.expect_request(f"**{SPEECH}") as request:
        speak(page, "In a voice like mine.")
    assert request.value.post_data_json["ref_text"] == TEXT
    assert len(request.value.post_data_json["ref_audio"]) > RATE
    assert finish(page)["peak"] > 0.05


def test_a_clip_is_recorded(page: Page) -> None:
    page.click("#record")
    expect(page.locator("#record")).to_have_text("End recording")
    page.wait_for_timeout(1500)
    page.click("#record")
    expect(page.get_by_label("Your recording", exact=True)).to_be_checked()
    clip = page.locator("#clip")
    while not clip.evaluate("audio => audio.duration > 1"):
        page.wait_for_timeout(20)


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with the built-in voice and a text model of random weights."""
    shape = LlamaShape(max_positions=2**15)
    model = build_text_checkpoint(tmp_path_factory.mktemp("models") / "writer", shape=shape)
    config = '{"sampling": {"enable_structured_output": true}}'
    flags = ["--http-port", "0", "--text-model", str(model), "--text-model-config", config]
    with serving(flags=flags) as server:
        yield str(server.http)


@contextmanager
def chatting(browser: Browser, address: str, schema: Any) -> Iterator[tuple[Page, list[Any]]]:
    """Open the page of a server whose answers follow a schema; yield it and the requests."""
    asked: list[Any] = []

    def chat(route: Route) -> None:
        asked.append(route.request.post_data_json)
        wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        body = {**asked[-1], "max_tokens": 20_000, "response_format": wanted}
        route.continue_(post_data=json.dumps(body))

    with page_of(browser, address) as page:
        page.route("**/v1/chat/completions", chat)
        page.on("request", lambda request: asked.append(body_of(request)))
        page.get_by_text("Chat", exact=True).click()
        yield page, asked


def send(page: Page, message: str) -> None:
    page.fill("#message", message)
    page.press("#message", "Enter")
    expect(page.locator("#stop")).to_be_enabled()


def test_a_chat_is_spoken_while_it_is_written(browser: Browser, talker: str) -> None:
    with chatting(browser, talker, {"const": TEXT}) as (page, asked):
        page.evaluate(WATCH)
        page.check("input[value=owen]")
        send(page, "How many ships sailed?")
        assert finish(page)["duration"] > 1
        answer = json.dumps(TEXT)
        expect(page.locator("#turns li")).to_have_text(["How many ships sailed?", answer])
        marked = page.evaluate("window.marked")
        assert [word for word in answer.split() if word in marked] == marked
        assert len(marked) >= 3
        send(page, "Thank you.")
        finish(page)
        expect(page.locator("#turns li")).to_have_count(4)
    requests = [body for body in asked if body]
    assert [body["modalities"] for body in requests] == [["text", "audio"]] * 2
    assert [body["audio"]["voice"] for body in requests] == ["owen"] * 2
    roles = [message["role"] for message in requests[1]["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_escape_cancels_a_chat_and_its_speech(browser: Browser, talker: str) -> None:
    endless = {"type": "array", "items": {"const": TEXT}, "minItems": 1000}
    with chatting(browser, talker, endless) as (page, _):
        send(page, "Tell me a story without an end.")
        wait_for_sound(page)
        page.keyboard.press("Escape")
        assert not finish(page)["isPlaying"]
        while any(sequences(talker, prefix) for prefix in ("sonant_", "sonant_text_")):
            page.wait_for_timeout(50)
        expect(page.locator("#error")).to_be_hidden()


def test_a_speech_server_speaks_a_chat(browser: Browser, tmp_path: Path) -> None:
    """Its voices are those of the speech server; they have no samples here."""
    model = build_text_checkpoint(tmp_path / "writer")
    with serving() as speaker:
        flags = ["--http-port", "0", "--speech-server", speaker.address]
        flags += ["--sampling.enable-structured-output"]
        with (
            serving(str(model), flags) as server,
            chatting(browser, str(server.http), {"const": TEXT}) as (page, asked),
        ):
            expect(page.locator(".voice")).to_have_count(len(VOICES))
            expect(page.locator(".voice button").first).to_be_hidden()
            page.evaluate(WATCH)
            page.check("input[value=owen]")
            send(page, "How many ships sailed?")
            assert finish(page)["duration"] > 1
            expect(page.locator("#turns li.assistant")).to_have_text(json.dumps(TEXT))
            assert len(page.evaluate("window.marked")) >= 3
    assert [body["audio"]["voice"] for body in asked if body] == ["owen"]


def test_a_text_model_alone_is_not_heard(browser: Browser, tmp_path: Path) -> None:
    model = build_text_checkpoint(tmp_path / "writer")
    with (
        serving(str(model), ["--http-port", "0"]) as server,
        page_of(browser, str(server.http)) as page,
    ):
        page.fill("#message", "Hello.")
        page.press("#message", "Enter")
        expect(page.locator("#turns li.assistant")).not_to_be_empty()
        finish(page)
        expect(page.get_by_text("Dialogue")).to_be_hidden()
        assert state(page)["duration"] == 0


def test_a_chat_is_hidden_where_there_is_none(page: Page) -> None:
    expect(page.get_by_text("Chat", exact=True)).to_be_hidden()


def test_the_token_is_asked_for(browser: Browser) -> None:
    flags = ["--http-port", "0", "--auth-token", TOKEN]
    with serving(flags=flags) as server, page_of(browser, str(server.http)) as page:
        field, error = page.get_by_label("Token of this server"), page.locator("#error")
        expect(field).to_be_focused()
        expect(error).to_contain_text("token")
        field.fill("wrong")
        page.keyboard.press("Enter")
        expect(error).to_be_visible()
        assert page.locator(".voice").count() == 0
        field.fill(TOKEN)
        page.keyboard.press("Enter")
        page.wait_for_selector(".voice")
        expect(field).to_be_hidden()
        expect(error).to_be_hidden()
        page.reload()
        page.wait_for_selector(".voice")
        speak(page)
        assert finish(page)["peak"] > 0.05


@pytest.mark.parametrize("width", [360, 1200])
def test_it_fits_the_screen_in_both_schemes(browser: Browser, address: str, width: int) -> None:
    colours = set()
    for scheme in ("light", "dark"):
        options = {"viewport": {"width": width, "height": 740}, "color_scheme": scheme}
        with page_of(browser, address, **options) as page:
            page.wait_for_selector(".voice")
            assert page.evaluate("document.documentElement.scrollWidth") == width
            colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2


def test_every_control_has_a_name_and_a_place_in_the_order_of_keys(page: Page) -> None:
    page.get_by_text("Dialogue").click()
    names = page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, textarea')].map((control) =>
             control.ariaLabel || control.labels?.[0]?.textContent.trim() || control.textContent)"""
    )
    assert all(names)
    page.locator("#modes input:checked").focus()
    reached = set()
    for _ in range(len(names)):  # several are one place, and hidden ones none
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"script", "speak", "play", "speed", "record", "upload", "transcript"} <= reached


def test_the_voices_are_two_stops_of_the_tab_key(page: Page) -> None:
    """The arrow keys choose a voice, and the sample that Tab reaches is that of the chosen one."""
    chosen = page.locator("input[name=voice]:checked")
    before = chosen.input_value()
    chosen.focus()
    for key in ("ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    row = page.locator(".voice:has(:checked)")
    expect(row.locator("input")).to_be_focused()
    assert row.locator("input").input_value() != before
    page.keyboard.press("Tab")
    expect(row.locator(".play")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.locator("#speed")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    expect(row.locator(".play")).to_be_focused()
    page.keyboard.press("Enter")
    assert finish(page)["peak"] > 0.05
