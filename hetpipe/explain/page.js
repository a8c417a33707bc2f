"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const canvas = document.getElementById("timeline"), tip = document.getElementById("tip");
  const pen = canvas.getContext("2d");
  const ROW = 26, THIN = 6, MEMORY = 34, HEAD = 24, GAP = 10, AXIS = 24, LEFT = 84, RIGHT = 12;
  const PASSES = data.kinds.map((kind) => kind.pass), WAIT = data.kinds.findIndex((kind) => kind.name === "wait");
  const whole = [0, data.end || 1];
  let view = [...whole], colours = {}, width = 0, boxes = [], held = null;

  // Every row knows its place from the top; a device has a head, its rows, and its memory.
  let height = AXIS;
  const rows = [], memories = [], heads = [];
  for (const device of data.devices) {
    heads.push({ top: height, text: device.name, more: device.layers });
    height += HEAD;
    for (const row of device.rows) {
      rows.push({ ...row, device: device.name, top: height });
      height += ROW + THIN + 5;
    }
    if (device.memory) {
      memories.push({ ...device.memory, device: device.name, top: height + 2 });
      height += MEMORY + 4;
    }
    height += GAP;
  }

  const x = (time) => LEFT + ((time - view[0]) / (view[1] - view[0])) * (width - LEFT - RIGHT);
  const time = (px) => view[0] + ((px - LEFT) / (width - LEFT - RIGHT)) * (view[1] - view[0]);

  function seconds(us, digits = 3) {
    const size = Math.abs(us);
    const [unit, name] = size >= 1e6 ? [1e6, " s"] : size >= 1e3 ? [1e3, " ms"] : [1, " us"];
    return Number((us / unit).toPrecision(digits)) + name;
  }
  function bytes(count) {
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (count < 1000) return Number(count.toPrecision(3)) + " " + unit;
      count /= 1024;
    }
    return Number(count.toPrecision(3)) + " TiB";
  }

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["ground", "ink", "soft", "line", "panel", "link", "on-bar"]) colours[name] = style.getPropertyValue("--" + name);
    for (const kind of data.kinds) colours[kind.name] = style.getPropertyValue("--" + kind.css);
  }

  function fit() {
    const ratio = window.devicePixelRatio || 1;
    width = canvas.parentElement.clientWidth;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    draw();
  }

  function draw() {
    pen.fillStyle = colours.ground;
    pen.fillRect(0, 0, width, height);
    pen.font = "12px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif";
    pen.textBaseline = "middle";
    boxes = [];
    drawAxis();
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, width - LEFT - RIGHT, height);
    pen.clip();
    rows.forEach(drawBars);
    memories.forEach(drawMemory);
    pen.restore();
    pen.textAlign = "left";
    for (const head of heads) {
      pen.fillStyle = colours.ink;
      pen.font = "600 13px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif";
      pen.fillText(head.text, 10, head.top + HEAD / 2);
      const after = 22 + pen.measureText(head.text).width;
      pen.font = "12px system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif";
      pen.fillStyle = colours.soft;
      pen.fillText(head.more, after, head.top + HEAD / 2);
    }
    pen.fillStyle = colours.soft;
    for (const row of rows) pen.fillText(row.label, 10, row.top + ROW / 2, LEFT - 16);
    for (const each of memories) pen.fillText("memory", 10, each.top + MEMORY / 2, LEFT - 16);
  }

  function drawAxis() {
    const span = view[1] - view[0], rough = span / Math.max(2, (width - LEFT) / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    pen.textAlign = "center";
    for (let n = Math.ceil(view[0] / step); n * step <= view[1]; n++) {
      const at = Math.round(x(n * step)) + 0.5;
      pen.strokeStyle = colours.line;
      pen.beginPath();
      pen.moveTo(at, AXIS - 6);
      pen.lineTo(at, height);
      pen.stroke();
      pen.fillStyle = colours.soft;
      const digits = Math.max(1, Math.min(9, 1 + Math.ceil(Math.log10(Math.abs(n) + 1))));
      const half = pen.measureText(seconds(n * step, digits)).width / 2;
      pen.fillText(seconds(n * step, digits), Math.min(at, width - half - 4), AXIS / 2 - 1);
    }
  }

  function drawBars(row) {
    for (const bar of row.bars) {
      const [kind, start, lasts, action] = bar;
      if (start + lasts < view[0] || start > view[1]) continue;
      const left = x(start), wide = Math.max(x(start + lasts) - left, 0.75);
      const thin = !PASSES[kind] && kind !== WAIT;
      const top = row.top + (thin ? ROW + 1 : kind === WAIT ? 5 : 0), tall = thin ? THIN : kind === WAIT ? ROW - 10 : ROW;
      pen.fillStyle = colours[data.kinds[kind].name];
      pen.fillRect(left, top, wide > 3 ? wide - 1 : wide, tall);
      boxes.push({ left, right: left + Math.max(wide, 2), top, bottom: top + tall, bar, row });
      if (PASSES[kind] && wide > 16) {
        const text = /\d*$/.exec(action)[0];
        if (text && pen.measureText(text).width < wide - 4) {
          pen.fillStyle = colours["on-bar"];
          pen.textAlign = "center";
          pen.fillText(text, Math.max(left, LEFT) / 2 + Math.min(left + wide, width - RIGHT) / 2, top + tall / 2 + 1);
        }
      }
    }
  }

  function drawMemory(each) {
    const y = (count) => each.top + MEMORY - 2 - (count / each.peak) * (MEMORY - 6);
    pen.beginPath();
    pen.moveTo(x(each.points[0][0]), each.top + MEMORY - 2);
    each.points.forEach(([start, count], n) => {
      const end = n + 1 < each.points.length ? each.points[n + 1][0] : each.end;
      pen.lineTo(x(start), y(count));
      pen.lineTo(x(end), y(count));
    });
    pen.lineTo(x(each.end), each.top + MEMORY - 2);
    pen.globalAlpha = 0.28;
    pen.fillStyle = colours.link;
    pen.fill();
    pen.globalAlpha = 1;
    boxes.push({ left: LEFT, right: width - RIGHT, top: each.top, bottom: each.top + MEMORY, memory: each });
  }

  const ENDS = { F: 1, B: 1, I: 1, W: 1 };
  function describe({ bar, row }) {
    const [kind, start, lasts, action] = bar;
    const [, stage, op, number] = /^(\d+)([A-Z]+)(\d*)$/.exec(action);
    const name = data.kinds[kind].name;
    const lines = [["b", `${name} ${name === "wait" ? "for " : ""}${action}`], ["div", `${row.device}, ${row.label}`]];
    lines.push(["div", `stage ${stage}: ${data.stages[stage].layers}`]);
    if (ENDS[op] || op === "RF" || op === "RB") lines.push(["div", `micro-batch ${number}`]);
    lines.push(["div", `starts at ${seconds(start, 4)}, takes ${seconds(lasts)}`]);
    const cut = op === "RF" ? Number(stage) - 1 : op === "RB" ? Number(stage) : null;
    if (cut !== null && name === "transfer") lines.push(["div", `${bytes(data.cuts[cut])} ${op === "RF" ? "from stage " + cut : "from stage " + (cut + 1)}`]);
    return lines;
  }

  function point(event) {
    const frame = canvas.getBoundingClientRect();
    return [event.clientX - frame.left, event.clientY - frame.top];
  }
  function show(event) {
    const [px, py] = point(event);
    const found = boxes.filter((b) => b.left <= px && px <= b.right && b.top <= py && py <= b.bottom).pop();
    tip.hidden = !found || px < LEFT;
    if (tip.hidden) return;
    let lines;
    if (found.memory) {
      const at = time(px), past = found.memory.points.filter(([start]) => start <= at).pop() || found.memory.points[0];
      lines = [["b", `${found.memory.device}, memory, predicted`], ["div", `${bytes(past[1])} at ${seconds(at, 4)}`], ["div", `at most ${bytes(found.memory.peak)}`]];
    } else lines = describe(found);
    tip.replaceChildren(...lines.map(([tag, text]) => Object.assign(document.createElement(tag), { textContent: text })));
    const room = canvas.parentElement;
    tip.style.left = Math.max(4, Math.min(px + 14, room.clientWidth - tip.offsetWidth - 6)) + "px";
    tip.style.top = Math.max(4, py + 18 + tip.offsetHeight > height ? py - tip.offsetHeight - 12 : py + 18) + "px";
  }

  function look(low, span) {
    const most = whole[1] - whole[0];
    span = Math.min(most, Math.max(span, most / 1e5));
    low = Math.min(Math.max(low, whole[0]), whole[1] - span);
    view = [low, low + span];
    tip.hidden = true;
    draw();
  }
  function zoom(factor, px = (LEFT + width) / 2) {
    const at = time(Math.max(px, LEFT)), span = view[1] - view[0];
    look(at - (at - view[0]) * factor, span * factor);
  }
  const pan = (share) => look(view[0] + share * (view[1] - view[0]), view[1] - view[0]);
  const all = () => look(whole[0], whole[1] - whole[0]);

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const along = event.shiftKey ? event.deltaY : event.deltaX;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(along / 1000);
    else zoom(1.0015 ** event.deltaY, point(event)[0]);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    held = [point(event)[0], ...view];
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("held");
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held) return show(event);
    const moved = (point(event)[0] - held[0]) / (width - LEFT - RIGHT);
    look(held[1] - moved * (held[2] - held[1]), held[2] - held[1]);
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { held = null; canvas.classList.remove("held"); });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("keydown", (event) => {
    const act = { "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15), 0: all, Home: all, Escape: () => { tip.hidden = true; } }[event.key];
    if (act) { event.preventDefault(); act(); }
  });
  document.getElementById("in").addEventListener("click", () => zoom(0.6));
  document.getElementById("out").addEventListener("click", () => zoom(1 / 0.6));
  document.getElementById("all").addEventListener("click", all);

  const used = new Set(rows.flatMap((row) => row.bars.map((bar) => bar[0])));
  const legend = document.getElementById("legend");
  data.kinds.forEach((kind, index) => {
    if (!used.has(index)) return;
    const entry = document.createElement("span"), patch = document.createElement("i");
    patch.style.background = `var(--${kind.css})`;
    entry.append(patch, kind.name);
    legend.append(entry);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColours(); draw(); });
  new ResizeObserver(fit).observe(canvas.parentElement);
  readColours();
  fit();
})();
