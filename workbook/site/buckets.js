"use strict";
/* One training step in the browser: when gradients are ready, what messages cost, which travel together.
   The same recursion and the same planners as in the package, held against it by a test. */

const MIB = 1 << 20;

const model = {
  /** When each gradient is ready, in seconds; `scale` is how many times as long computing takes. */
  ready(net, scale) {
    let at = net.forward_s * scale;
    return net.backward_s.map((seconds) => (at += seconds * scale));
  },

  /** What a message of so many bytes takes, in seconds. The sliders set the line of `wire`. If `wire` also has a
      table of measured medians, its time is changed by as much as the line differs from the line fitted to it. */
  message(wire, bytes) {
    const line = wire.alpha_s + wire.beta_s_per_byte * bytes;
    if (!wire.table) return line;
    const fitted = wire.table.alpha_s + wire.table.beta_s_per_byte * bytes;
    return Math.max(0, model.measured(wire.table, bytes) + line - fitted);
  },

  /** Interpolate measured times between sizes in logarithms, as the package's `Table` does: below the first
      size its time, above the last size with the slope of the last two. */
  measured(table, bytes) {
    const sizes = table.bytes, times = table.seconds, last = sizes.length - 1;
    if (bytes <= sizes[0]) return times[0];
    if (bytes >= sizes[last]) {
      const slope = (times[last] - times[last - 1]) / (sizes[last] - sizes[last - 1]);
      return times[last] + Math.max(slope, 0) * (bytes - sizes[last]);
    }
    let i = 1;
    while (sizes[i] < bytes) i += 1;
    const share = Math.log(bytes / sizes[i - 1]) / Math.log(sizes[i] / sizes[i - 1]);
    return times[i - 1] * (times[i] / times[i - 1]) ** share;
  },

  /** One step whose gradients travel in the groups that end at `ends`: messages and totals, in seconds. */
  play(net, ends, wire, scale) {
    const ready = model.ready(net, scale), messages = [];
    let free = 0, first = 0;
    for (const end of ends) {
      const bytes = net.bytes.slice(first, end).reduce((a, b) => a + b, 0);
      const begin = Math.max(free, ready[end - 1]);
      free = begin + model.message(wire, bytes);
      messages.push({ first, end, bytes, begin, stop: free });
      first = end;
    }
    const update = net.update_s * scale, computed = ready[ready.length - 1];
    const iteration = free + update, compute = computed + update;
    return { messages, ready, computed, iteration, compute, exposed: iteration - compute };
  },

  /** Ends of the groups whose step is the shortest of all. `earliest[i]` is when the first i gradients can all have
      arrived at the earliest, and `start[i]` is the first gradient of the last group among them. */
  exact(net, wire, scale) {
    const ready = model.ready(net, scale), n = ready.length;
    const before = [0], earliest = [0], start = [0];
    for (const bytes of net.bytes) before.push(before[before.length - 1] + bytes);
    for (let i = 1; i <= n; i++) {
      earliest.push(Infinity);
      start.push(0);
      for (let j = 0; j < i; j++) {
        const cost = model.message(wire, before[i] - before[j]);
        const end = Math.max(earliest[j], ready[i - 1]) + cost;
        if (end < earliest[i]) [earliest[i], start[i]] = [end, j];
      }
    }
    const ends = [n];
    while (start[ends[0]] > 0) ends.unshift(start[ends[0]]);
    return ends;
  },

  /** PyTorch's rule: a bucket closes on reaching its cap, 1 MiB for the first and 25 MiB after it. */
  ddp(net) {
    const ends = [];
    let filled = 0, cap = MIB;
    net.bytes.forEach((bytes, i) => {
      filled += bytes;
      if (filled >= cap || i === net.bytes.length - 1) {
        ends.push(i + 1);
        [filled, cap] = [0, 25 * MIB];
      }
    });
    return ends;
  },

  /** A group closes before it would exceed the buffer; a larger gradient travels alone. */
  buffer(net, capacity) {
    const ends = [];
    let filled = 0;
    net.bytes.forEach((bytes, i) => {
      if (filled && filled + bytes > capacity) {
        ends.push(i);
        filled = 0;
      }
      filled += bytes;
    });
    return [...ends, net.bytes.length];
  },
};

