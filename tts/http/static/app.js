// The page: what is written in its fields becomes calls, sound, a waveform and marked words.

import { ApiError, call, events, setToken } from "./api.js";
import { Player, asWav, draw, fromBase64, toBase64, wav } from "./audio.js";

const MAX_AHEAD_S = 10; // audio that waits to be heard before the next line is requested
const MAX_RECORDING_MS = 30000;
const CLIP = "(clip)"; // the voice of the recording; no voice of the server has parentheses

const TEXT = "Good morning. Every word of this text is marked while you hear it, and the first sound comes before the last is made.";
const SCRIPT = "Anna: Have you heard the news?\nBen: No, what happened?\nAnna: The page can speak now.";
const SAMPLES = {
  de: "Guten Tag. So klingt diese Stimme.",
  en: "Hello. This is how I sound.",
  es: "Hola. Así suena esta voz.",
  fr: "Bonjour. Voici le son de cette voix.",
  it: "Buongiorno. Questa voce suona così.",
  zh: "你好。这就是我的声音。",
};

const find = (id) => document.getElementById(id);
const create = (name, values = {}, ...children) => {
  const element = Object.assign(document.createElement(name), values);
  element.append(...children);
  return element;
};
const wait = (ms) => new Promise((done) => setTimeout(done, ms));

/** The sound of the page. */
export const player = new Player();

let models = { speech: null, chat: null, spoken: null }; // spoken: the one whose answers can be heard
let voices = [];
let clip = null; // {audio: base64}
let current = null; // AbortController of the speech that is being made
let words = []; // {start, end, node}: seconds of the audio
let frame = 0; // the next call of `show`
let single = null; // body of the request whose audio the player has, if it is of one request
const turns = []; // of the chat, as the server takes them
const casting = new Map(); // names in the dialogue to voices

// --- the server

async function load() {
  try {
    const { data } = await (await call("v1/models")).json();
    const with_ = (name) => data.find((model) => model.capabilities.includes(name)) ?? null;
    models = { speech: with_("speech"), chat: with_("chat"), spoken: with_("speech") ?? with_("spoken_chat") };
    voices = models.spoken ? (await (await call("v1/audio/voices")).json()).voices : [];
  } catch (error) {
    report(error);
    if (error.status === 503) setTimeout(load, 2000);
    return;
  }
  clearError();
  find("access").hidden = true;
  find("model").textContent = [models.speech, models.chat].filter(Boolean).map((m) => m.id).join(", ");
  find("imitate").hidden = !models.speech?.capabilities.includes("voice_cloning");
  find("has-chat").hidden = !models.chat;
  find("side").hidden = find("player").hidden = !models.spoken;
  for (const input of document.querySelectorAll("[value=text], [value=dialogue]")) {
    input.parentElement.hidden = !models.speech;
  }
  if (!models.speech && models.chat) document.querySelector("[value=chat]").click();
  showVoices();
}

function report(error) {
  if (error.name === "AbortError") return;
  const isRefused = error.status === 401;
  find("error").textContent = error instanceof ApiError ? error.message : `The page failed: ${error.message}`;
  find("error").hidden = false;
  if (isRefused) {
    find("access").hidden = false;
    find("token").focus();
  }
  if (!(error instanceof ApiError)) console.error(error);
}

function clearError() {
  find("error").hidden = true;
  find("error").textContent = "";
}

// --- speech

/** Text of one request: it is shown, and its words are marked when their times are known. */
class Line {
  #letters = [];
  #rest = document.createTextNode("");
  #place = 0; // code points of the text before #rest

  constructor(text, voice, element) {
    this.voice = voice;
    element.append(this.#rest);
    this.append(text);
  }

  get text() {
    return this.#letters.join("");
  }

  append(text) {
    for (const letter of text) this.#letters.push(letter);
    this.#rest.appendData(text);
  }

  /** Put words, with their times from `start_s` on, into elements of their own. */
  mark(found, start_s) {
    for (const word of found) {
      const isNew = word.text_start >= this.#place && word.text_end > word.text_start;
      const node = isNew ? this.#cut(word.text_start, word.text_end) : words.at(-1)?.node;
      if (node) words.push({ start: start_s + word.start, end: start_s + word.end, node });
    }
  }

  #cut(start, end) {
    const length = (from, to) => this.#letters.slice(from, to).join("").length;
    const node = create("span");
    const word = this.#rest.splitText(length(this.#place, start));
    this.#rest = word.splitText(length(start, end));
    word.replaceWith(node);
    node.append(word);
    this.#place = end;
    return node;
  }
}

