"use strict";
// Draws the data of the page: times in ms after the start of the backward, or in percent of a backward that nobody has
// timed (`assumed`); then everything is hatched. A transfer is a row of numbers:
// [bucket, lane, launch, start, finish or null, exposed, row, critical]. A box is what is drawn in a network lane, in the
// order of the starts: a transfer, or a stage of one as another such row.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const [BUCKET, LANE, LAUNCH, START, FINISH, EXPOSED, ROW, CRITICAL] = [0, 1, 2, 3, 4, 5, 6, 7];
  const element = (id) => document.getElementById(id);
  const canvas = element("chart"), figure = canvas.parentElement, context = canvas.getContext("2d");
  const tooltip = element("tooltip"), selectedPanel = element("selected"), spoken = element("spoken");
  const GUTTER = 158, RIGHT = 16, AXIS = 26, TITLE = 46, BAR = 26, TICKS = 9, GAP = 8, VIEW_GAP = 14;
  const ROW_HIGH = 14, MOST_ROWS = 6, DEPTH = 60;
  const FONT = '12px system-ui, "Segoe UI", "Helvetica Neue", "DejaVu Sans", Arial, sans-serif';
  const span = data.end - data.start || 1;
  const whole = { from: data.start - 0.01 * span, to: data.end + 0.02 * span };
  let range = { ...whole }, width = 0, height = 0, colours = {}, bands = [], hovered = null, selected = null;
  let pending = false;

  // --- words ---

  const time = (ms) => {
    if (data.assumed) return `${Number(ms.toPrecision(3))}%`;
    if (!ms) return "0 ms";
    const digits = Math.min(Math.max(0, 2 - Math.floor(Math.log10(Math.abs(ms)))), 9);
    return `${ms.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ms`;
  };
  const made = (tag, attributes, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  const exposedFrom = (transfer) => transfer[FINISH] - transfer[EXPOSED];

  function description(number, members) {
    const bucket = data.buckets[number], count = bucket.members.length;
    const facts = `${bucket.size}, ${count} ${count === 1 ? "member" : "members"}, ${bucket.key}`;
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
      ...shown.map(([name, size]) => made("li", {}, name, made("span", {}, size))));
    if (shown.length < count) list.append(made("li", { class: "dim" }, `and ${count - shown.length} more`));
    return [made("h2", {}, `bucket ${number}`), made("div", {}, facts), times,
      made("div", { class: "dim" }, `ends here: ${bucket.reason}`), list];
  }

  // --- where things are ---

  const x = (ms) => GUTTER + ((ms - range.from) / (range.to - range.from)) * (width - GUTTER - RIGHT);
  const at = (px) => range.from + ((px - GUTTER) / (width - GUTTER - RIGHT)) * (range.to - range.from);

  const waiting = (view) => view.transfers.filter((each) => each[START] > each[LAUNCH]);

  // How many buckets wait, from each time on.
  function depths(view) {
    const changes = waiting(view).flatMap((each) => [[each[LAUNCH], 1], [each[START], -1]]);
    changes.sort((one, two) => one[0] - two[0] || one[1] - two[1]);
    let depth = 0;
    return changes.map(([ms, change]) => [ms, (depth += change)]);
  }

  function layOut() {
    for (const old of figure.querySelectorAll(".lane, .view")) old.remove();
    bands = [];
    let y = AXIS;
    const label = (top, high, text, kind, note) => {
      const node = made("div", { class: kind, style: `top:${top}px;line-height:${high}px`, title: text }, text);
      if (note) node.append(" ", made("span", {}, note));
      figure.append(node);
    };
    for (const view of data.views) {
      const band = { view, top: y, networks: [], queue: null, depth: [] };
      label(y + 6, 20, view.name, "view", view.summary);
      y += TITLE;
      band.compute = y;
      label(y, BAR, "compute", "lane");
      y += BAR + TICKS;
      band.strips = y;
      for (const [name] of view.strips) {
        label(y, ROW_HIGH, name, "lane");
        y += ROW_HIGH + GAP;
      }
      if (view.rows) {
        const crowded = view.rows > MOST_ROWS;
        band.queue = { top: y, high: crowded ? DEPTH : ROW_HIGH * view.rows, crowded };
        band.depth = crowded ? depths(view) : [];
        label(y, 16, crowded ? `waiting, up to ${view.rows}` : "waiting", "lane");
        y += band.queue.high + GAP;
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

  function nearest(transfers, px, interval) {
    let best = null, least = 4;
    for (const each of transfers) {
      const [from, to] = interval(each);
      const away = Math.max(x(from) - px, px - x(to), 0);
      if (away < least) [best, least] = [each, away];
    }
    return best && best[BUCKET];
  }

  function hitQueue({ view, queue }, px, py) {
    const share = (py - queue.top) / queue.high;
    if (!queue.crowded) {
      const row = Math.floor(share * view.rows);
      return nearest(waiting(view).filter((each) => each[ROW] === row), px, (each) => [each[LAUNCH], each[START]]);
    }
    const ms = at(px), there = waiting(view).filter((each) => each[LAUNCH] <= ms && ms < each[START]);
    const place = Math.floor((1 - share) * view.rows);
    return place < there.length ? there[place][BUCKET] : null;
  }

  function hit(px, py) {
    const band = px < GUTTER ? null : bands.find((each) => py >= each.compute && py < each.bottom);
    if (!band) return null;
    const { view, queue } = band;
    if (queue && py >= queue.top && py < queue.top + queue.high) return hitQueue(band, px, py);
    const lane = band.networks.findIndex((top) => py >= top - GAP / 2 && py < top + BAR + GAP / 2);
    if (lane < 0) return nearest(view.transfers, px, (each) => [each[LAUNCH], each[LAUNCH]]);
    const inLane = view.boxes.filter((each) => each[LANE] === lane);
    return nearest(inLane, px, (each) => [each[START], each[FINISH] ?? each[START]]);
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
      const px = Math.round(x(tick * step));
      context.fillStyle = colours.rule;
      context.fillRect(px, AXIS - 5, 1, 5);
      for (const band of bands) context.fillRect(px, band.compute - 6, 1, band.bottom - band.compute + 6);
      context.fillStyle = colours.dim;
      context.fillText(`${(tick * step).toFixed(digits)}${data.assumed ? "%" : " ms"}`, px, AXIS / 2);
    }
  }

  // Narrow boxes are set on whole pixels, so that many of them make an even bar. `text` makes the texts to choose
  // from, longest first: making them is what takes time, so only boxes with room for one do.
  function box(from, to, top, high, fill, text, on) {
    let left = Math.max(x(from), GUTTER - 2), right = Math.min(x(to), width);
    if (right < GUTTER - 1 || left > width || right < left) return;
    if (right - left > 5) right -= 1;
    else [left, right] = [Math.floor(left), Math.max(Math.ceil(right), Math.floor(left) + 1)];
    context.fillStyle = fill;
    context.fillRect(left, top, right - left, high);
    const wide = right - left;
    if (data.assumed) hatch(left, top, wide, high);
    const fits = text && wide > 14 ? text().find((each) => context.measureText(each).width < wide - 8) : null;
    if (!fits) return;
    context.fillStyle = on;
    context.textAlign = "center";
    context.fillText(fits, left + wide / 2, top + high / 2 + 1);
  }

  function hatch(left, top, wide, high) {
    context.save();
    context.beginPath();
    context.rect(left, top, wide, high);
    context.clip();
    context.strokeStyle = colours.paper;
    context.globalAlpha = 0.45;
    context.beginPath();
    for (let px = Math.floor((left - high) / 8) * 8; px < left + wide; px += 8) {
      context.moveTo(px, top + high);
      context.lineTo(px + high, top);
    }
    context.stroke();
    context.restore();
  }

  function drawStrips({ view, strips }) {
    view.strips.forEach(([, layers], i) => drawStrip(layers, strips + i * (ROW_HIGH + GAP)));
  }

  function drawStrip(layers, top) {
    layers.forEach(([name, from, to], i) => {
      const left = Math.max(x(from), GUTTER - 2), right = Math.min(x(to), width);
      if (right <= left) return;
      context.fillStyle = i % 2 ? colours.waiting : colours.rule;
      context.fillRect(left, top, right - left, ROW_HIGH);
      const fits = [`${name} ${time(to - from)}`, name, name.split(".").pop()]
        .find((each) => context.measureText(each).width < right - left - 6);
      if (!fits) return;
      context.fillStyle = colours.ink;
      context.textAlign = "center";
      context.fillText(fits, (left + right) / 2, top + ROW_HIGH / 2 + 1);
    });
  }

  function drawCompute(band) {
    const { view, compute } = band;
    const named = (name, ms) => (name ? () => [`${name} ${time(ms)}`, name] : null);
    const plain = (from, to, name, ms) =>
      box(from, to, compute, BAR, colours.compute, named(name, ms), colours["on-compute"]);
    if (view.forward) plain(-view.forward, 0, "forward", view.forward);
    for (const [name, first, last] of view.computing) {
      const stalls = view.stalls.filter(([from, to]) => from < last && to > first);
      const starts = [first, ...stalls.map(([, to]) => to)], ends = [...stalls.map(([from]) => from), last];
      const computes = starts.reduce((sum, from, i) => sum + Math.max(0, ends[i] - from), 0);
      const longest = starts.reduce((best, from, i) => (ends[i] - from > ends[best] - starts[best] ? i : best), 0);
      starts.forEach((from, i) => {
        if (ends[i] > from) plain(from, ends[i], i === longest ? name : "", computes);
      });
      for (const [from, to] of stalls) {
        box(Math.max(from, first), Math.min(to, last), compute, BAR, colours.exposed,
          named("waits", to - from), colours["on-exposed"]);
      }
    }
    if (view.optimizer) plain(...view.optimizer, "optimizer", view.optimizer[1] - view.optimizer[0]);
    context.fillStyle = colours.dim;
    let last = -2;
    for (const each of view.transfers) {
      const px = x(each[LAUNCH]);
      if (px < GUTTER || px > width || px - last < 3) continue;
      context.fillRect(px - 0.5, compute + BAR, 1, TICKS - 3);
      last = px;
    }
  }

  function drawQueue(band) {
    const { view, queue } = band;
    if (!queue) return;
    if (queue.crowded) {
      drawDepth(band);
      return;
    }
    for (const each of waiting(view)) {
      const left = Math.max(x(each[LAUNCH]), GUTTER - 2), wide = Math.max(x(each[START]) - left, 1);
      if (left > width || left + wide < GUTTER) continue;
      const top = queue.top + each[ROW] * ROW_HIGH, high = ROW_HIGH - 2;
      context.fillStyle = colours.waiting;
      context.fillRect(left, top, wide, high);
      context.strokeStyle = colours["waiting-edge"];
      if (wide > 3) context.strokeRect(left + 0.5, top + 0.5, wide - 1, high - 1);
      context.fillStyle = colours.ink;
      context.textAlign = "center";
      if (wide > 26) context.fillText(String(each[BUCKET]), left + wide / 2, top + high / 2 + 1);
    }
  }

  function drawDepth({ view, queue, depth }) {
    const bottom = queue.top + queue.high;
    let level = bottom;
    context.beginPath();
    context.moveTo(x(depth[0][0]), bottom);
    for (const [ms, count] of depth) {
      const px = x(ms);
      context.lineTo(px, level);
      level = bottom - (count / view.rows) * queue.high;
      context.lineTo(px, level);
    }
    context.fillStyle = colours.waiting;
    context.strokeStyle = colours["waiting-edge"];
    context.fill();
    context.stroke();
  }

  function drawNetwork(band) {
    const last = band.networks.map(() => -2);
    for (const each of band.view.boxes) {
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
      const text = () => {
        const short = `${each[BUCKET]}: ${data.buckets[each[BUCKET]].size}`;
        return [`${short}, ${time(each[FINISH] - each[START])}`, short, String(each[BUCKET])];
      };
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
      const left = Math.floor(Math.max(x(from), GUTTER - 2)), right = Math.ceil(Math.min(x(to), width));
      if (right > left) context.fillRect(left, top, right - left, 3);
    };
    if (view.critical) line(view.critical[0], view.critical[1], band.compute + BAR - 1);
    let first = null;
    for (const each of view.boxes) {
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
    context.strokeStyle = colours.ink;
    context.lineWidth = 2;
    const frame = (left, to, y, high) => {
      if (to >= GUTTER && left <= width) context.strokeRect(left - 1, y - 1, Math.max(to - left, 1) + 1, high + 2);
    };
    for (const box of band.view.boxes.filter((one) => one[BUCKET] === number)) {
      frame(x(box[START]), x(box[FINISH] ?? box[START]), band.networks[box[LANE]], BAR);
    }
    if (band.queue && each[START] > each[LAUNCH]) {
      const { top: first, high, crowded } = band.queue;
      const row = crowded ? first + high - 4 : first + each[ROW] * ROW_HIGH;
      frame(x(each[LAUNCH]), x(each[START]), row, crowded ? 3 : ROW_HIGH - 2);
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
    drawAxis();
    context.save();
    context.beginPath();
    context.rect(GUTTER - 2, AXIS, width - GUTTER + 2, height);
    context.clip();
    for (const band of bands) {
      drawExposed(band);
      drawCompute(band);
      drawStrips(band);
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
    spoken.textContent = `bucket ${number}, ${bucket.size}, ${bucket.members.length} members, first ` +
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
