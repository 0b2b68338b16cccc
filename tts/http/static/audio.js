// Audio in the browser: playing a stream of samples, drawing it, and WAV files.

export const RATE = 24000; // Hz of the server's `pcm`

const LEAD_S = 0.12; // between the first samples and their sound, so that the next arrive in time
const PEAK_SAMPLES = 240; // samples of one peak: 10 ms

/** Player of samples that arrive while the first of them are heard. */
export class Player {
  #context;
  #sources = new Set();
  #pieces = []; // {at, start, end}: seconds of the context's clock, and of the audio
  #blocks = [];
  #length = 0; // samples
  peaks = []; // largest magnitude of each 10 ms

  /** `context`: where to play; without one, the browser's sound, from the first `reset` on. */
  constructor(context = null) {
    this.#context = context;
  }

  /** Begin new audio. Call it in the handler of a click or a key: browsers need one for sound. */
  reset() {
    this.stop();
    this.#blocks = [];
    this.#length = 0;
    this.peaks = [];
    this.#resume();
  }

  /** Add samples in [-1, 1) at the end, and play them as soon as those before have ended. */
  append(samples) {
    if (!samples.length) return;
    this.#play(samples, this.#length / RATE);
    this.#blocks.push(samples);
    for (let i = 0; i < samples.length; i++) {
      const place = Math.floor((this.#length + i) / PEAK_SAMPLES);
      this.peaks[place] = Math.max(this.peaks[place] ?? 0, Math.abs(samples[i]));
    }
    this.#length += samples.length;
  }

  /** Play all samples again. */
  replay() {
    const samples = this.samples();
    this.stop();
    this.#resume();
    if (samples.length) this.#play(samples, 0);
  }

  /** End the sound; the samples stay. */
  stop() {
    for (const source of this.#sources) source.stop();
    this.#sources.clear();
    this.#pieces = [];
  }

  /** All samples so far. */
  samples() {
    const all = new Float32Array(this.#length);
    let place = 0;
    for (const block of this.#blocks) {
      all.set(block, place);
      place += block.length;
    }
    return all;
  }

  /** Seconds of audio so far. */
  get duration() {
    return this.#length / RATE;
  }

  /** Whether samples are left to be heard. */
  get isPlaying() {
    return this.#sources.size > 0;
  }

  /** Second of the audio that is heard now. */
  get position() {
    const now = this.#context ? this.#context.currentTime - (this.#context.outputLatency || 0) : 0;
    const piece = this.#pieces.findLast((found) => found.at <= now);
    return piece ? Math.min(piece.start + now - piece.at, piece.end) : 0;
  }

  #resume() {
    this.#context ??= new AudioContext({ sampleRate: RATE });
    this.#context.resume();
  }

  #play(samples, start) {
    const last = this.#pieces.at(-1);
    const isLate = !last || last.at + last.end - last.start < this.#context.currentTime;
    const at = isLate ? this.#context.currentTime + LEAD_S : last.at + last.end - last.start;
    const buffer = this.#context.createBuffer(1, samples.length, RATE);
    buffer.copyToChannel(samples, 0);
    const source = this.#context.createBufferSource();
    source.buffer = buffer;
    source.connect(this.#context.destination);
    source.onended = () => this.#sources.delete(source);
    source.start(at);
    this.#sources.add(source);
    this.#pieces.push({ at, start, end: start + samples.length / RATE });
  }
}

/** Draw peaks over the width of a canvas; those before `played` (0 to 1) in the second colour. */
export function draw(canvas, peaks, played) {
  const scale = window.devicePixelRatio || 1;
  const width = Math.round(canvas.clientWidth * scale);
  const height = Math.round(canvas.clientHeight * scale);
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  const style = getComputedStyle(canvas);
  const [rest, heard] = ["--wave", "--accent"].map((name) => style.getPropertyValue(name));
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, width, height);
  const step = 4 * scale;
  const bars = Math.max(1, Math.floor(width / step));
  for (let bar = 0; bar < bars; bar++) {
    const first = Math.floor((bar * peaks.length) / bars);
    const last = Math.max(first + 1, Math.floor(((bar + 1) * peaks.length) / bars));
    const peak = Math.max(0, ...peaks.slice(first, last));
    const size = Math.max(2 * scale, Math.min(1, peak * 1.6) * height);
    context.fillStyle = peaks.length && (bar + 0.5) / bars < played ? heard : rest;
    context.beginPath();
    context.roundRect(bar * step + scale * 0.5, (height - size) / 2, 3 * scale, size, 1.5 * scale);
    context.fill();
  }
}

/** Return samples of 16 bits, little-endian, from base64. */
export function fromBase64(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Float32Array.from({ length: bytes.length >> 1 }, (_, i) => view.getInt16(2 * i, true) / 32768);
}

/** Return bytes as base64. */
export function toBase64(buffer) {
  const bytes = new Uint8Array(buffer);
  let text = "";
  for (let i = 0; i < bytes.length; i += 8192) {
    text += String.fromCharCode(...bytes.subarray(i, i + 8192));
  }
  return btoa(text);
}

/** Return a WAV file, 16 bits, of samples at RATE. */
export function wav(samples) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const text = (place, letters) =>
    [...letters].forEach((letter, i) => view.setUint8(place + i, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + 2 * samples.length, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // mono
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, i) => {
    const value = Math.max(-32768, Math.min(32767, Math.round(sample * 32768)));
    view.setInt16(44 + 2 * i, value, true);
  });
  return view.buffer;
}

/** Return a recording as a WAV file of one channel; one that the browser cannot read, as it is. */
export async function asWav(recording) {
  const data = await recording.arrayBuffer();
  const context = new OfflineAudioContext(1, 1, RATE);
  let audio;
  try {
    audio = await context.decodeAudioData(data.slice(0));
  } catch {
    return data;
  }
  const mixed = audio.getChannelData(0).slice();
  for (let channel = 1; channel < audio.numberOfChannels; channel++) {
    audio.getChannelData(channel).forEach((sample, i) => (mixed[i] += sample));
  }
  return wav(mixed.map((sample) => sample / audio.numberOfChannels));
}