/** Return the fields of a request that say how it is spoken. */
function speechIn(voice) {
  const own = voice === CLIP ? { ref_audio: clip.audio, ref_text: find("transcript").value } : { voice };
  return {
    ...(models.speech && { model: models.speech.id }),
    ...own,
    speed: Number(find("speed").value),
    seed: crypto.getRandomValues(new Uint32Array(1))[0],
  };
}

const timestamps = () => (models.spoken.capabilities.includes("word_timestamps") ? "word" : "none");

/** Speak lines one after the other without gaps; each is requested while the one before is heard. */
async function speak(lines, cancel) {
  for (const line of lines) {
    while (player.duration - player.position > MAX_AHEAD_S && !cancel.signal.aborted) await wait(100);
    const request = { ...speechIn(line.voice), input: line.text };
    single = lines.length > 1 ? null : request;
    const start = player.duration;
    const body = { ...request, response_format: "pcm", stream_format: "sse", timestamps: timestamps() };
    const response = await call("v1/audio/speech", { body, signal: cancel.signal });
    for await (const event of events(response)) {
      if (cancel.signal.aborted) return;
      if (event.type === "speech.audio.delta") player.append(fromBase64(event.audio));
      if (event.type === "speech.audio.words") line.mark(event.words, start);
    }
  }
}

/** Run a task that makes speech, from the click on: stop the one before, show what happens. */
async function run(task) {
  stop();
  clearError();
  player.reset();
  words = [];
  single = null;
  find("spoken").replaceChildren();
  const cancel = new AbortController();
  current = cancel;
  show();
  try {
    await task(cancel);
  } catch (error) {
    if (!cancel.signal.aborted) report(error); // what a cancelled body ends with differs
  } finally {
    if (current === cancel) current = null;
  }
}

function stop() {
  current?.abort();
  current = null;
  player.stop();
}

/** Draw the state of the player, again and again until it is silent and nothing is being made. */
function show() {
  const position = player.position;
  const isActive = current !== null || player.isPlaying;
  draw(find("wave"), player.peaks, player.isPlaying ? position / player.duration : 1);
  const word = player.isPlaying ? words.findLast((found) => found.start <= position && position < found.end) : null;
  const marked = document.querySelector(".now");
  if (marked && marked !== word?.node) marked.removeAttribute("class");
  if (word && marked !== word.node) {
    word.node.className = "now";
    keepInView(word.node);
  }
  find("time").textContent = player.isPlaying
    ? `${position.toFixed(1)} of ${player.duration.toFixed(1)} s`
    : `${player.duration.toFixed(1)} s`;
  showButtons(isActive);
  cancelAnimationFrame(frame);
  if (isActive) frame = requestAnimationFrame(show);
}

function showButtons(isActive) {
  const hasFocus = document.activeElement === find("stop");
  find("stop").disabled = !isActive;
  if (hasFocus && !isActive) find("speak").focus();
  const isEmpty = player.duration === 0;
  find("replay").disabled = isEmpty || current !== null;
  find("wav").disabled = isEmpty || current !== null;
  find("mp3").disabled = isEmpty || current !== null || single === null;
  const status = !isActive ? "" : player.isPlaying ? "Speaking …" : "Waiting for sound …";
  if (find("status").textContent !== status) find("status").textContent = status;
}

/** Scroll the text around a word, and nothing else, so that the word is seen. */
function keepInView(node) {
  const box = node.closest("#spoken, #turns");
  if (!box) return;
  const [inner, outer] = [node.getBoundingClientRect(), box.getBoundingClientRect()];
  if (inner.bottom > outer.bottom || inner.top < outer.top) box.scrollTop += inner.top - outer.top - outer.height / 3;
}

