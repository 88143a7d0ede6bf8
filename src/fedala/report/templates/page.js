"use strict";
// Draw the charts as SVG from the data in the page. All text is set as text, never as markup.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const find = (id) => document.getElementById(id);
  const data = JSON.parse(find("data")?.textContent ?? "{}");
  const series = data.series ?? [];
  const off = new Set(); // indices of the methods that are switched off
  series.forEach((one, place) => { if (one.isOff) off.add(place); });

  const node = (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };
  const draw = (parent, name, attributes = {}, text) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  };
  // Eight colours and nine shapes, so that 72 methods differ, in print by shapes and dashes.
  const colour = (place) => `s${place % 8} m${place % 9}`;
  const SHAPES = [
    (r) => `M${-r},0A${r},${r} 0 1 1 ${r},0A${r},${r} 0 1 1 ${-r},0Z`,
    (r) => polygon(0.9 * r, [[-1, -1], [1, -1], [1, 1], [-1, 1]]),
    (r) => polygon(1.2 * r, [[0, -1], [1, 0.8], [-1, 0.8]]),
    (r) => polygon(1.3 * r, [[0, -1], [1, 0], [0, 1], [-1, 0]]),
    (r) => polygon(1.2 * r, [[-1, -0.8], [1, -0.8], [0, 1]]),
    (r) => polygon(1.1 * r, [[-0.3, -1], [0.3, -1], [0.3, -0.3], [1, -0.3], [1, 0.3], [0.3, 0.3], [0.3, 1], [-0.3, 1], [-0.3, 0.3], [-1, 0.3], [-1, -0.3], [-0.3, -0.3]]),
    (r) => polygon(1.2 * r, [[-0.8, -1], [1, 0], [-0.8, 1]]),
    (r) => polygon(1.2 * r, [[0.8, -1], [0.8, 1], [-1, 0]]),
    (r) => polygon(1.1 * r, [[-1, -0.4], [1, -0.4], [1, 0.4], [-1, 0.4]]),
  ];
  const polygon = (r, corners) => `M${corners.map(([px, py]) => `${(r * px).toFixed(1)},${(r * py).toFixed(1)}`).join("L")}Z`;
  const drawMark = (parent, place, px, py, r, attributes = {}) =>
    draw(parent, "path", { ...attributes, class: `dot ${colour(place)}`, d: SHAPES[place % 9](r), transform: `translate(${px.toFixed(1)},${py.toFixed(1)})` });
  const dash = (place) => ["", " d1", " d2"][Math.floor(place / 8) % 3];
  const isNumber = (value) => value !== null && value !== undefined;
  const plain = (value, digits = 4) => (isNumber(value) ? String(Number(value.toPrecision(digits))) : "–");
  const percent = (value) => (isNumber(value) ? `${(100 * value).toFixed(2)} %` : "–");
  const shown = () => series.map((_, place) => place).filter((place) => !off.has(place));

  const meanStd = (runs, i) => {
    const values = runs.map((run) => run[i]).filter(isNumber);
    if (!values.length) return [null, null];
    const mean = values.reduce((a, b) => a + b) / values.length;
    return [mean, Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / values.length)];
  };
  const ticks = (low, high, count) => {
    const raw = (high - low) / Math.max(1, count) || 1;
    const unit = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].find((factor) => factor * unit >= raw * 0.999) * unit;
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(Number((k * step).toPrecision(12)));
    return found;
  };
  /** Ticks with their text in percent, with as many digits as their values need. */
  const percentTicks = (low, high, sign = "") => {
    const found = ticks(low, high, 5);
    const digits = [0, 1, 2, 3].find((n) => found.every((value) => Math.abs(100 * value - Number((100 * value).toFixed(n))) < 1e-7)) ?? 4;
    return found.map((value) => [value, (value > 0 ? sign : "") + (100 * value).toFixed(digits).replace("-", "−")]);
  };
  const extent = (values) => {
    let low = Infinity, high = -Infinity;
    for (const value of values) if (isNumber(value)) { low = Math.min(low, value); high = Math.max(high, value); }
    return low > high ? [0, 1] : low === high ? [low - (Math.abs(low) || 1) / 20, high + (Math.abs(high) || 1) / 20] : [low, high];
  };

  const choice = (element, name, other) => {
    const own = element.closest("figure").querySelector(`[data-control="${name}"]`);
    return own?.value ?? other;
  };

  /** Draw axes and grid; return the functions from values to positions. Ticks: [value, text]. */
  const frame = (element, { x, y, xTicks, yTicks, xLabel, yLabel, height = 320, left = 52, least = 0, grid = true }) => {
    // Before the page is laid out, its width is 0.
    const width = Math.max(element.clientWidth, least, 240);
    const box = { left, right: width - 22, top: yLabel ? 24 : 10, bottom: height - 38 };
    const root = draw(element, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    const X = (value) => box.left + ((value - x[0]) / (x[1] - x[0] || 1)) * (box.right - box.left);
    const Y = (value) => box.bottom - ((value - y[0]) / (y[1] - y[0] || 1)) * (box.bottom - box.top);
    for (const [value, text] of yTicks) {
      if (grid) draw(root, "line", { class: "grid", x1: box.left, x2: box.right, y1: Y(value), y2: Y(value) });
      draw(root, "text", { x: box.left - 8, y: Y(value) + 4, "text-anchor": "end" }, text);
    }
    for (const [value, text] of xTicks) draw(root, "text", { x: X(value), y: box.bottom + 18, "text-anchor": "middle" }, text);
    draw(root, "text", { x: (box.left + box.right) / 2, y: height - 4, "text-anchor": "middle" }, xLabel);
    if (yLabel) draw(root, "text", { x: 0, y: 12 }, yLabel);
    return { root, X, Y, box };
  };

  const tip = find("tip");
  const show = (element, mark) => {
    const { root } = element.chart;
    element.cursor?.remove();
    element.cursor = draw(root, "g");
    if (mark.y === undefined) draw(element.cursor, "line", { class: "cursor", x1: mark.x, x2: mark.x, y1: element.chart.box.top, y2: element.chart.box.bottom });
    else draw(element.cursor, "circle", { class: "ring", cx: mark.x, cy: mark.y, r: mark.r ?? 7 });
    for (const [place, px, py] of mark.dots ?? []) drawMark(element.cursor, place, px, py, 4.5);
    tip.replaceChildren(node("b", {}, mark.title), ...mark.rows.map(([label, value]) => node("div", {}, node("span", {}, label), node("span", {}, value))));
    tip.hidden = false;
    const area = root.getBoundingClientRect(), own = tip.getBoundingClientRect();
    const px = area.left + mark.x, py = area.top + (mark.y ?? element.chart.box.top);
    tip.style.left = `${Math.max(6, Math.min(innerWidth - own.width - 6, px + 16 + own.width > innerWidth ? px - own.width - 16 : px + 16))}px`;
    tip.style.top = `${Math.max(6, Math.min(innerHeight - own.height - 6, py))}px`;
  };
  const hide = (element) => {
    tip.hidden = true;
    element.cursor?.remove();
  };

  /** Show values at the pointer and the arrow keys; marks have indices {i, j}, {x, y}, text. */
  const explore = (element, marks) => {
    element.marks = marks;
    element.mark = null;
    if (element.explored) return;
    element.explored = true;
    element.tabIndex = 0;
    const near = (event) => {
      const area = element.chart.root.getBoundingClientRect();
      const px = event.clientX - area.left, py = event.clientY - area.top;
      let best = null, least = Infinity;
      for (const mark of element.marks) {
        const distance = (mark.x - px) ** 2 + (mark.y === undefined ? 0 : (mark.y - py) ** 2);
        if (distance < least) [best, least] = [mark, distance];
      }
      return best && (best.y === undefined || least < 900) ? best : null;
    };
    const follow = (event) => {
      const mark = near(event);
      if (mark) show(element, mark); else hide(element);
    };
    element.addEventListener("pointermove", follow);
    element.addEventListener("pointerdown", follow);
    element.addEventListener("pointerleave", () => hide(element));
    element.addEventListener("blur", () => hide(element));
    element.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return hide(element);
      const [di, dj] = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key] ?? [0, 0];
      const ends = { Home: 0, End: element.marks.length - 1 }[event.key];
      if ((!di && !dj && ends === undefined) || !element.marks.length) return;
      event.preventDefault();
      const now = element.mark;
      let next = ends !== undefined ? element.marks[ends] : now ? null : element.marks[0];
      if (!next) {
        const ahead = element.marks.filter((mark) => (di ? (mark.i - now.i) * di > 0 : (mark.j - now.j) * dj > 0));
        const far = (mark) => (di ? Math.abs(mark.i - now.i) + 1e3 * Math.abs(mark.j - now.j) : Math.abs(mark.j - now.j) + 1e3 * Math.abs(mark.i - now.i));
        next = ahead.length ? ahead.reduce((a, b) => (far(b) < far(a) ? b : a)) : now;
      }
      element.mark = next;
      show(element, next);
      find("live").textContent = `${next.title}: ${next.rows.map((row) => row.join(" ")).join("; ")}`;
    });
  };

  const path = (points) => {
    let text = "", pen = "M";
    for (const [px, py] of points) {
      if (py === null) { pen = "M"; continue; }
      text += `${pen}${px.toFixed(1)},${py.toFixed(1)}`;
      pen = "L";
    }
    return text;
  };

  const curves = (element) => {
    const names = element.dataset.columns.split(" ");
    const column = choice(element, "column", names[0]);
    const shared = document.querySelector('[data-chart="curves"]');
    const runs = choice(shared, "seeds", "band"), over = choice(shared, "x", "rounds"), late = choice(shared, "zoom", "all") === "late";
    const isShare = data.shares.some((name) => column.startsWith(name));
    const format = isShare ? percent : (value) => plain(value);
    const lines = shown().filter((place) => series[place].values[column]).map((place) => {
      const own = series[place];
      const all = own.values[column];
      const seed = own.seeds.indexOf(Number(runs));
      const chosen = runs === "band" || runs === "each" ? all : seed < 0 ? [] : [all[seed]];
      return { place, label: own.label, xs: own[over], chosen, points: own.rounds.map((_, i) => meanStd(chosen, i)), rounds: own.rounds };
    }).filter((line) => line.chosen.length);
    const xHigh = Math.max(1e-9, ...lines.map((line) => line.xs.at(-1)));
    const xLow = over === "rounds" && lines.length ? Math.min(...lines.map((line) => line.xs[0])) : 0;
    const from = late ? xLow + (xHigh - xLow) / 2 : -Infinity;
    const seen = [];
    for (const line of lines) line.points.forEach(([mean, std], i) => {
      if (line.xs[i] < from || mean === null) return;
      seen.push(mean - (runs === "band" ? std : 0), mean + (runs === "band" ? std : 0));
      if (runs === "each") seen.push(...line.chosen.map((run) => run[i]));
    });
    let [low, high] = extent(seen);
    const margin = (high - low) * 0.04;
    [low, high] = [isShare ? Math.max(0, low - margin) : low - margin, isShare ? Math.min(1, high + margin) : high + margin];
    const narrow = element.clientWidth < 520;
    const x = [late ? from : xLow, xHigh === xLow ? xLow + 1 : xHigh];
    const chart = frame(element, {
      x, y: [low, high], height: narrow ? 270 : 340,
      xTicks: ticks(x[0], x[1], narrow ? 4 : 9).filter((value) => over === "seconds" || Number.isInteger(value)).map((value) => [value, value.toLocaleString("en")]),
      yTicks: isShare ? percentTicks(low, high) : ticks(low, high, 5).map((value) => [value, plain(value)]),
      xLabel: over === "rounds" ? "round" : "seconds, all runs of a method together",
      yLabel: (data.columns?.[column] ?? column) + (isShare ? ", %" : ""),
    });
    const { root, X, Y, box } = chart;
    const clip = `${element.id}-clip`;
    draw(draw(root, "clipPath", { id: clip }), "rect", { x: box.left - 3, y: box.top - 3, width: box.right - box.left + 6, height: box.bottom - box.top + 6 });
    const area = draw(root, "g", { "clip-path": `url(#${clip})` });
    for (const line of lines) {
      const group = draw(area, "g", { class: colour(line.place), "data-series": line.place });
      const at = (value, i) => [X(line.xs[i]), value === null ? null : Y(value)];
      if (runs === "band" && line.chosen.length > 1) {
        const there = line.points.map((point, i) => [...point, i]).filter(([mean]) => mean !== null);
        const upper = there.map(([mean, std, i]) => at(mean + std, i)), lower = there.map(([mean, std, i]) => at(mean - std, i)).reverse();
        draw(group, "path", { class: "band", d: `${path([...upper, ...lower])}Z` });
      }
      if (runs === "each") for (const run of line.chosen) draw(group, "path", { class: "run", d: path(run.map((value, i) => at(value ?? null, i))) });
      else draw(group, "path", { class: `mean${dash(line.place)}`, d: path(line.points.map(([mean], i) => at(mean, i))) });
      // A few marks on each line, at other rounds than its neighbours', tell lines apart without colours.
      const count = line.points.length, gap = Math.max(1, Math.round(count / 6));
      const marked = lines.length < 2 && count > 1 ? [] : line.points.map(([mean], i) => [mean, i]).filter(([mean, i]) => mean !== null && i % gap === line.place % gap);
      if (runs !== "each") for (const [mean, i] of marked) drawMark(group, line.place, ...at(mean, i), 4);
    }
    element.chart = chart;
    const longest = lines.reduce((a, b) => (a && a.xs.length >= b.xs.length ? a : b), null);
    explore(element, (longest?.xs ?? []).map((value, i) => {
      const near = lines.map((line) => {
        const place = line.xs.reduce((best, other, k) => (Math.abs(other - value) < Math.abs(line.xs[best] - value) ? k : best), 0);
        return [line, place, ...line.points[place]];
      }).filter(([, , mean]) => mean !== null).sort((a, b) => b[2] - a[2]);
      return {
        i, j: 0, x: X(value), inside: value >= x[0],
        title: over === "rounds" ? `Round ${value}` : `After ${plain(value, 3)} s`,
        rows: near.map(([line, , mean, std]) => [line.label, format(mean) + (line.chosen.length > 1 ? ` ± ${isShare ? (100 * std).toFixed(2) : plain(std, 2)}` : "")]),
        dots: near.map(([line, place, mean]) => [line.place, X(line.xs[place]), Y(mean)]).filter(([, , py]) => py >= box.top - 3 && py <= box.bottom + 3),
      };
    }).filter((mark) => mark.inside));
  };

  const clients = (element) => {
    const what = choice(element, "show", "score"), order = choice(element, "order", "client");
    const base = what === "score" ? null : data.clients[Number(what)];
    const known = shown().filter((place) => data.clients[place].length);
    const metric = data.metrics[base ? Number(what) : known[0] ?? 0], isShare = metric.isShare;
    const alike = (place) => data.metrics[place].name === metric.name && (!base || (String(place) !== what && data.kinds[place] === data.kinds[Number(what)]));
    const lines = known.filter(alike).map((place) => ({
      place, values: data.clients[place].map((value, i) => (!isNumber(value) || (base && !isNumber(base[i])) ? null : value - (base ? base[i] : 0))),
    }));
    const count = Math.max(0, ...lines.map((line) => line.values.length));
    const clientsInOrder = [...Array(count).keys()];
    const samples = data.samples[lines[0]?.place ?? 0];
    const oneSplit = new Set(lines.map((line) => data.kinds[line.place])).size < 2;
    if (order === "samples") clientsInOrder.sort((a, b) => samples[b] - samples[a]);
    if (order === "value" && lines.length) clientsInOrder.sort((a, b) => (lines[0].values[b] ?? -Infinity) - (lines[0].values[a] ?? -Infinity));
    let [low, high] = extent([...lines.flatMap((line) => line.values), ...(base ? [0] : [])]);
    const margin = (high - low) * 0.06;
    [low, high] = [low - margin, base || !isShare ? high + margin : Math.min(1.01, high + margin)];
    const step = Math.ceil(count / (element.clientWidth < 520 ? 12 : 30));
    const chart = frame(element, {
      x: [-0.6, count - 0.4], y: [low, high], height: 300,
      xTicks: clientsInOrder.map((client, i) => [i, client]).filter((_, i) => i % step === 0),
      yTicks: isShare ? percentTicks(low, high, base ? "+" : "") : ticks(low, high, 5).map((value) => [value, plain(value)]),
      xLabel: "client", yLabel: !isShare ? (base ? "difference" : metric.title) : base ? `points of ${metric.title}` : `${metric.title}, %`,
    });
    const { root, X, Y, box } = chart;
    if (base) draw(root, "line", { class: "zero", x1: box.left, x2: box.right, y1: Y(0), y2: Y(0) });
    const signed = (value) => `${value > 0 ? "+" : ""}${isShare ? (100 * value).toFixed(2) : plain(value)}`.replace("-", "−");
    const format = base ? signed : isShare ? percent : (value) => plain(value);
    const radius = Math.max(2, Math.min(5.5, (box.right - box.left) / Math.max(1, count) / 3));
    const marks = [];
    clientsInOrder.forEach((client, i) => {
      const there = lines.map((line) => [line.place, line.values[client]]).filter(([, value]) => isNumber(value));
      if (!there.length) return;
      const [bottom, top] = [Math.min(base ? 0 : Infinity, ...there.map(([, value]) => value)), Math.max(base ? 0 : -Infinity, ...there.map(([, value]) => value))];
      draw(root, "line", { class: "stem", x1: X(i), x2: X(i), y1: Y(bottom), y2: Y(top) });
      const aside = Math.min(2 * radius, (0.8 * (X(1) - X(0))) / there.length);
      there.forEach(([place, value], k) => drawMark(root, place, X(i) + (k - (there.length - 1) / 2) * aside, Y(value), radius, { "data-series": place }));
      const rows = there.sort((a, b) => b[1] - a[1]).map(([place, value]) => [series[place].label, format(value)]);
      marks.push({ i, j: 0, x: X(i), title: `Client ${oneSplit && lines.length ? data.names[lines[0].place][client] ?? client : client}${oneSplit ? `, ${samples[client]} test samples` : ""}`, rows });
    });
    element.chart = chart;
    explore(element, marks);
  };

  const split = (element) => {
    const { counts, classes, numbers, clients: all } = data.splits[Number(choice(element, "run", 0))];
    const most = Math.max(1, ...counts.flat());
    const height = Math.max(180, Math.min(720, 28 * classes.length + 60));
    const longest = Math.min(14, Math.max(...classes.map((name) => name.length)));
    const left = Math.max(30, 16 + 7.2 * longest), least = left + 20 + counts.length * 9;
    const xStep = Math.ceil(counts.length / (Math.max(element.clientWidth, least) < 520 ? 14 : 40)), yStep = Math.ceil(classes.length / 26);
    const chart = frame(element, {
      x: [-0.7, counts.length - 0.3], y: [-0.7, classes.length - 0.3], height, left, least,
      xTicks: numbers.map((client, i) => [i, client]).filter(([i]) => i % xStep === 0),
      yTicks: classes.map((name, i) => [i, name.length > 14 ? `${name.slice(0, 13)}…` : name]).filter(([i]) => i % yStep === 0),
      xLabel: all > counts.length ? `client (the first ${counts.length} of ${all})` : "client", yLabel: "class",
    });
    const { root, X, Y, box } = chart;
    const room = Math.min((box.right - box.left) / counts.length, ((box.bottom - box.top) / classes.length) * 1.25);
    const marks = [];
    counts.forEach((row, i) => row.forEach((count, j) => {
      if (!count) return;
      const r = Math.max(0.8, Math.sqrt(count / most) * room * 0.56);
      draw(root, "circle", { class: "bubble", cx: X(i), cy: Y(j), r });
      marks.push({ i, j, x: X(i), y: Y(j), r: r + 2, title: `Client ${numbers[i]}`, rows: [[`class ${classes[j]}`, `${count.toLocaleString("en")} samples`]] });
    }));
    element.chart = chart;
    explore(element, marks);
  };

  /** Draw a heat map of `values[row][column]` with a scale from `low` to `high`. */
  const heat = (element, { values, rows, columns, low, high, rowLabel, columnLabel, format, what, title }) => {
    const narrow = element.clientWidth < 520;
    const size = Math.max(rows.length > 60 ? 6 : 12, Math.min(26, 420 / rows.length));
    const height = Math.max(90, rows.length * size + 66);
    const names = rows.map(String), longest = Math.min(22, Math.max(...names.map((name) => name.length)));
    const yStep = Math.ceil(rows.length / 30), xStep = Math.ceil(columns.length / (narrow ? 7 : 24));
    const chart = frame(element, {
      x: [-0.5, columns.length - 0.5], y: [rows.length - 0.5, -0.5], height, left: Math.max(34, 16 + 7 * longest), least: columns.length * 5, grid: false,
      xTicks: columns.map((name, i) => [i, name]).filter(([i]) => i % xStep === 0),
      yTicks: names.map((name, j) => [j, name.length > 22 ? `…${name.slice(-21)}` : name]).filter(([j]) => j % yStep === 0),
      xLabel: columnLabel, yLabel: rowLabel,
    });
    const { root, X, Y } = chart;
    const w = X(1) - X(0), h = Y(1) - Y(0), marks = [];
    values.forEach((row, j) => row.forEach((value, i) => {
      if (!isNumber(value)) return;
      const share = high > low ? Math.max(0, Math.min(1, (value - low) / (high - low))) : 1;
      draw(root, "rect", { class: "cell", x: X(i) - w / 2 + 0.5, y: Y(j) - h / 2 + 0.5, width: Math.max(0.5, w - 1), height: Math.max(0.5, h - 1), rx: Math.min(2, w / 4), "fill-opacity": (0.06 + 0.94 * share).toFixed(3) });
      marks.push({ i, j: -j, x: X(i), y: Y(j), r: Math.max(4, Math.min(w, h) / 2), title: title(j, i), rows: [[what, format(value)]] });
    }));
    element.append(node("div", { class: "scale", "aria-hidden": "true" }, node("span", {}, format(low)), node("i"), node("span", {}, format(high))));
    element.chart = chart;
    explore(element, marks);
  };

  const chosenWeights = () => {
    const found = data.weights[Number(find("w-method").value)];
    const seed = find("w-seed").value, parameter = Number(find("w-parameter").value);
    const average = (pick) => (seed === "mean" ? meanStd(found.seeds.map((_, s) => [pick(s)]), 0)[0] : pick(Number(seed)));
    return { found, parameter, average };
  };
  const floor = (values) => Math.min(0.9, Math.floor(10 * Math.min(1, ...values.flat().filter(isNumber))) / 10);
  const threeDigits = (value) => value.toFixed(3);

  const weightsOverRounds = (element) => {
    const { found, parameter, average } = chosenWeights();
    const values = found.clients.map((_, c) => found.rounds.map((_, r) => average((s) => found.mean[s][r][c][parameter])));
    heat(element, {
      values, rows: found.clients, columns: found.rounds, low: floor(values), high: 1, rowLabel: "client", columnLabel: "round",
      format: threeDigits, what: `mean of W, ${found.parameters[parameter]}`, title: (j, i) => `Client ${found.names[j]}, round ${found.rounds[i]}`,
    });
  };
  const weightHistogram = (element) => {
    const { found, parameter, average } = chosenWeights();
    const bins = [...Array(10).keys()].reverse();
    const values = bins.map((k) => found.rounds.map((_, r) => average((s) => found.shares[s][r][parameter][k])));
    // Most elements stay at 1: a square root makes the others visible.
    heat(element, {
      values: values.map((row) => row.map((value) => (isNumber(value) ? Math.sqrt(value) : null))), rows: bins.map((k) => `${(k / 10).toFixed(1)}–${((k + 1) / 10).toFixed(1)}`),
      columns: found.rounds, low: 0, high: 1, rowLabel: "W", columnLabel: "round", format: (value) => percent(value * value),
      what: `of ${found.parameters[parameter]}`, title: (j, i) => `Round ${found.rounds[i]}, W from ${(bins[j] / 10).toFixed(1)} to ${((bins[j] + 1) / 10).toFixed(1)}`,
    });
  };
  const weightsOfParameters = (element) => {
    const { found, average } = chosenWeights();
    const round = Number(find("w-round").value);
    find("w-round-shown").textContent = found.rounds[round];
    const values = found.parameters.map((_, p) => found.clients.map((_, c) => average((s) => found.mean[s][round][c][p])));
    heat(element, {
      values, rows: found.parameters, columns: found.clients, low: floor(values), high: 1, rowLabel: "parameter", columnLabel: "client",
      format: threeDigits, what: "mean of W", title: (j, i) => `${found.parameters[j]}, client ${found.names[i]}`,
    });
  };

  const kinds = { curves, clients, split, "w-rounds": weightsOverRounds, "w-histogram": weightHistogram, "w-parameters": weightsOfParameters };
  const charts = [...document.querySelectorAll("[data-chart]")];
  const redraw = (chosen = charts) => {
    for (const element of chosen) {
      hide(element);
      element.replaceChildren();
      kinds[element.dataset.chart](element);
    }
  };

  const methods = find("methods");
  series.forEach((one, place) => {
    const chip = node("button", { type: "button", class: colour(place), "aria-pressed": String(!off.has(place)), "data-group": one.group ?? "" }, node("i", { class: "key", "aria-hidden": "true" }), one.label);
    chip.addEventListener("click", () => {
      if (!off.delete(place)) off.add(place);
      chip.setAttribute("aria-pressed", String(!off.has(place)));
      redraw(charts.filter((element) => ["curves", "clients"].includes(element.dataset.chart)));
    });
    methods.append(chip);
  });
  methods.hidden = series.length < 2;

  document.addEventListener("input", (event) => {
    if (event.target.id === "w-method") offerWeights();
    if (event.target.closest("#w-controls")) redraw(charts.filter((element) => element.dataset.chart.startsWith("w-")));
    else if (event.target.dataset.control) {
      const own = event.target.closest("figure").querySelector("[data-chart]");
      redraw(own.dataset.chart === "curves" ? charts.filter((element) => element.dataset.chart === "curves") : [own]);
    }
  });
  const hideSingles = () => {
    for (const control of document.querySelectorAll("#w-controls select")) control.closest("label").hidden = control.options.length < 2;
  };
  /** Fill the controls of W with the parameters, runs and rounds of the chosen method. */
  const offerWeights = () => {
    const found = data.weights[Number(find("w-method").value)];
    const fill = (id, texts) => find(id).replaceChildren(...texts.map(([value, text]) => node("option", { value }, text)));
    fill("w-parameter", found.parameters.map((name, k) => [k, name]));
    fill("w-seed", [["mean", "mean"], ...(found.seeds.length > 1 ? found.seeds.map((seed, k) => [k, `seed ${seed}`]) : [])]);
    find("w-round").max = found.rounds.length - 1;
    find("w-round").value = found.rounds.length - 1;
    hideSingles();
  };
  hideSingles();

  find("speed-target")?.addEventListener("input", (event) => {
    const target = Math.round(Number(event.target.value));
    if (!(target >= 0 && target <= 100)) return;
    find("speed-shown").textContent = target;
    [...find("speed").tBodies[0].rows].forEach((row, place) => series[place].speed[target].forEach((text, k) => { row.cells[k + 1].textContent = text; }));
  });

  const theme = find("theme"), dark = matchMedia("(prefers-color-scheme: dark)");
  let scheme = null;
  try { scheme = localStorage.getItem("fedala-scheme"); } catch { /* a browser that keeps nothing for files */ }
  const apply = () => {
    const isDark = scheme ? scheme === "dark" : dark.matches;
    document.documentElement.style.colorScheme = scheme ?? "light dark";
    theme.textContent = isDark ? "Light" : "Dark";
    theme.setAttribute("aria-label", isDark ? "Switch to light colours" : "Switch to dark colours");
    return isDark;
  };
  theme.addEventListener("click", () => {
    scheme = apply() ? "light" : "dark";
    try { localStorage.setItem("fedala-scheme", scheme); } catch { /* it holds until the page is closed */ }
    apply();
  });
  dark.addEventListener("change", apply);
  theme.hidden = false;
  apply();

  let width = 0;
  const fit = () => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    redraw();
  };
  new ResizeObserver(fit).observe(document.body);
  document.addEventListener("redraw", () => redraw());
  fit();
})();