/* ---- what the reader sees ---- */

const WIDTH = 1000, STRIP = 120, ROW = 34;
const byId = (id) => document.getElementById(id);
const state = { net: null, ends: [], wire: null, scale: 1, focus: -1, cases: {} };

/** Three significant digits with a unit that fits. */
function seconds(value) {
  const [factor, unit] = value >= 1 ? [1, "s"] : value >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return `${Number((value * factor).toPrecision(3))} ${unit}`;
}
const mebibytes = (bytes) => `${Number((bytes / MIB).toPrecision(3))} MiB`;
const escaped = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

const rect = (x, y, width, height, kind, title) =>
  `<rect x="${x}" y="${y}" width="${Math.max(width, 0.4)}" height="${height}" class="${kind}"><title>${escaped(title)}</title></rect>`;
const text = (x, y, words, anchor = "start") =>
  `<text x="${x}" y="${y}" text-anchor="${anchor}">${escaped(words)}</text>`;

/** Gradients as bars in the order in which they are ready; between two buckets stands a handle. */
function drawStrip() {
  const { net, ends } = state, n = net.bytes.length, step = WIDTH / n;
  const largest = Math.max(...net.bytes), inside = ends.slice(0, -1);
  let bucket = 0;
  const bars = net.bytes.map((bytes, i) => {
    if (i >= ends[bucket]) bucket += 1;
    const high = Math.max(2, (STRIP - 8) * Math.sqrt(bytes / largest));
    return rect(i * step + step * 0.08, STRIP - high, step * 0.84, high, `bucket${bucket % 2}`,
      `${net.names[i]}: ${mebibytes(bytes)}, bucket ${bucket + 1}`);
  });
  const handles = inside.map((cut, k) => {
    const chosen = k === Math.max(0, Math.min(state.focus, inside.length - 1));
    return `<g class="cut" data-cut="${k}" role="slider" tabindex="${chosen ? 0 : -1}" aria-valuemin="1"
      aria-valuemax="${n - 1}" aria-valuenow="${cut}" aria-label="end of bucket ${k + 1}, after ${escaped(net.names[cut - 1])}">
      <line x1="${cut * step}" x2="${cut * step}" y1="0" y2="${STRIP}"/><circle cx="${cut * step}" cy="6" r="5"/></g>`;
  });
  byId("strip").innerHTML = bars.join("") + handles.join("");
}

/** How large letters are, in units of a drawing that is WIDTH wide: 13 pixels on the screen, if there is room. */
function letters(svg) {
  const pixels = svg.getBoundingClientRect().width || WIDTH;
  return Math.min(30, (13 * WIDTH) / pixels);
}

