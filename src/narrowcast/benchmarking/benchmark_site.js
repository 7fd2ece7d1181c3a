"use strict";
// Draws the pages of a benchmark from the JSON in #data. Text goes into the page by textContent alone.

const data = JSON.parse(document.getElementById("data").textContent);
const view = document.getElementById("view");
const SVG = "http://www.w3.org/2000/svg";
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000"]; // Okabe and Ito
const DASHES = ["", "7 3", "2 2"];
const COSTS = [
  { key: "seconds", label: "time of the solver (s)", of: (run, goal) => run.costs[goal] && run.costs[goal][0] },
  { key: "iterations", label: "iterations", of: (run, goal) => run.costs[goal] && run.costs[goal][1] },
];
const FEW = 6; // values that have a box each; more numbers have a range
const NEAR = 24; // pixels from the pointer to a point

// Elements

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  return filled(made, attributes, children);
}

function drawn(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

function link(page, text, title) {
  return element("a", { href: page, title }, text);
}

function chooser(label, options, change) {
  const select = element("select", { onchange: () => change(Number(select.value)) });
  select.append(...options.map((text, place) => element("option", { value: place }, text)));
  return element("label", {}, `${label} `, select);
}

function checkbox(label, checked, change) {
  const box = element("input", { type: "checkbox", checked, onchange: () => change(box.checked) });
  return element("label", {}, box, ` ${label}`);
}

function look(place) {
  const dash = DASHES[Math.floor(place / COLOURS.length) % DASHES.length];
  return { stroke: COLOURS[place % COLOURS.length], "stroke-dasharray": dash };
}

// A button that switches a line on and off, and makes the others faint while the pointer is on it.
function toggle(place, label, shown, change, chart) {
  const swatch = drawn("svg", { viewBox: "0 0 26 9", "aria-hidden": true });
  swatch.append(drawn("line", { x1: 0, x2: 26, y1: 4.5, y2: 4.5, "stroke-width": 2.5, ...look(place) }));
  const single = (on) => () => chart && chart.single(on ? place : null);
  const press = () => { shown.has(place) ? shown.delete(place) : shown.add(place); change(); };
  const events = { onclick: press, onmouseenter: single(true), onmouseleave: single(false) };
  return element("button", { class: "toggle", type: "button", "aria-pressed": shown.has(place), ...events }, swatch, label);
}

// Numbers

function show(value) {
  if (!value) return "0";
  const size = Math.abs(value);
  if (size >= 1e-3 && size < 1e5) return String(Number(value.toPrecision(3)));
  return value.toExponential(1).replace(".0e", "e").replace("e+", "e");
}

function scaleOf(values, log, low, high) {
  const usable = values.filter((value) => !log || value > 0);
  const least = usable.reduce((a, b) => Math.min(a, b), Infinity);
  const most = usable.reduce((a, b) => Math.max(a, b), -Infinity);
  let from = low ?? (usable.length ? (log ? least : Math.min(0, least)) : log ? 0.1 : 0);
  let to = high ?? (usable.length ? most : 1);
  if (!(to > from)) to = log ? from * 10 : from + 1;
  const at = log ? Math.log10 : (value) => value;
  const [start, end] = [at(from), at(to)];
  return { log, from, to, place: (value) => (at(value) - start) / (end - start), ticks: ticks(from, to, log) };
}

function ticks(from, to, log) {
  const found = [];
  if (log && to / from > 8) {
    const [first, last] = [Math.ceil(Math.log10(from) - 1e-9), Math.floor(Math.log10(to) + 1e-9)];
    const step = Math.max(1, Math.ceil((last - first) / 8));
    const within = last - first < 2 ? [1, 2, 5] : [1];
    for (let power = first - 1; power <= last; power += step) {
      for (const digit of within) found.push(digit * 10 ** power);
    }
  } else {
    const raw = (to - from) / 5;
    const size = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((digit) => digit * size).find((each) => each >= raw);
    for (let place = Math.ceil(from / step); place * step <= to * (1 + 1e-9); place++) found.push(place * step);
  }
  return found.filter((value) => value >= from * (1 - 1e-9) && value <= to * (1 + 1e-9));
}

// A chart of lines whose points have a text and may have a page: `lines` of {look, points: [{x, y, text, page}], step}

function makeChart(host) {
  const box = element("div", { class: "chart" });
  const tip = element("div", { class: "tip", hidden: true });
  host.append(box);
  let last = null, spots = [], nearest = null, ready = null, only = null;

  function draw(lines, x, y) {
    last = [lines, x, y];
    const width = Math.max(280, box.clientWidth), height = Math.min(440, Math.max(280, width * 0.6));
    const left = 58, right = 12, top = 10, bottom = 44;
    const points = lines.flatMap((line) => line.points);
    const across = scaleOf(points.map((point) => point.x), x.log, x.low, x.high);
    const up = scaleOf(points.map((point) => point.y), y.log, y.low, y.high);
    const px = (value) => left + across.place(value) * (width - left - right);
    const py = (value) => height - bottom - up.place(value) * (height - top - bottom);
    const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${y.label} against ${x.label}` });
    for (const value of across.ticks) {
      svg.append(drawn("line", { class: "grid", x1: px(value), x2: px(value), y1: top, y2: height - bottom }));
      svg.append(drawn("text", { x: px(value), y: height - bottom + 16, "text-anchor": "middle" }, show(value)));
    }
    for (const value of up.ticks) {
      svg.append(drawn("line", { class: "grid", x1: left, x2: width - right, y1: py(value), y2: py(value) }));
      svg.append(drawn("text", { x: left - 6, y: py(value) + 4, "text-anchor": "end" }, y.percent ? `${show(100 * value)} %` : show(value)));
    }
    svg.append(drawn("rect", { class: "frame", x: left, y: top, width: width - left - right, height: height - top - bottom }));
    svg.append(drawn("text", { x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle" }, x.label));
    const turned = `translate(13 ${(top + height - bottom) / 2}) rotate(-90)`;
    svg.append(drawn("text", { transform: turned, "text-anchor": "middle" }, y.label));
    spots = [];
    for (const line of lines) {
      const usable = line.points.filter((point) => (!x.log || point.x > 0) && (!y.log || point.y > 0));
      const group = drawn("g", { "data-look": line.look });
      let path = "";
      for (const [place, point] of usable.entries()) {
        const [h, v] = [px(point.x).toFixed(1), py(point.y).toFixed(1)];
        path += place ? (line.step ? `H${h}V${v}` : `L${h} ${v}`) : `M${h} ${v}`;
        if (point.text) {
          spots.push({ h: Number(h), v: Number(v), look: line.look, ...point });
          group.append(drawn("circle", { cx: h, cy: v, r: line.step ? 2.6 : 1.8, fill: look(line.look).stroke }));
        }
      }
      group.prepend(drawn("path", { class: "line", d: path, ...look(line.look) }));
      svg.append(group);
    }
    svg.append(drawn("circle", { class: "mark", r: 5, fill: "none", stroke: "#000", visibility: "hidden" }));
    svg.addEventListener("pointermove", (event) => point(event, svg, width));
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") point(null, svg, width); });
    svg.addEventListener("pointerdown", (event) => { ready = nearest; point(event, svg, width); });
    // The first touch shows a point and the second one follows it; a mouse has shown it already.
    svg.addEventListener("click", () => { if (nearest && nearest.page && nearest === ready) location.href = nearest.page; });
    box.replaceChildren(svg, tip);
    tip.hidden = true;
    nearest = null;
    single(only);
  }

  function point(event, svg, width) {
    nearest = null;
    if (event) {
      const frame = svg.getBoundingClientRect();
      const [h, v] = [event.clientX - frame.left, event.clientY - frame.top];
      let least = NEAR;
      for (const spot of spots) {
        const away = Math.hypot(spot.h - h, spot.v - v);
        if (away < least) [least, nearest] = [away, spot];
      }
    }
    const mark = svg.querySelector(".mark");
    mark.setAttribute("visibility", nearest ? "visible" : "hidden");
    svg.style.cursor = nearest && nearest.page ? "pointer" : "";
    tip.hidden = !nearest;
    if (!nearest) return;
    mark.setAttribute("cx", nearest.h);
    mark.setAttribute("cy", nearest.v);
    tip.textContent = nearest.text;
    const side = nearest.h > width / 2;
    tip.style.left = side ? "" : `${nearest.h + 12}px`;
    tip.style.right = side ? `${width - nearest.h + 12}px` : "";
    tip.style.top = `${nearest.v + 10}px`;
  }

  function single(place) {
    only = place;
    for (const group of box.querySelectorAll("[data-look]")) {
      group.classList.toggle("faint", place !== null && Number(group.dataset.look) !== place);
    }
  }

  new ResizeObserver(() => { if (last) draw(...last); }).observe(host);
  return { draw, single };
}

// A page of curves: values against time or iterations

function curvesPage() {
  const state = { cost: COSTS[0], x: false, y: true, shown: new Set(data.lines.map((line) => line.look)) };
  const controls = element("div", { class: "controls" });
  const legend = element("div", { class: "legend" });
  view.append(controls, legend);
  const chart = makeChart(view);
  const set = (name) => (value) => { state[name] = value; draw(); };
  controls.append(
    chooser("against", COSTS.map((cost) => cost.label), (place) => set("cost")(COSTS[place])),
    checkbox("logarithmic across", state.x, set("x")),
    checkbox("logarithmic upwards", state.y, set("y")),
  );

  function draw() {
    const lines = data.lines.filter((line) => state.shown.has(line.look)).map((line) => ({
      look: line.look,
      points: line.values.map((value, place) => ({
        x: line[state.cost.key][place],
        y: value,
        page: line.page,
        text: `${line.label}\n${show(value)} after ${line.iterations[place]} iterations, ${show(line.seconds[place])} s`,
      })),
    }));
    chart.draw(lines, { label: state.cost.label, log: state.x }, { label: data.metric, log: state.y });
    legend.replaceChildren(...data.lines.map((line) => toggle(line.look, line.label, state.shown, draw, chart)));
  }
  draw();
}

// The index: performance profiles, a row for each solver, and a row for each problem

function indexPage() {
  const all = data.solvers.map((_, place) => place);
  const state = { goal: 0, cost: COSTS[0], shown: new Set(all), filters: new Map() };
  const runs = new Map(data.runs.map((run) => [`${run.problem} ${run.solver}`, run]));
  const runOf = (problem, solver) => runs.get(`${problem} ${solver}`);
  const controls = element("div", { class: "controls" });
  view.append(controls);
  const [profileNote, standings, problems] = [element("p"), element("table"), element("table")];
  const chart = makeChart(view);
  view.append(profileNote, element("h2", {}, "Solvers"), standings, element("h2", {}, "Problems"), problems);
  controls.append(
    chooser("goal", data.goals, (place) => { state.goal = place; draw(); }),
    chooser("cost", COSTS.map((cost) => cost.label), (place) => { state.cost = COSTS[place]; draw(); }),
    ...attributes().map(filter),
  );

  // The attributes in which problems differ, with their values; one of those that divide the problems in the same way.
  function attributes() {
    const names = [...new Set(data.problems.flatMap((problem) => Object.keys(problem.attributes)))];
    const found = names.map((name) => {
      const values = [...new Set(data.problems.map((problem) => problem.attributes[name]))];
      return { name, values: values.sort((a, b) => (a < b ? -1 : a > b ? 1 : 0)) };
    }).filter(({ values }) => values.length > 1);
    const parts = ({ name, values }) => data.problems.map((problem) => values.indexOf(problem.attributes[name])).join();
    return found.filter((each, place) => !found.slice(0, place).some((other) => parts(other) === parts(each)));
  }

  function filter({ name, values }) {
    const numbers = values.every((value) => typeof value === "number");
    const legend = element("legend", {}, name);
    if (numbers && values.length > FEW) {
      const range = [0, values.length - 1];
      const set = (end) => (place) => {
        range[end] = place;
        state.filters.set(name, (value) => value >= values[range[0]] && value <= values[range[1]]);
        draw();
      };
      const from = chooser("from", values.map(show), set(0)), to = chooser("to", values.map(show), set(1));
      to.querySelector("select").value = values.length - 1;
      return element("fieldset", { class: "filter" }, legend, from, to);
    }
    const chosen = new Set(values);
    state.filters.set(name, (value) => chosen.has(value));
    const boxes = values.map((value) => checkbox(value === undefined ? "none" : String(value), true, (on) => {
      on ? chosen.add(value) : chosen.delete(value);
      draw();
    }));
    return element("fieldset", { class: "filter" }, legend, ...boxes);
  }

  function passes(problem) {
    return [...state.filters].every(([name, accepts]) => accepts(problem.attributes[name]));
  }

  function draw() {
    const chosen = data.problems.map((_, place) => place).filter((place) => passes(data.problems[place]));
    const solvers = all.filter((place) => state.shown.has(place));
    const common = chosen.filter((problem) => solvers.every((solver) => runOf(problem, solver)));
    const lines = profiles(common, solvers);
    const ratios = lines.flatMap((line) => line.points.map((point) => point.x));
    const most = Math.max(2, ratios.reduce((a, b) => Math.max(a, b), 1)) * 1.1;
    for (const line of lines) { // a profile is a step function from 1 to the end of the axis
      line.points.unshift({ x: 1, y: line.points.filter((point) => point.x === 1).length / Math.max(1, common.length) });
      line.points.push({ x: most, y: line.points.length > 1 ? line.points[line.points.length - 1].y : 0 });
    }
    chart.draw(
      lines,
      { label: `${state.cost.label.replace(/ \(s\)/, "")}, relative to the best`, log: true, low: 1, high: most },
      { label: "share of the problems", low: 0, high: 1, percent: true },
    );
    const left = chosen.length - common.length;
    profileNote.textContent =
      `Performance profiles over ${common.length} of ${data.problems.length} problems: a point says which share of them ` +
      "a solver brings to the goal at no more than so many times the cost of the best solver." +
      (left ? ` ${left} more lack a run of a solver that is shown.` : "");
    drawStandings(lines, common);
    drawProblems(chosen, solvers);
  }

  // Each solver's problems in the order of the ratio of its cost to the least one.
  function profiles(common, solvers) {
    const lines = solvers.map((solver) => ({ look: solver, step: true, points: [] }));
    for (const problem of common) {
      const costs = solvers.map((solver) => state.cost.of(runOf(problem, solver), state.goal));
      const least = costs.reduce((a, b) => (b === null ? a : Math.min(a, b)), Infinity);
      solvers.forEach((solver, place) => {
        if (costs[place] === null) return;
        const ratio = least > 0 ? costs[place] / least : 1;
        const said = `${data.solvers[solver]}\n${data.problems[problem].label}\n${show(costs[place])} ${state.cost.key}`;
        lines[place].points.push({ x: ratio, text: `${said}, ${show(ratio)} times the least`, page: runOf(problem, solver).page });
      });
    }
    for (const { points } of lines) {
      points.sort((a, b) => a.x - b.x);
      points.forEach((point, place) => { point.y = (place + 1) / common.length; });
    }
    return lines;
  }

  function drawStandings(lines, common) {
    const within = (line, ratio) => (line ? line.points.filter((point) => point.text && point.x <= ratio).length : null);
    const heads = ["solver", "quickest", "within 2 times", "within 10 times", "solved", "not solved, and how their runs ended"];
    const rows = all.map((solver) => {
      const line = lines.find((each) => each.look === solver);
      const ends = new Map();
      for (const run of line ? common.map((problem) => runOf(problem, solver)) : []) {
        if (run.costs[state.goal] === null) ends.set(run.ended, (ends.get(run.ended) || 0) + 1);
      }
      const numbers = [1, 2, 10, Infinity].map((ratio) => within(line, ratio));
      const unsolved = [...ends].map(([end, times]) => `${times} ${end}`).join(", ");
      const row = element("tr", { "data-solver": data.solvers[solver] });
      row.append(element("td", {}, toggle(solver, data.solvers[solver], state.shown, draw, chart)));
      row.append(...numbers.map((number) => element("td", { class: "number" }, number === null ? "" : String(number))));
      row.append(element("td", { class: "ends" }, unsolved));
      return row;
    });
    fillTable(standings, heads.map((head, place) => element("th", { class: place % 5 ? "number" : "" }, head)), rows);
  }

  function drawProblems(chosen, solvers) {
    const heads = ["problem", ...solvers.map((solver) => data.solvers[solver])];
    const rows = chosen.map((place) => {
      const problem = data.problems[place];
      const found = solvers.map((solver) => runOf(place, solver));
      const costs = found.map((run) => (run ? state.cost.of(run, state.goal) : null));
      const least = costs.reduce((a, b) => (b === null ? a : Math.min(a, b)), Infinity);
      const row = element("tr", {}, element("th", { class: "problem", scope: "row" }, link(problem.page, problem.label)));
      found.forEach((run, solver) => {
        const cell = element("td", { class: "number" });
        if (!run) cell.append("not run");
        else if (costs[solver] === null) cell.append(element("small", { class: "unsolved" }, link(run.page, run.ended, run.why)));
        else cell.append(element("span", { class: costs[solver] === least ? "best" : "" }, link(run.page, show(costs[solver]), run.why)));
        row.append(cell);
      });
      return row;
    });
    fillTable(problems, heads.map((head, place) => element("th", { class: place ? "number turned" : "" }, head)), rows);
    const unsolved = chosen.filter((place) => solvers.every((solver) => !runOf(place, solver)?.costs[state.goal]));
    const caption = `${state.cost.label} to the goal, or how the run ended. ` +
      `${chosen.length - unsolved.length} of ${chosen.length} problems are solved by at least one of the solvers shown.`;
    problems.prepend(element("caption", {}, caption));
  }

  function fillTable(table, heads, rows) {
    table.replaceChildren(element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows));
  }
  draw();
}

data.view === "index" ? indexPage() : curvesPage();