function speakText(text, voice) {
  return run((cancel) => speak([new Line(text, voice, find("spoken"))], cancel));
}

// --- dialogue

/** Return the lines of a dialogue as {name, text}; a line without a name continues the one before. */
function readScript() {
  const lines = [];
  for (const line of find("script").value.split("\n").filter((found) => found.trim())) {
    const parts = line.match(/^\s*([^:]{1,40}?)\s*:\s*(.*\S)\s*$/);
    lines.push({ name: parts ? parts[1] : (lines.at(-1)?.name ?? ""), text: (parts ? parts[2] : line).trim() });
  }
  return lines;
}

/** Show a choice of the voice for each name: the voice of that name, or the next that is free. */
function showSpeakers() {
  const names = [...new Set(readScript().map((line) => line.name))];
  for (const name of casting.keys()) if (!names.includes(name)) casting.delete(name);
  for (const name of names) {
    const own = voices.find((voice) => voice.id.toLowerCase() === name.toLowerCase());
    const free = voices.find((voice) => ![...casting.values()].includes(voice.id)) ?? voices[0];
    const isKnown = casting.get(name) === CLIP ? clip : voices.some((voice) => voice.id === casting.get(name));
    if (!isKnown && voices.length) casting.set(name, (own ?? free).id);
  }
  const choices = names.map((name) => {
    const options = known().map(({ id, label }) => create("option", { value: id, textContent: label }));
    const select = create("select", { onchange: () => casting.set(name, select.value) }, ...options);
    select.value = casting.get(name);
    return create("label", {}, name || "(no name)", select);
  });
  find("speakers").replaceChildren(...choices);
}

function speakDialogue() {
  return run((cancel) => {
    const lines = readScript().map(({ name, text }) => {
      const place = create("span");
      find("spoken").append(create("div", {}, create("b", { textContent: name && `${name}: ` }), place));
      return new Line(text, casting.get(name), place);
    });
    return speak(lines, cancel);
  });
}

// --- chat

/** Send a message; show the answer while it is written, and hear it where the server has a voice. */
function chat(message) {
  const item = create("li", { className: "assistant" });
  find("turns").append(create("li", { className: "user", textContent: message }), item);
  const line = new Line("", selected(), item);
  const turn = { role: "assistant", content: "" };
  turns.push({ role: "user", content: message }, turn);
  const body = { model: models.chat.id, messages: turns.filter((found) => found.content), stream: true };
  if (models.spoken) {
    body.modalities = ["text", "audio"];
    body.audio = { ...speechIn(line.voice), format: "pcm16", timestamps: timestamps() };
  }
  return run(async (cancel) => {
    const response = await call("v1/chat/completions", { body, signal: cancel.signal });
    for await (const event of events(response)) {
      if (cancel.signal.aborted) return;
      const { content, audio } = event.choices[0].delta;
      const text = content ?? audio?.transcript;
      if (text) {
        turn.content += text;
        line.append(text);
        find("turns").scrollTop = find("turns").scrollHeight;
      }
      if (audio?.data) player.append(fromBase64(audio.data));
      if (audio?.words) line.mark(audio.words, 0);
    }
  });
}

// --- voices

/** Return the voices that can be chosen as {id, label, detail, language}. */
function known() {
  const found = voices.map((voice) => {
    const [, label, detail] = (voice.display_name || voice.id).match(/^(.*?)(?: \((.*)\))?$/);
    return { id: voice.id, label, detail: detail ?? "", language: voice.languages[0] ?? "en" };
  });
  return clip ? [{ id: CLIP, label: "Your recording", detail: "", language: navigator.language }, ...found] : found;
}

function selected() {
  return document.querySelector("[name=voice]:checked")?.value ?? "";
}

function showVoices(chosen = selected()) {
  const rows = known().map(({ id, label, detail, language }, index) => {
    const input = create("input", { type: "radio", name: "voice", value: id, checked: chosen ? id === chosen : index === 0 });
    const sample = SAMPLES[language.split("-")[0]] ?? SAMPLES.en;
    const button = create("button", { type: "button", className: "play", textContent: "▶", title: `Play a sample of ${label}` });
    button.setAttribute("aria-label", button.title);
    button.onclick = () => speakText(sample, id);
    button.hidden = !models.speech; // a speech server speaks chats only
    const name = create("span", {}, label, ...(detail ? [create("small", { textContent: detail })] : []));
    return create("div", { className: "voice" }, create("label", {}, input, name), button);
  });
  find("voices").replaceChildren(...rows);
  showSamples();
  showSpeakers();
}

