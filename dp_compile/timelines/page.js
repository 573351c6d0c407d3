"use strict";
// Draws the data of the page: times in ms after the start of the backward. A transfer is a row of numbers:
// [bucket, lane, launch, start, finish or null, exposed, row, critical].
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const [BUCKET, LANE, LAUNCH, START, FINISH, EXPOSED, ROW, CRITICAL] = [0, 1, 2, 3, 4, 5, 6, 7];
  const element = (id) => document.getElementById(id);
  const canvas = element("chart"), figure = canvas.parentElement, context = canvas.getContext("2d");
  const tooltip = element("tooltip"), selectedPanel = element("selected"), spoken = element("spoken");
  const GUTTER = 158, RIGHT = 16, AXIS = 26, TITLE = 46, BAR = 26, TICKS = 9, GAP = 8, VIEW_GAP = 14, QUEUE = 84;
  const FONT = '12px system-ui, "Segoe UI", "Helvetica Neue", "DejaVu Sans", Arial, sans-serif';
  const span = data.end - data.start || 1;
  const whole = { from: data.start - 0.01 * span, to: data.end + 0.02 * span };
  let range = { ...whole }, width = 0, height = 0, colours = {}, bands = [], hovered = null, selected = null;
  let pending = false;

  // --- words ---

  const time = (ms) => {
    if (!ms) return "0 ms";
    const digits = Math.min(Math.max(0, 2 - Math.floor(Math.log10(Math.abs(ms)))), 9);
    return `${ms.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ms`;
  };
  const bytes = (n) => {
    for (const unit of ["B", "KiB", "MiB"]) {
      if (n < 1024) return (unit === "B" ? n.toFixed(0) : n.toFixed(1)) + " " + unit;
      n /= 1024;
    }
    return n.toFixed(1) + " GiB";
  };
  const made = (tag, attributes, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  const exposedFrom = (transfer) => transfer[FINISH] - transfer[EXPOSED];

  function description(number, members) {
    const bucket = data.buckets[number], gradients = bucket.members.length;
    const facts = `${bytes(bucket.bytes)}, ${gradients} ${gradients === 1 ? "gradient" : "gradients"}, ${bucket.key}`;
    const rows = data.views.map((view) => {
      const seen = view.transfers[number];
      if (!seen) return "";
      const after = [seen[LAUNCH], seen[START]].map(time);
      after.push(seen[FINISH] === null ? "not seen" : time(seen[FINISH]), time(seen[EXPOSED]));
      const cells = [...after, seen[CRITICAL] ? "yes" : "no"].map((text) => made("td", {}, text));
      return made("tr", {}, made("th", { scope: "row" }, view.name), ...cells);
    });
    const heads = ["", "ready, launched", "on the network", "finished", "exposed", "critical path"];
    const times = made("table", { class: "times" }, made("tr", {}, ...heads.map((text) => made("th", {}, text))),
      ...rows);
    const shown = bucket.members.slice(0, members);
    const list = made("ul", { class: "members" },
      ...shown.map(([name, size]) => made("li", {}, name, made("span", {}, bytes(size)))));
    if (shown.length < gradients) list.append(made("li", { class: "dim" }, `and ${gradients - shown.length} more`));
    return [made("h2", {}, `bucket ${number}`), made("div", {}, facts), times,
      made("div", { class: "dim" }, `ends here: ${bucket.reason}`), list];
  }

  // --- where things are ---

  const x = (ms) => GUTTER + ((ms - range.from) / (range.to - range.from)) * (width - GUTTER - RIGHT);
  const at = (px) => range.from + ((px - GUTTER) / (width - GUTTER - RIGHT)) * (range.to - range.from);

  function layOut() {
    for (const old of figure.querySelectorAll(".lane, .view")) old.remove();
    bands = [];
    let y = AXIS;
    const label = (top, high, text, kind, note) => {
      const node = made("div", { class: kind, style: `top:${top}px;line-height:${high}px`, title: text }, text);
      if (note) node.append(made("span", {}, note));
      figure.append(node);
    };
    for (const view of data.views) {
      const band = { view, top: y, networks: [] };
      label(y + 6, 20, view.name, "view", view.summary);
      y += TITLE;
      band.compute = y;
      label(y, BAR, "compute", "lane");
      y += BAR + TICKS;
      if (view.rows) {
        band.queue = { top: y, high: Math.min(QUEUE, 14 * view.rows) };
        label(y, Math.max(band.queue.high, 16), "waiting for the network", "lane");
        y += Math.max(band.queue.high, 16) + GAP;
      }
      for (const name of data.lanes) {
        band.networks.push(y);
        label(y, BAR, name, "lane");
        y += BAR + GAP;
      }
      band.bottom = y;
      bands.push(band);
      y += VIEW_GAP;
    }
    height = y;
    canvas.style.height = `${height}px`;
  }

  function hit(px, py) {
    if (px < GUTTER) return null;
    const band = bands.find((each) => py >= each.compute && py < each.bottom);
    if (!band) return null;
    const lane = band.networks.findIndex((top) => py >= top - GAP / 2 && py < top + BAR + GAP / 2);
    const queued = band.queue && py >= band.queue.top && py < band.queue.top + band.queue.high;
    const row = queued ? Math.floor(((py - band.queue.top) / band.queue.high) * band.view.rows) : -1;
    let best = null, nearest = 4;
    for (const each of band.view.transfers) {
      if (queued ? each[ROW] !== row || each[START] <= each[LAUNCH] : lane >= 0 && each[LANE] !== lane) continue;
      const [from, to] = queued ? [each[LAUNCH], each[START]]
        : lane >= 0 ? [each[START], each[FINISH] ?? each[START]] : [each[LAUNCH], each[LAUNCH]];
      const away = Math.max(x(from) - px, px - x(to), 0);
      if (away < nearest) [best, nearest] = [each, away];
    }
    return best && best[BUCKET];
  }

  // --- drawing ---

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["paper", "ink", "dim", "rule", "compute", "on-compute", "network", "on-network", "exposed",
      "on-exposed", "band", "waiting", "waiting-edge"]) colours[name] = style.getPropertyValue(`--${name}`).trim();
  }

  function steps() {
    const rough = (range.to - range.from) / Math.max(2, (width - GUTTER) / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  }

  function drawAxis() {
    const step = steps(), digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    context.textAlign = "center";
    for (let tick = Math.ceil(range.from / step); tick * step <= range.to; tick++) {
      const px = Math.round(x(tick * step)) + 0.5;
      context.fillStyle = colours.rule;
      context.fillRect(px - 0.5, AXIS - 5, 1, height - AXIS + 5);
      context.fillStyle = colours.dim;
      context.fillText(`${(tick * step).toFixed(digits)} ms`, px, AXIS / 2);
    }
  }

  function box(from, to, top, high, fill, text, on) {
    const left = Math.max(x(from), GUTTER - 2), right = Math.min(x(to), width);
    if (right < GUTTER - 1 || left > width || right < left) return;
    const wide = right - left;
    context.fillStyle = fill;
    context.fillRect(left, top, Math.max(wide - (wide > 5 ? 1 : 0), 1), high);
    const fits = text && wide > 14 ? text.find((each) => context.measureText(each).width < wide - 10) : null;
    if (!fits) return;
    context.fillStyle = on;
    context.textAlign = "center";
    context.fillText(fits, left + wide / 2, top + high / 2 + 1);
  }

  function drawCompute(band) {
    const { view, compute } = band;
    const named = (name, ms) => [`${name} ${time(ms)}`, name];
    const plain = (from, to, name) =>
      box(from, to, compute, BAR, colours.compute, named(name, to - from), colours["on-compute"]);
    if (view.forward) plain(-view.forward, 0, "forward");
    plain(0, view.backward, "backward");
    if (view.optimizer) plain(view.end, view.end + view.optimizer, "optimizer");
    for (const [from, to] of view.stalls) {
      if (from < view.backward) box(from, Math.min(to, view.backward), compute, BAR, colours.exposed, ["waits"],
        colours["on-exposed"]);
    }
    context.fillStyle = colours.dim;
    let last = -2;
    for (const each of view.transfers) {
      const px = x(each[LAUNCH]);
      if (px < GUTTER || px > width || px - last < 1) continue;
      context.fillRect(px - 0.5, compute + BAR, 1, TICKS - 3);
      last = px;
    }
  }

  function drawQueue(band) {
    const { view, queue } = band;
    if (!queue) return;
    const high = queue.high / view.rows;
    for (const each of view.transfers) {
      if (each[START] <= each[LAUNCH]) continue;
      const left = Math.max(x(each[LAUNCH]), GUTTER), wide = Math.max(x(each[START]) - left, 1);
      if (left > width || left + wide < GUTTER) continue;
      const top = queue.top + each[ROW] * high;
      context.fillStyle = high > 3 ? colours.waiting : colours["waiting-edge"];
      context.fillRect(left, top, wide, Math.max(high - (high > 6 ? 2 : 0), 0.4));
      if (high <= 6 || wide < 3) continue;
      context.strokeStyle = colours["waiting-edge"];
      context.strokeRect(left + 0.5, top + 0.5, wide - 1, high - 3);
      if (wide > 30 && high > 11) {
        context.fillStyle = colours.ink;
        context.textAlign = "center";
        context.fillText(String(each[BUCKET]), left + wide / 2, top + high / 2 - 0.5);
      }
    }
  }

  function drawNetwork(band) {
    const last = band.networks.map(() => -2);
    for (const each of band.view.transfers) {
      const top = band.networks[each[LANE]], left = x(each[START]);
      if (each[FINISH] === null) {
        if (left < GUTTER || left > width) continue;
        context.fillStyle = colours.network;
        context.beginPath();
        context.moveTo(left, top);
        context.lineTo(left + 9, top + BAR / 2);
        context.lineTo(left, top + BAR);
        context.fill();
        continue;
      }
      const right = x(each[FINISH]);
      if (right < GUTTER || left > width || right <= last[each[LANE]] + 0.5) continue;
      last[each[LANE]] = right;
      const bucket = data.buckets[each[BUCKET]];
      const text = [`${each[BUCKET]}: ${bytes(bucket.bytes)}, ${time(each[FINISH] - each[START])}`,
        `${each[BUCKET]}: ${bytes(bucket.bytes)}`, String(each[BUCKET])];
      const turn = each[EXPOSED] ? Math.max(each[START], exposedFrom(each)) : each[FINISH];
      const hidden = turn - each[START], shown = each[FINISH] - turn;
      if (hidden > 0 || !shown) {
        box(each[START], turn, top, BAR, colours.network, hidden >= shown ? text : null, colours["on-network"]);
      }
      if (shown > 0) {
        box(turn, each[FINISH], top, BAR, colours.exposed, hidden < shown ? text : null, colours["on-exposed"]);
      }
    }
  }

  function drawExposed(band) {
    const { view } = band;
    for (const [from, to] of view.stalls) {
      const left = Math.max(x(from), GUTTER), right = Math.min(x(to), width);
      if (right <= left) continue;
      context.fillStyle = colours.band;
      context.fillRect(left, band.top + 28, right - left, band.bottom - band.top - 28);
      const text = `${time(to - from)} exposed`, wide = context.measureText(text).width;
      if (view.stalls.length > 1 && wide > right - left) continue;
      context.fillStyle = colours.exposed;
      context.textAlign = "left";
      const centre = (left + right - wide) / 2;
      context.fillText(text, Math.min(Math.max(centre, GUTTER), width - wide - 4), band.top + 38);
    }
  }

  function drawCritical(band) {
    const { view } = band;
    context.fillStyle = colours.ink;
    const line = (from, to, top) => {
      const left = Math.max(x(from), GUTTER), right = Math.min(x(to), width);
      if (right > left) context.fillRect(left, top, right - left, 3);
    };
    if (view.critical) line(view.critical[0], view.critical[1], band.compute + BAR - 1);
    let first = null;
    for (const each of view.transfers) {
      if (!each[CRITICAL]) continue;
      first = first || each;
      line(each[START], each[FINISH], band.networks[each[LANE]] - 2);
    }
    if (first) {
      const px = x(first[LAUNCH]), top = band.compute + BAR - 1;
      if (px >= GUTTER && px <= width) context.fillRect(px - 1.5, top, 3, band.networks[first[LANE]] + 1 - top);
    }
    const end = Math.round(x(view.backward)) + 0.5;
    if (end < GUTTER) return;
    context.strokeStyle = colours.ink;
    context.setLineDash([4, 3]);
    context.beginPath();
    context.moveTo(end, band.compute - 4);
    context.lineTo(end, band.bottom - 2);
    context.stroke();
    context.setLineDash([]);
  }

  function drawMarked(band, number) {
    const each = band.view.transfers[number];
    if (!each) return;
    const top = band.networks[each[LANE]], right = x(each[FINISH] ?? each[START]);
    context.strokeStyle = colours.ink;
    context.lineWidth = 2;
    const frame = (left, to, y, high) => {
      if (to >= GUTTER && left <= width) context.strokeRect(left - 1, y - 1, Math.max(to - left, 1) + 1, high + 2);
    };
    frame(x(each[START]), right, top, BAR);
    if (band.queue && each[START] > each[LAUNCH]) {
      const high = band.queue.high / band.view.rows;
      frame(x(each[LAUNCH]), x(each[START]), band.queue.top + each[ROW] * high, Math.max(high - 2, 1));
    }
    frame(x(each[LAUNCH]), x(each[LAUNCH]), band.compute + BAR, TICKS - 3);
    context.lineWidth = 1;
  }

  function draw() {
    pending = false;
    const ratio = window.devicePixelRatio || 1;
    width = figure.clientWidth;
    const [wide, high] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = FONT;
    context.textBaseline = "middle";
    context.save();
    context.beginPath();
    context.rect(GUTTER - 2, 0, width - GUTTER + 2, height);
    context.clip();
    drawAxis();
    for (const band of bands) {
      drawExposed(band);
      drawCompute(band);
      drawQueue(band);
      drawNetwork(band);
      drawCritical(band);
      for (const number of new Set([selected, hovered])) if (number !== null) drawMarked(band, number);
    }
    context.restore();
  }
  const redraw = () => {
    if (!pending) requestAnimationFrame(draw);
    pending = true;
  };

  // --- zoom, pan, hover, keys ---

  function show(from, to) {
    const length = Math.min(Math.max(to - from, span * 1e-6), whole.to - whole.from);
    const start = Math.min(Math.max(from, whole.from), whole.to - length);
    range = { from: start, to: start + length };
    redraw();
  }
  const zoom = (factor, centre) =>
    show(centre - (centre - range.from) * factor, centre + (range.to - centre) * factor);
  const zoomMiddle = (factor) => zoom(factor, (range.from + range.to) / 2);
  const pan = (ms) => show(range.from + ms, range.to + ms);

  function point(number, px, py) {
    if (number !== hovered) redraw();
    hovered = number;
    tooltip.hidden = number === null;
    if (number === null) return;
    if (tooltip.dataset.bucket !== String(number)) tooltip.replaceChildren(...description(number, 10));
    tooltip.dataset.bucket = number;
    const { offsetWidth, offsetHeight } = tooltip;
    const left = px + 16 + offsetWidth < innerWidth ? px + 16 : Math.max(4, px - 16 - offsetWidth);
    const top = py + 16 + offsetHeight < innerHeight ? py + 16 : Math.max(4, py - 16 - offsetHeight);
    Object.assign(tooltip.style, { left: `${left}px`, top: `${top}px` });
  }

  function select(number) {
    selected = number;
    selectedPanel.hidden = number === null;
    redraw();
    if (number === null) return;
    selectedPanel.replaceChildren(...description(number, Infinity));
    const bucket = data.buckets[number], seen = data.views[0].transfers[number], length = range.to - range.from;
    spoken.textContent = `bucket ${number}, ${bytes(bucket.bytes)}, ${bucket.members.length} members, first ` +
      `${bucket.members[0][0]}, ready ${time(seen[LAUNCH])}, on the network ${time(seen[START])} to ` +
      `${time(seen[FINISH])}, ${time(seen[EXPOSED])} exposed`;
    if (seen[LAUNCH] < range.from || seen[FINISH] > range.to) {
      const middle = (seen[START] + seen[FINISH]) / 2;
      show(middle - length / 2, middle + length / 2);
    }
  }

  const KEYS = {
    ArrowRight: () => select(Math.min((selected ?? -1) + 1, data.buckets.length - 1)),
    ArrowLeft: () => select(Math.max((selected ?? 1) - 1, 0)),
    Home: () => select(0),
    End: () => select(data.buckets.length - 1),
    Escape: () => select(null),
    "+": () => zoomMiddle(0.7),
    "=": () => zoomMiddle(0.7),
    "-": () => zoomMiddle(1 / 0.7),
    "0": () => show(whole.from, whole.to),
    PageDown: () => pan((range.to - range.from) / 2),
    PageUp: () => pan((range.from - range.to) / 2),
  };
  canvas.addEventListener("keydown", (event) => {
    if (!KEYS[event.key] || event.ctrlKey || event.metaKey || event.altKey || !data.buckets.length) return;
    event.preventDefault();
    KEYS[event.key]();
  });

  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    drag = { from: event.clientX, last: event.clientX, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const area = canvas.getBoundingClientRect();
    if (!drag) {
      point(hit(event.clientX - area.left, event.clientY - area.top), event.clientX, event.clientY);
      return;
    }
    drag.moved = drag.moved || Math.abs(event.clientX - drag.from) > 3;
    if (!drag.moved) return;
    canvas.classList.add("dragging");
    point(null);
    pan(at(drag.last) - at(event.clientX));
    drag.last = event.clientX;
  });
  canvas.addEventListener("pointerup", (event) => {
    const area = canvas.getBoundingClientRect();
    if (drag && !drag.moved) select(hit(event.clientX - area.left, event.clientY - area.top));
    drag = null;
    canvas.classList.remove("dragging");
  });
  canvas.addEventListener("pointercancel", () => { drag = null; canvas.classList.remove("dragging"); });
  canvas.addEventListener("pointerleave", () => point(null));
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const area = canvas.getBoundingClientRect();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      pan(((event.deltaX || event.deltaY) / width) * (range.to - range.from));
    } else {
      zoom(Math.exp(Math.max(-100, Math.min(100, event.deltaY)) * 0.003), at(Math.max(event.clientX - area.left, GUTTER)));
    }
  }, { passive: false });
  canvas.addEventListener("dblclick", () => show(whole.from, whole.to));
  element("closer").addEventListener("click", () => zoomMiddle(0.5));
  element("farther").addEventListener("click", () => zoomMiddle(2));
  element("whole").addEventListener("click", () => show(whole.from, whole.to));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); redraw(); });
  addEventListener("resize", redraw);

  readColours();
  layOut();
  draw();
})();
