"use strict";
(() => {
  const optimizers = JSON.parse(document.getElementById("data").textContent);
  const TOP = 26, BOTTOM = 46, RIGHT = 12, DIGIT = 9, HEIGHT = 300, ROW = 46; // pixels

  // Sorting: cells without a number stay last
  const table = document.querySelector("#summary table"), body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.firstChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => {
      const cell = row.cells[column];
      if (column === 0) return cell.textContent;
      return cell && cell.dataset.value !== undefined ? Number(cell.dataset.value) : NaN;
    };
    const compare = (a, b) => {
      if (column === 0) return (down ? -1 : 1) * a.localeCompare(b);
      if (isNaN(a) || isNaN(b)) return isNaN(a) - isNaN(b);
      return down ? b - a : a - b;
    };
    body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b))));
  }));

  // SVG
  const add = (parent, name, attributes = {}, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  };

  const ticks = (low, high, count) => {
    const rough = (high - low) / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) {
      const at = i * step || 0; // not -0
      found.push({ at, text: digits > 6 ? at.toExponential(1) : at.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }) });
    }
    return found;
  };

  // Powers of ten, and with few of them in view their multiples by 2 and 5
  const decades = (low, high) => {
    const found = [], factors = high - low > 2.5 ? [1] : [1, 2, 5];
    for (let power = Math.floor(low); power <= high; power++) {
      for (const factor of factors) {
        const at = power + Math.log10(factor), value = factor * 10 ** power;
        const text = power < -4 || power > 5 ? value.toExponential(0) : String(Number(value.toPrecision(1)));
        if (at >= low && at <= high) found.push({ at, text });
      }
    }
    return found;
  };

  const range = (values) => {
    const low = Math.min(...values), high = Math.max(...values), margin = (high - low) * 0.04 || Math.abs(high) * 0.04 || 1;
    return [low - margin, high + margin];
  };

  const canvas = (figure, height) => {
    const plot = figure.querySelector(".plot"), width = plot.clientWidth;
    plot.replaceChildren();
    const svg = add(plot, "svg", { role: "img", viewBox: `0 0 ${width} ${height}`, height, "aria-label": figure.querySelector("figcaption").textContent });
    return { plot, svg, width };
  };

  const horizontal = (svg, [low, high], left, width, height, unit) => {
    const x = (value) => left + (value - low) / (high - low) * (width - left - RIGHT);
    const marks = ticks(low, high, (width - left) / 75);
    for (const { at, text } of marks) {
      add(svg, "path", { class: "gridline", d: `M${x(at)} ${TOP}V${height - BOTTOM}` });
      const half = text.length * DIGIT / 2; // the label does not leave the picture
      const place = Math.min(Math.max(x(at), half), width - half);
      add(svg, "text", { x: place, y: height - BOTTOM + 17, "text-anchor": "middle" }, text);
    }
    add(svg, "text", { class: "unit", x: (left + width - RIGHT) / 2, y: height - 8, "text-anchor": "middle" }, unit);
    return x;
  };

  const drawLines = (figure, given, log) => {
    const { plot, svg, width } = canvas(figure, HEIGHT);
    const scale = log ? Math.log10 : (value) => value;
    const above = (curve) => ({ ...curve, points: curve.points.filter(([, y, sd]) => !log || y - sd > 0) });
    const curves = given.map(above).filter((curve) => curve.points.length);
    if (!curves.length) return;
    const every = curves.flatMap((curve) => curve.points);
    const [low, high] = range(every.flatMap(([, y, sd]) => [scale(y - sd), scale(y + sd)]));
    const marks = log ? decades(low, high) : ticks(low, high, 6);
    const left = DIGIT * Math.max(0, ...marks.map((mark) => mark.text.length)) + 8;
    const xs = every.map((point) => point[0]), ends = [Math.min(...xs), Math.max(...xs)];
    const x = horizontal(svg, ends[0] < ends[1] ? ends : range(ends), left, width, HEIGHT, figure.dataset.x);
    const y = (value) => HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - BOTTOM - TOP);
    add(svg, "text", { class: "unit", x: 0, y: 14 }, figure.dataset.y);
    for (const { at, text } of marks) {
      add(svg, "path", { class: "gridline", d: `M${left} ${y(at)}H${width - RIGHT}` });
      add(svg, "text", { x: left - 6, y: y(at) + 5, "text-anchor": "end" }, text);
    }
    const path = (points) => "M" + points.map(([a, b]) => `${x(a).toFixed(1)} ${y(scale(b)).toFixed(1)}`).join("L");
    for (const { style, points } of curves) {
      const group = add(svg, "g", { class: style });
      if (points.some((point) => point[2] > 0)) {
        const upper = points.map(([a, b, sd]) => [a, b + sd]), lower = points.map(([a, b, sd]) => [a, b - sd]);
        add(group, "path", { class: "band", d: path([...upper, ...lower.reverse()]) + "Z" });
      }
      add(group, "path", { class: "curve", d: path(points) });
    }
    readout(plot, svg, curves, x, width, figure.dataset.x);
  };

  // The values beside the pointer
  const readout = (plot, svg, curves, x, width, unit) => {
    const cursor = add(svg, "path", { class: "cursor" }), tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    plot.append(tip);
    svg.addEventListener("pointerleave", () => { tip.hidden = true; cursor.removeAttribute("d"); });
    svg.addEventListener("pointermove", (event) => {
      const place = event.clientX - svg.getBoundingClientRect().left;
      const nearest = (points) => points.reduce((a, b) => Math.abs(x(b[0]) - place) < Math.abs(x(a[0]) - place) ? b : a);
      const found = curves.map((curve) => ({ curve, point: nearest(curve.points) }));
      const at = nearest(found.map((each) => each.point))[0];
      const line = (text, value) => {
        const row = document.createElement("div");
        for (const shown of [text, value]) row.appendChild(document.createElement("span")).textContent = shown;
        return row;
      };
      tip.replaceChildren(line(unit, at.toLocaleString("en-US")), ...found.map(({ curve, point }) => line(curve.name, point[1].toPrecision(5))));
      tip.hidden = false;
      cursor.setAttribute("d", `M${x(at)} ${TOP}V${HEIGHT - BOTTOM}`);
      tip.style.left = Math.max(0, x(at) > width / 2 ? x(at) - tip.offsetWidth - 10 : Math.min(x(at) + 10, width - tip.offsetWidth)) + "px";
    });
  };

  // Rows of {name, text, sd, parts: [{value, style}]}: bars from zero on, or dots
  const drawRows = (figure, rows, dots) => {
    const height = TOP + rows.length * ROW + BOTTOM - 18;
    const { svg, width } = canvas(figure, height);
    if (!rows.length) return;
    const sums = rows.map((row) => row.parts.reduce((sum, part) => sum + part.value, 0));
    const high = sums.map((sum, i) => sum + rows[i].sd);
    const ends = dots ? range([...high, ...sums.map((sum, i) => sum - rows[i].sd)]) : [0, Math.max(...high) * 1.02 || 1];
    const x = horizontal(svg, ends, 8, width, height, figure.dataset.x);
    rows.forEach((row, i) => {
      const top = TOP + i * ROW - 18, middle = top + 27;
      for (const [attributes, text] of [[{ x: 0 }, row.name], [{ x: width, "text-anchor": "end" }, row.text]]) {
        add(svg, "text", { ...attributes, y: top + 14, class: "label" }, text);
      }
      let start = ends[0];
      for (const part of row.parts) {
        const group = add(svg, "g", { class: part.style });
        if (dots) add(group, "circle", { class: "spot", cx: x(part.value), cy: middle, r: 5 });
        else add(group, "rect", { class: "bar", x: x(start), y: middle - 7, width: x(start + part.value) - x(start), height: 14 });
        start += part.value;
      }
      if (row.sd) {
        const [a, b] = [x(sums[i] - row.sd), x(sums[i] + row.sd)];
        add(svg, "path", { class: "error", d: `M${a} ${middle}H${b}M${a} ${middle - 4}v8M${b} ${middle - 4}v8` });
      }
    });
  };

  const boxes = [...document.querySelectorAll(".legend input")], base = document.getElementById("base");
  const figures = [...document.querySelectorAll("figure")];

  const draw = (figure) => {
    const { kind, key } = figure.dataset;
    const shown = boxes.filter((box) => box.checked).map((box) => optimizers[box.value]);
    if (kind === "lines" || kind === "log") {
      const drawn = shown.filter((each) => each.curves[key]).map((each) => ({ ...each, points: each.curves[key] }));
      return drawLines(figure, drawn, kind === "log");
    }
    if (kind === "minus") return drawLines(figure, differences(shown, optimizers[base.value]));
    if (kind === "memory") {
      const GiB = 2 ** 30, rows = shown.filter((each) => each.memory);
      return drawRows(figure, rows.map(({ name, memory }) => ({
        name, sd: 0, text: (memory.reduce((a, b) => a + b, 0) / GiB).toFixed(2),
        parts: memory.map((value, i) => ({ value: value / GiB, style: `m${i}` })),
      })));
    }
    const rows = shown.filter((each) => each.values[key][0] !== null);
    drawRows(figure, rows.map(({ name, style, values: { [key]: [value, sd, text] } }) => ({ name, text, sd: sd || 0, parts: [{ value, style }] })), kind === "dots");
  };

  // Of the loss to another optimizer's, at the same step of a run with the same seed
  const differences = (shown, other) => shown.map((each) => {
    const found = new Map();
    for (const seed of Object.keys(each.losses).filter((seed) => seed in other.losses)) {
      const zero = new Map(other.losses[seed]);
      for (const [x, y] of each.losses[seed]) if (zero.has(x)) found.set(x, [...(found.get(x) || []), y - zero.get(x)]);
    }
    return { ...each, points: [...found].map(([x, values]) => [x, ...spread(values)]) };
  }).filter((each) => each.points.length);

  const spread = (values) => {
    const mean = values.reduce((a, b) => a + b) / values.length;
    const squares = values.reduce((sum, value) => sum + (value - mean) ** 2, 0);
    return [mean, Math.sqrt(squares / Math.max(values.length - 1, 1))];
  };

  const drawAll = () => figures.forEach(draw);
  document.getElementById("graphs").hidden = false;
  boxes.forEach((box) => box.addEventListener("change", drawAll));
  document.querySelectorAll("[data-all]").forEach((button) => button.addEventListener("click", () => {
    boxes.forEach((box) => { box.checked = Boolean(button.dataset.all); });
    drawAll();
  }));
  if (base) base.addEventListener("change", drawAll);
  let width = 0;
  new ResizeObserver(() => {
    if (width !== document.body.clientWidth) drawAll();
    width = document.body.clientWidth;
  }).observe(document.body);
})();