/** Give the Tab key one sample, that of the chosen voice: the arrow keys choose another one. */
function showSamples() {
  for (const row of find("voices").children) row.lastChild.tabIndex = row.querySelector("input").checked ? 0 : -1;
}

async function takeClip(recording) {
  const data = await asWav(recording);
  clip = { audio: toBase64(data) };
  const audio = find("clip");
  URL.revokeObjectURL(audio.src);
  audio.src = URL.createObjectURL(new Blob([data]));
  audio.hidden = false;
  showVoices(CLIP);
  find("transcript").focus();
}

let recorder = null;

async function record() {
  if (recorder) {
    recorder.stop();
    return;
  }
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  const parts = [];
  const recording = (recorder = new MediaRecorder(stream));
  const timer = setTimeout(() => recording.stop(), MAX_RECORDING_MS);
  recording.ondataavailable = (event) => parts.push(event.data);
  recording.onstop = () => {
    clearTimeout(timer);
    stream.getTracks().forEach((track) => track.stop());
    recorder = null;
    find("record").textContent = "Record";
    takeClip(new Blob(parts)).catch(report);
  };
  recording.start();
  find("record").textContent = "End recording";
}

// --- files

function save(data, type, name) {
  const url = URL.createObjectURL(new Blob([data], { type }));
  create("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

async function saveMp3() {
  const body = { ...single, response_format: "mp3" }; // the same seed gives the same speech
  const response = await call("v1/audio/speech", { body });
  save(await response.arrayBuffer(), "audio/mpeg", "speech.mp3");
}

// --- controls

const mode = () => document.querySelector("[name=mode]:checked").value;

function start() {
  if (mode() === "dialogue") return speakDialogue();
  if (mode() === "text") return speakText(find("text").value, selected());
  const message = find("message").value.trim();
  find("message").value = "";
  return message ? chat(message) : undefined;
}

function showMode() {
  for (const name of ["text", "dialogue", "chat"]) find(`mode-${name}`).hidden = name !== mode();
  find("speak").textContent = mode() === "chat" ? "Send" : "Speak";
}

function onKey(event) {
  if (event.isComposing) return;
  if (event.key === "Escape") stop();
  const isInput = ["text", "message", "script"].includes(event.target.id);
  if (event.key !== "Enter" || !isInput || event.shiftKey) return;
  if (event.target.id === "script" && !event.ctrlKey && !event.metaKey) return;
  event.preventDefault();
  start();
}

function setUp() {
  find("text").value = TEXT;
  find("script").value = SCRIPT;
  document.addEventListener("keydown", onKey);
  find("modes").addEventListener("change", showMode);
  find("script").addEventListener("input", showSpeakers);
  find("voices").addEventListener("change", showSamples);
  find("speed").addEventListener("input", () => (find("speed-shown").value = Number(find("speed").value).toFixed(2)));
  find("access").addEventListener("submit", (event) => {
    event.preventDefault();
    setToken(find("token").value.trim());
    load();
  });
  find("upload").addEventListener("change", () => {
    const [file] = find("upload").files;
    if (file) takeClip(file).catch(report);
  });
  const clicks = {
    speak: start,
    stop,
    replay: () => (player.replay(), show()),
    wav: () => save(wav(player.samples()), "audio/wav", "speech.wav"),
    mp3: () => saveMp3().catch(report),
    record: () => record().catch((error) => report(new ApiError(0, { message: `No microphone: ${error.message}` }))),
  };
  for (const [id, act] of Object.entries(clicks)) find(id).addEventListener("click", act);
  find("record").disabled = !navigator.mediaDevices?.getUserMedia;
  window.addEventListener("resize", () => draw(find("wave"), player.peaks, 1));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  showMode();
  show();
  load();
}

setUp();