/** Computing, the reader's messages and those of the best plan over one axis of time. */
function drawTimeline(mine, best) {
  const { net, scale } = state, span = Math.max(mine.iteration, best.iteration);
  const svg = byId("timeline"), size = letters(svg), left = 8.3 * size;
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${3 * ROW + 1.7 * size}`);
  svg.style.fontSize = `${size}px`;
  const at = (time) => left + (time / span) * (WIDTH - left - 6);
  const parts = [rect(at(mine.computed), 0, at(mine.computed + mine.exposed) - at(mine.computed), 3 * ROW,
    "exposed", `exposed: ${seconds(mine.exposed)}`)];
  parts.push(rect(at(0), 4, at(net.forward_s * scale) - at(0), ROW - 8, "forward", "forward"));
  mine.ready.forEach((end, i) => {
    const begin = i ? mine.ready[i - 1] : net.forward_s * scale;
    parts.push(rect(at(begin), 4, at(end) - at(begin), ROW - 8, `backward${i % 2}`, `backward: ${net.names[i]}`));
  });
  [mine, best].forEach((played, row) => {
    const high = (row + 1) * ROW + 4;
    played.messages.forEach((m, k) => {
      const title = `message ${k + 1}: ${mebibytes(m.bytes)}, ${seconds(m.begin)} to ${seconds(m.stop)}`;
      parts.push(rect(at(m.begin), high, at(m.stop) - at(m.begin), ROW - 8, `bucket${k % 2}`, title));
    });
    const updated = played.iteration - net.update_s * scale;
    if (net.update_s) parts.push(rect(at(updated), high, at(played.iteration) - at(updated), ROW - 8, "update", "update"));
  });
  ["computing", "your messages", "best plan"].forEach((name, row) =>
    parts.push(text(0, row * ROW + ROW / 2 + size / 3, name)));
  const ten = 10 ** Math.floor(Math.log10(span)), ticks = size > 20 ? 3 : 6;
  const every = [0.1, 0.2, 0.5, 1, 2, 5].find((m) => span / (m * ten) <= ticks) * ten;
  for (let time = 0; time <= span; time += every) {
    parts.push(`<line class="tick" x1="${at(time)}" x2="${at(time)}" y1="0" y2="${3 * ROW + 4}"/>`);
    parts.push(text(at(time), 3 * ROW + 1.4 * size, time ? seconds(time) : "0", time ? "middle" : "start"));
  }
  byId("timeline").innerHTML = parts.join("");
}

function draw() {
  const { net, ends, wire, scale } = state;
  const mine = model.play(net, ends, wire, scale);
  const best = model.play(net, model.exact(net, wire, scale), wire, scale);
  drawStrip();
  drawTimeline(mine, best);
  const above = (mine.iteration / best.iteration - 1) * 100;
  const told = {
    messages: `${ends.length}`,
    iteration: seconds(mine.iteration),
    compute: seconds(mine.compute),
    exposed: seconds(mine.exposed),
    scaling: (mine.compute / mine.iteration).toFixed(3),
    best: `${seconds(best.iteration)} with ${best.messages.length} message${best.messages.length > 1 ? "s" : ""}`,
    above: above < 5e-4 ? "0%: yours is as good" : `${Number(above.toPrecision(2))}%`,
    "alpha-told": seconds(wire.alpha_s),
    "beta-told": `${Number((wire.beta_s_per_byte * 1e9).toPrecision(3))} ns (${Number((8e-9 / wire.beta_s_per_byte).toPrecision(3))} Gbit/s)`,
    "scale-told": `${Number(scale.toPrecision(3))} x`,
    "buffer-told": mebibytes(2 ** byId("buffer").value * MIB),
  };
  for (const [id, words] of Object.entries(told)) byId(id).textContent = words;
}

/* ---- what the reader does ---- */

/** Put cut `k` at gradient `to`, and return its new number. On another cut or at an end it vanishes, so that two
    buckets become one, and -1 is returned. */
function move(k, to) {
  const { ends, net } = state, n = net.bytes.length;
  const others = ends.filter((_, i) => i !== k), gone = to < 1 || to >= n || others.includes(to);
  state.ends = gone ? others : [...others, to].sort((a, b) => a - b);
  state.focus = gone ? Math.min(k, state.ends.length - 2) : state.ends.indexOf(to);
  draw();
  return gone ? -1 : state.focus;
}

function column(event) {
  const box = byId("strip").getBoundingClientRect();
  return Math.round(((event.clientX - box.left) / box.width) * state.net.bytes.length);
}

function press(event) {
  const handle = event.target.closest(".cut");
  let k = handle ? Number(handle.dataset.cut) : -1;
  if (k < 0) {
    const to = column(event);
    if (to < 1 || to >= state.net.bytes.length) return;
    if (!state.ends.includes(to)) state.ends = [...state.ends, to].sort((a, b) => a - b);
    k = state.ends.indexOf(to);
    state.focus = k;
    draw();
  }
  const strip = byId("strip");
  strip.setPointerCapture(event.pointerId);
  strip.onpointermove = (moved) => {
    if (k >= 0 && column(moved) !== state.ends[k]) k = move(k, column(moved));
  };
  strip.onpointerup = strip.onpointercancel = () => {
    strip.onpointermove = null;
    focusCut();
  };
}

function focusCut() {
  const handle = byId("strip").querySelector(`[data-cut="${state.focus}"]`);
  if (handle) handle.focus();
}

function key(event) {
  const handle = event.target.closest(".cut");
  if (!handle) return;
  const k = Number(handle.dataset.cut), last = state.ends.length - 2;
  const steps = { ArrowLeft: -1, ArrowRight: 1 }, others = { ArrowUp: -1, ArrowDown: 1 };
  if (event.key in steps) move(k, state.ends[k] + steps[event.key]);
  else if (event.key === "Delete" || event.key === "Backspace") move(k, -1);
  else if (event.key in others) {
    state.focus = Math.max(0, Math.min(last, k + others[event.key]));
    drawStrip();
  } else return;
  event.preventDefault();
  focusCut();
}

/** Cut the largest bucket that has more than one gradient in two of about the same size: cuts without a mouse. */
function split() {
  const played = model.play(state.net, state.ends, state.wire, state.scale).messages;
  const wide = played.filter((m) => m.end - m.first > 1).sort((a, b) => b.bytes - a.bytes)[0];
  if (!wide) return;
  let filled = 0, cut = wide.first;
  while (cut < wide.end - 1 && (cut === wide.first || filled < wide.bytes / 2)) filled += state.net.bytes[cut++];
  state.ends = [...state.ends, cut].sort((a, b) => a - b);
  state.focus = state.ends.indexOf(cut);
  draw();
  focusCut();
}

const RULES = {
  none: () => state.net.bytes.map((_, i) => i + 1),
  single: () => [state.net.bytes.length],
  ddp: () => model.ddp(state.net),
  capped: () => model.buffer(state.net, 2 ** byId("buffer").value * MIB),
  exact: () => model.exact(state.net, state.wire, state.scale),
};

function choose(name) {
  const chosen = state.cases[name];
  Object.assign(state, { net: chosen, wire: { ...chosen.wire }, scale: 1, ends: chosen.ends, focus: 0 });
  byId("network").value = name;
  byId("alpha").value = Math.log10(chosen.wire.alpha_s);
  byId("beta").value = Math.log10(chosen.wire.beta_s_per_byte);
  byId("scale").value = 0;
  byId("about").textContent = chosen.about;
  draw();
}

/** The network that the address names, as in buckets.html#googlenet; the toy where it names none. */
function addressed() {
  const name = decodeURIComponent(location.hash.slice(1));
  return name in state.cases ? name : Object.keys(state.cases)[0];
}

/** Within another page show less, tell that page how high this one is, and take its colours. */
function fit() {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "dark" : "light";
  if (window.parent === window) return;
  root.classList.add("embedded");
  window.addEventListener("message", (event) => {
    if (event.data && event.data.theme) root.dataset.theme = event.data.theme;
  });
  const tell = () => window.parent.postMessage({ height: root.getBoundingClientRect().height }, "*");
  new ResizeObserver(tell).observe(root);
}

function begin() {
  state.cases = Object.fromEntries(JSON.parse(byId("cases").textContent));
  const list = byId("network");
  for (const name of Object.keys(state.cases)) list.add(new Option(name, name));
  list.onchange = () => choose(list.value);
  byId("alpha").oninput = (e) => { state.wire.alpha_s = 10 ** e.target.value; draw(); };
  byId("beta").oninput = (e) => { state.wire.beta_s_per_byte = 10 ** e.target.value; draw(); };
  byId("scale").oninput = (e) => { state.scale = 10 ** e.target.value; draw(); };
  byId("buffer").oninput = () => { state.ends = RULES.capped(); draw(); };
  for (const [id, rule] of Object.entries(RULES)) byId(id).onclick = () => { state.ends = rule(); state.focus = 0; draw(); };
  byId("split").onclick = split;
  byId("strip").onpointerdown = press;
  byId("strip").onkeydown = key;
  window.addEventListener("hashchange", () => choose(addressed()));
  window.addEventListener("resize", draw);
  fit();
  choose(addressed());
}
begin();
