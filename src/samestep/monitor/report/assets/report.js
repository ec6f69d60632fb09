"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const main = document.getElementById("main");
  const COLOURS = ["#4c7be6", "#e8663c", "#22a06b", "#a463d8", "#d9a412", "#d94f8a", "#1d9fb0", "#8a8f98"];
  const PART_COLOURS = {
    compute: "#22a06b", data: "#e2a51c", exchange: "#4c7be6", finish: "#58b8c9", checkpoint: "#a463d8",
    evaluation: "#8fb0f5", other: "#9aa3ae", outside: "#9aa3ae", startup: "#e79ac0", lost: "#e0452f", down: "#5b6470",
  };
  const state = { axis: "step", smooth: 0, log: false, shown: data.runs.map(() => true), plots: [] };

  // Elements: text is set as text, never as markup.
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "style") Object.assign(element.style, value);
      else element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  };
  const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const withAlpha = (hex, alpha) => hex + Math.round(alpha * 255).toString(16).padStart(2, "0");
  const short = (value) => {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size >= 1e9 || size < 1e-4) return value.toExponential(2);
    if (size >= 10000) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(5)));
  };
  const duration = (seconds) => {
    if (seconds < 60) return `${seconds.toPrecision(3)} s`;
    const minutes = Math.floor(seconds / 60);
    return minutes < 60 ? `${minutes} min ${Math.round(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  };

  // Curves ----------------------------------------------------------------------------------------------------------
  const smoothed = (values) => {
    if (!state.smooth) return values;
    let mean = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = state.smooth * mean + (1 - state.smooth) * value;
      weight = state.smooth * weight + (1 - state.smooth);
      return mean / weight;
    });
  };

  // A chart is {title, note, wide, lines}; a line is {run, label, x, y, low?, high?, colour, dash?, smooth?}.
  const lineTables = (lines) => lines.map((line) => {
    const columns = [line.x, line.smooth === false ? line.y : smoothed(line.y)];
    if (line.low) columns.push(line.low, line.high);
    return columns;
  });

  const seriesOf = (lines) => {
    const series = [{ label: state.axis }], bands = [];
    for (const line of lines) {
      const single = line.y.filter((value) => value !== null).length < 3;
      series.push({
        label: line.label, stroke: line.colour, width: 1.6, dash: line.dash, spanGaps: lines.length > 1, fill: line.fill,
        points: { show: single || undefined, size: 5 },
        value: (_, value, __, place) => short(line.own ? (place === null ? null : line.own[place]) : value),
      });
      if (line.low) {
        const hidden = { label: "", class: "band", stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
        series.push({ ...hidden }, { ...hidden });
        bands.push({ series: [series.length - 1, series.length - 2], fill: withAlpha(line.colour, 0.16) });
      }
    }
    return { series, bands };
  };

  const axis = (extra) => ({
    stroke: colourOf("--muted"), grid: { stroke: colourOf("--grid"), width: 1 }, ticks: { stroke: colourOf("--grid"), width: 1 },
    font: "11px system-ui, sans-serif", ...extra,
  });

  const marks = (lines) => (plot) => {
    const { ctx, bbox } = plot, seen = new Set(), ratio = window.devicePixelRatio || 1;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    for (const line of lines) {
      if (seen.has(line.run)) continue;
      seen.add(line.run);
      const run = data.runs[line.run];
      ctx.strokeStyle = withAlpha(COLOURS[line.run % COLOURS.length], 0.6);
      ctx.lineWidth = ratio;
      ctx.setLineDash([4 * ratio, 4 * ratio]);
      run.events.filter((event) => event.kind === "start").slice(1).forEach((event) => {
        const x = Math.round(plot.valToPos(event[state.axis], "x", true));
        ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
      });
      ctx.setLineDash([]);
      if (!line.skips) continue;
      ctx.fillStyle = colourOf("--bad");
      for (const place of run.curves.skipped[state.axis]) {
        const x = plot.valToPos(place, "x", true), foot = bbox.top + bbox.height, half = 4 * ratio;
        ctx.beginPath(); ctx.moveTo(x - half, foot); ctx.lineTo(x + half, foot); ctx.lineTo(x, foot - 2 * half); ctx.fill();
      }
    }
    ctx.restore();
  };

  const plotChart = (card, chart) => {
    const lines = chart.lines.filter((line) => state.shown[line.run]);
    if (!lines.length) return;
    const { series, bands } = seriesOf(lines);
    const joined = uPlot.join(lineTables(lines));
    const positive = lines.every((line) => (line.low || line.y).every((value) => value === null || value > 0));
    const isLog = state.log && positive && !chart.stacked;
    const holder = make("div");
    card.append(holder);
    const plot = new uPlot({
      width: Math.max(card.clientWidth - 26, 200), height: chart.wide ? 300 : 230, series,
      bands: chart.stacked ? chart.stacked(lines) : bands,
      cursor: { sync: { key: "samestep" }, points: { size: 6 } },
      scales: { x: { time: false }, y: isLog ? { distr: 3 } : { range: chart.fromZero ? (_, low, high) => [0, high > 0 ? high * 1.06 : 1] : undefined } },
      axes: [
        axis({ values: (_, ticks) => ticks.map((tick) => (tick >= 1e6 ? `${tick / 1e6}M` : tick >= 1e4 ? `${tick / 1e3}k` : String(tick))) }),
        axis({ size: (_, values) => 20 + 6.4 * Math.max(3, ...(values || []).map((value) => value.length)), values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))) }),
      ],
      hooks: { draw: [marks(lines)] },
    }, joined, holder);
    state.plots.push({ plot, card });
  };

  const perRun = (group, name, extra = {}) => data.runs.flatMap((run, number) => {
    const held = run.curves[group];
    if (!held || !held[name]) return [];
    const many = data.runs.length > 1;
    return [{
      run: number, x: held[state.axis], y: held[name], low: held[`${name}_low`], high: held[`${name}_high`],
      label: extra.word ? (many ? `${run.name} ${extra.word}` : extra.word) : (many ? run.name : extra.label || name),
      colour: extra.colour && !many ? extra.colour : COLOURS[number % COLOURS.length], dash: extra.dash, skips: extra.skips, smooth: extra.smooth,
    }];
  });

  const stackedChart = (run, number) => {
    const held = run.curves.speed, order = ["compute", "finish", "exchange", "data", "outside"];
    const words = { compute: "forward and backward", outside: "between windows" };
    let below = held[state.axis].map(() => 0);
    const lines = order.map((part) => {
      below = below.map((value, i) => value + (held[part][i] || 0));
      return { run: number, x: held[state.axis], y: below.slice(), own: held[part], label: words[part] || part, colour: PART_COLOURS[part], smooth: false };
    });
    lines.forEach((line, i) => { line.fill = i === 0 ? withAlpha(line.colour, 0.55) : undefined; });
    const stacked = () => lines.slice(1).map((line, i) => ({ series: [i + 2, i + 1], fill: withAlpha(line.colour, 0.55) }));
    const title = data.runs.length > 1 ? `time of a window: ${run.name}` : "time of a window";
    return { title, note: "ms, stacked", lines, stacked, fromZero: true };
  };

  const chartList = () => {
    const lossNote = data.runs.some((run) => run.curves.skipped.step.length) ? "global mean; red marks: skipped windows" : "global mean";
    const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.curves.logs)))];
    const logged = names.map((name) => ({
      title: name, note: "logged",
      lines: data.runs.flatMap((run, number) => {
        const held = run.curves.logs[name];
        return held ? [{ run: number, x: held[state.axis], y: held.value, label: data.runs.length > 1 ? run.name : name, colour: COLOURS[number % COLOURS.length], smooth: false }] : [];
      }),
    }));
    return {
      training: [
        { title: "loss", note: lossNote, wide: true, lines: perRun("training", "loss", { skips: true }) },
        ...logged,
        { title: "gradient norm", note: "before clipping", lines: perRun("training", "grad_norm", { label: "norm" }) },
        { title: "learning rate", lines: perRun("training", "lr", { label: "rate", smooth: false }) },
        { title: "loss scale", lines: perRun("training", "scale", { label: "scale", smooth: false, skips: true }) },
      ],
      speed: [
        { title: "samples/s", note: "over all ranks", fromZero: true, lines: perRun("speed", "samples_per_s", { label: "samples/s" }) },
        { title: "weight/s", note: "loss terms, such as tokens", fromZero: true, lines: perRun("speed", "weight_per_s", { label: "weight/s" }) },
        {
          title: "window time", note: "ms, without what lies between windows", fromZero: true,
          lines: [
            ...perRun("speed", "p50", { word: "median", smooth: false }),
            ...perRun("speed", "p95", { word: "95 %", dash: [6, 3], colour: "#d9a412", smooth: false }),
            ...(data.runs.length > 1 ? [] : perRun("speed", "max", { word: "longest", dash: [2, 3], colour: "#e8663c", smooth: false })),
          ],
        },
        ...data.runs.map(stackedChart),
        {
          title: "memory of main", note: "GiB", fromZero: true,
          lines: [
            ...perRun("memory", "allocated", { word: "allocated", smooth: false }),
            ...perRun("memory", "reserved", { word: "reserved", dash: [6, 3], colour: "#d9a412", smooth: false }),
            ...perRun("memory", "peak_allocated", { word: "peak", dash: [2, 3], colour: "#e8663c", smooth: false }),
            ...perRun("memory", "process", { word: "process", colour: "#22a06b", smooth: false }),
          ],
        },
      ],
    };
  };

  const drawCharts = () => {
    for (const { plot } of state.plots) plot.destroy();
    state.plots = [];
    for (const [group, charts] of Object.entries(chartList())) {
      const grid = document.getElementById(`charts-${group}`);
      grid.replaceChildren();
      for (const chart of charts) {
        if (!chart.lines.some((line) => state.shown[line.run] && line.y.some((value) => value !== null))) continue;
        const heading = make("h3", {}, chart.title, chart.note ? make("small", {}, chart.note) : null);
        const card = make("section", { class: `card chart${chart.wide ? " wide" : ""}`, "data-chart": chart.title }, heading);
        grid.append(card);
        plotChart(card, chart);
      }
    }
  };

  // The rest of the page --------------------------------------------------------------------------------------------
  const section = (title, ...children) => main.append(make("h2", {}, title), ...children);

  const summary = () => {
    if (data.runs.length === 1) {
      const tiles = data.runs[0].summary.map(([name, value, note]) =>
        make("div", { class: "card tile" }, make("dt", {}, name), make("dd", {}, value), make("small", {}, note)));
      main.append(make("dl", { class: "tiles" }, ...tiles));
      return;
    }
    const names = [...new Set(data.runs.flatMap((run) => run.summary.map(([name]) => name)))];
    const rows = names.map((name) => [name, ...data.runs.map((run) => (run.summary.find((row) => row[0] === name) || ["", "–"])[1])]);
    main.append(make("div", { class: "card scroll" }, table(["", ...data.runs.map((run) => run.name)], rows)));
  };

  const table = (headings, rows, isDifferent = () => false) => {
    const cells = (row) => row.map((cell, i) => make("td", i === 0 ? { class: "name" } : {}, cell));
    return make("table", { class: "data" },
      make("thead", {}, make("tr", {}, ...headings.map((heading) => make("th", {}, heading)))),
      make("tbody", {}, ...rows.map((row) => make("tr", isDifferent(row) ? { class: "differs" } : {}, ...cells(row)))));
  };

  const goodput = () => section("Where the wall time went", ...data.runs.map((run) => {
    const { seconds, wall } = run.goodput, parts = Object.keys(data.parts).filter((part) => seconds[part] > 0);
    const bar = make("div", { class: "bar", role: "img", "aria-label": "shares of the wall time" }, ...parts.map((part) =>
      make("span", { title: `${part} ${(100 * seconds[part] / wall).toFixed(1)} %`, style: { width: `${100 * seconds[part] / wall}%`, background: PART_COLOURS[part] } })));
    const keys = make("div", { class: "keys" }, ...parts.map((part) => make("div", { title: data.parts[part] },
      make("i", { style: { background: PART_COLOURS[part] } }), make("span", {}, data.parts[part]),
      make("b", {}, `${(100 * seconds[part] / wall).toFixed(1)} %`), make("span", { style: { flex: "none" } }, duration(seconds[part])))));
    return make("div", { class: "card good" }, make("h3", {}, run.name, make("small", {}, `  ${duration(wall)} in all, restarts included`)), bar, keys);
  }));

  const ranks = () => {
    const held = data.runs.filter((run) => run.ranks.length > 1);
    if (!held.length) return;
    const rows = held.flatMap((run) => run.ranks.map((rank, number) => {
      const windows = rank.windows || 1, ms = (value) => short(Number((1000 * value / windows).toPrecision(3)));
      const compute = rank.seconds - rank.data - rank.exchange - rank.finish - rank.outside;
      return [data.runs.length > 1 ? `${run.name}, rank ${number}` : `rank ${number}`, ms(rank.seconds), ms(compute), ms(rank.data), ms(rank.exchange), ms(rank.finish), ms(rank.outside), `${(rank.peak_memory / 2 ** 30).toFixed(2)} GiB`, rank.host];
    }));
    section("Ranks, last epoch (ms a window)", make("div", { class: "card scroll" },
      table(["rank", "window", "forward and backward", "data", "exchange", "finish", "between", "peak memory", "host"], rows)));
  };

  const profiles = () => {
    for (const run of data.runs) {
      if (!run.profile) continue;
      const p = run.profile, rows = Object.entries(p.stages_ms).map(([name, ms]) => [name, `${short(Number(ms.toPrecision(3)))} ms`]);
      if (p.exchange_ms) rows.push(["collectives under way", `${short(Number(p.exchange_ms.toPrecision(3)))} ms, ${(100 * p.hidden_ms / p.exchange_ms).toFixed(0)} % hidden by computation`]);
      rows.push(...p.operators.slice(0, 6).map(([name, ms]) => [name, `${short(Number(ms.toPrecision(3)))} ms`]));
      section(`Profile of ${p.windows} windows: ${run.name}`, make("div", { class: "card scroll" }, table(["stage or operator", "a window"], rows)));
    }
  };

  const events = () => {
    const rows = data.runs.flatMap((run) => run.events.map((event) => ({ run, event }))).sort((a, b) => a.event.time - b.event.time);
    const many = data.runs.length > 1;
    const cells = rows.map(({ run, event }) => [
      new Date(event.time * 1000).toISOString().slice(0, 19).replace("T", " "), ...(many ? [run.name] : []), event.step === null ? "" : event.step.toLocaleString("en"),
      make("span", { class: `kind ${event.kind === "end" && event.text !== "status done" ? "error" : event.kind}` }, event.kind), event.text,
    ]);
    const left = data.runs.reduce((sum, run) => sum + run.events_left_out, 0);
    section(`Events${left ? ` (${left} more are in the ledger)` : ""}`, make("div", { class: "card scroll" }, table(["time (UTC)", ...(many ? ["run"] : []), "step", "event", ""], cells)));
  };

  const settings = (title, field) => {
    const names = [...new Set(data.runs.flatMap((run) => Object.keys(run[field])))].sort();
    if (!names.length) return;
    const text = (value) => (value === undefined ? "–" : typeof value === "object" && value !== null ? JSON.stringify(value) : String(value));
    const rows = names.map((name) => [name, ...data.runs.map((run) => text(run[field][name]))]);
    const differs = (row) => new Set(row.slice(1)).size > 1;
    section(title, make("div", { class: "card scroll" }, table(["", ...data.runs.map((run) => run.name)], rows, differs)));
  };

  const chips = () => {
    const holder = document.getElementById("runs");
    data.runs.forEach((run, number) => {
      const chip = make("button", { class: "chip", type: "button", "aria-pressed": "true", title: run.status },
        make("i", { class: "dot", style: { background: COLOURS[number % COLOURS.length] } }), make("b", {}, run.name), make("small", {}, run.status));
      chip.addEventListener("click", () => {
        state.shown[number] = !state.shown[number];
        chip.setAttribute("aria-pressed", String(state.shown[number]));
        drawCharts();
      });
      holder.append(chip);
    });
  };

  const controls = () => {
    const on = (id, kind, action) => document.getElementById(id).addEventListener(kind, action);
    on("axis", "change", (event) => { state.axis = event.target.value; drawCharts(); });
    on("smooth", "input", (event) => { state.smooth = Number(event.target.value); drawCharts(); });
    on("log", "change", (event) => { state.log = event.target.checked; drawCharts(); });
    on("reset", "click", drawCharts);
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
    let width = window.innerWidth, waiting = 0;
    window.addEventListener("resize", () => {
      if (window.innerWidth === width) return;
      width = window.innerWidth;
      clearTimeout(waiting);
      waiting = setTimeout(() => {
        for (const { plot, card } of state.plots) plot.setSize({ width: Math.max(card.clientWidth - 26, 200), height: plot.height });
      }, 80);
    });
  };

  chips();
  controls();
  summary();
  section("Training", make("div", { class: "charts", id: "charts-training" }));
  section("Speed and memory", make("div", { class: "charts", id: "charts-speed" }));
  goodput();
  ranks();
  profiles();
  events();
  settings("Settings", "config");
  settings("Environment", "environment");
  main.append(make("footer", {}, `Samestep ${data.version}. Drag over a curve to zoom all of them; double-click, or “whole range”, to go back. Dashed lines are restarts.`));
  drawCharts();
  document.documentElement.dataset.ready = String(state.plots.length);
})();
