"use strict";
(() => {
  const find = (id) => document.getElementById(id);
  const data = JSON.parse(find("data").textContent);
  const SVG = "http://www.w3.org/2000/svg", ROW = 26, AXIS = 20, LEAST = 0.01;
  const whole = Math.max(...data.reports.map((report) => report.total), LEAST);
  let from = 0, to = whole, marked = [];

  function made(parent, tag, attributes, text) {
    const element = parent.namespaceURI === SVG || tag === "svg"
      ? document.createElementNS(SVG, tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }

  const rounded = (number) => Number(number.toPrecision(4)).toLocaleString("en");

  // -- the timelines --

  const panels = data.reports.map((report) => {
    const panel = made(find("timelines"), "section", { class: "timeline" });
    made(panel, "h2", {}, report.title);
    for (const line of report.totals) made(panel, "p", { class: "totals" }, line);
    const tracks = report.tracks.map((track) => {
      made(panel, "div", { class: "track" }, track.name);
      return made(panel, "svg", { class: "strip", height: ROW, role: "img", "aria-label": track.name });
    });
    return { report, tracks, axis: made(panel, "svg", { class: "strip axis", height: AXIS, "aria-hidden": "true" }) };
  });

  function draw() {
    for (const { report, tracks, axis } of panels) {
      const width = axis.clientWidth, scale = width / (to - from);
      report.tracks.forEach((track, i) => {
        const bars = [];
        let end = -1, last = -1;  // what is thinner than half a pixel is drawn once
        track.segments.forEach(([kind, start, lasts, label], number) => {
          if (start + lasts < from || start > to) return;
          const left = Math.max((start - from) * scale, -2);
          const right = Math.min((start + lasts - from) * scale, width + 2);
          if (kind === last && right < end + 0.5) return;
          [end, last] = [right, kind];
          const bar = document.createElementNS(SVG, "rect");
          const attributes = { x: left, width: Math.max(right - left, 0.7), height: ROW - 4, y: 2, rx: 1.5,
            fill: data.looks[kind][1], "data-segment": number };
          for (const [name, value] of Object.entries(attributes)) bar.setAttribute(name, value);
          if (marked.includes(report.labels[label][0])) bar.setAttribute("class", "marked");
          bars.push(bar);
          if (right - left > 60 && lasts > 0) {
            const text = document.createElementNS(SVG, "text");
            text.setAttribute("x", Math.max(left, 0) + 5);
            text.setAttribute("y", ROW / 2 + 4);
            const [name, at] = report.labels[label];
            const room = Math.floor((right - Math.max(left, 0) - 10) / 6.4);
            text.textContent = (at || name).slice(0, Math.max(room, 0));
            bars.push(text);
          }
        });
        tracks[i].replaceChildren(...bars);
      });
      drawAxis(axis, width, scale);
    }
    find("span").textContent = `${rounded(from)} to ${rounded(to)} us`;
  }

  function drawAxis(axis, width, scale) {
    axis.replaceChildren();
    const rough = (to - from) / Math.max(width / 110, 2), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((times) => times * power).find((each) => each >= rough);
    for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) {
      const x = (tick - from) * scale;
      made(axis, "line", { x1: x, x2: x, y1: 0, y2: 5 });
      if (x > 12 && x < width - 24) made(axis, "text", { x, y: 17, "text-anchor": "middle" }, rounded(tick));
    }
  }

  function show(start, stop) {
    const lasts = Math.min(Math.max(stop - start, LEAST), whole);
    from = Math.min(Math.max(start, 0), whole - lasts);
    to = from + lasts;
    draw();
  }

  function zoom(factor, around = (from + to) / 2) {
    show(around - (around - from) * factor, around + (to - around) * factor);
  }

  const move = (share) => show(from + share * (to - from), to + share * (to - from));
  const all = () => { marked = []; show(0, whole); };

  // -- hands --

  const keys = {
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": all,
    ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
  find("closer").onclick = keys["+"];
  find("farther").onclick = keys["-"];
  find("left").onclick = keys.ArrowLeft;
  find("right").onclick = keys.ArrowRight;
  find("fit").onclick = all;
  window.addEventListener("resize", draw);

  const timelines = find("timelines");
  const timeAt = (event, strip) => {
    const box = strip.getBoundingClientRect();
    return from + (event.clientX - box.left) / box.width * (to - from);
  };
  timelines.addEventListener("wheel", (event) => {
    const strip = event.target.closest(".strip");
    if (!strip || !(event.ctrlKey || event.metaKey)) return;  // the page scrolls
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event, strip));
  }, { passive: false });

  let held = null;
  timelines.addEventListener("pointerdown", (event) => {
    const strip = event.target.closest(".strip");
    if (strip) held = { x: event.clientX, from, to, width: strip.clientWidth };
  });
  window.addEventListener("pointermove", (event) => {
    if (!held) return;
    const gone = (held.x - event.clientX) / held.width * (held.to - held.from);
    show(held.from + gone, held.to + gone);
  });
  for (const end of ["pointerup", "pointercancel"]) window.addEventListener(end, () => { held = null; });

  // -- what is under the pointer --

  const tip = find("tip");
  timelines.addEventListener("pointerover", (event) => {
    const number = event.target.dataset?.segment;
    const strip = event.target.closest(".strip");
    const panel = panels.find(({ tracks }) => tracks.includes(strip));
    tip.hidden = number === undefined || !panel;
    if (tip.hidden) return;
    const [kind, start, lasts, label] = panel.report.tracks[panel.tracks.indexOf(strip)].segments[number];
    const [name, at, source] = panel.report.labels[label];
    tip.replaceChildren();
    made(tip, "b", {}, at || name);
    made(tip, "div", {}, `${data.looks[kind][2]}: ${rounded(lasts)} us from ${rounded(start)}`);
    for (const line of [at ? name : "", source]) if (line) made(tip, "div", { class: "line" }, line);
    const box = event.target.getBoundingClientRect(), wide = document.documentElement.clientWidth;
    const left = Math.max(box.left, 0) + window.scrollX;
    tip.style.left = `${Math.max(Math.min(left, wide - tip.offsetWidth - 8), 8)}px`;
    tip.style.top = `${box.bottom + window.scrollY + 6}px`;
  });
  timelines.addEventListener("pointerleave", () => { tip.hidden = true; });

  // -- the legend and the tables --

  for (const [, colour, text] of data.looks) {
    const entry = made(find("legend"), "span", {});
    const square = made(entry, "svg", { width: 12, height: 12, "aria-hidden": "true" });
    made(square, "rect", { width: 12, height: 12, rx: 2, fill: colour });
    entry.append(text);
  }

  function goTo(report, names) {
    const there = report.tracks.flatMap(({ segments }) => segments)
      .filter(([, , , label]) => names.includes(report.labels[label][0]));
    if (!there.length) return;
    marked = names;
    const [, start, lasts] = there[0];
    show(start - lasts, start + 2 * lasts);
    timelines.scrollIntoView({ block: "nearest" });
  }

  for (const { report } of panels) {
    if (panels.length > 1) made(find("tables"), "h3", {}, report.title);
    const table = made(made(find("tables"), "div", { class: "scrolls" }), "table", {});
    const head = made(made(table, "thead", {}), "tr", {});
    for (const text of ["line", "exposed us", "collective", "times", "wire us, each"]) made(head, "th", { scope: "col" }, text);
    const body = made(table, "tbody", {});
    for (const [label, names, kind, count, wire, exposed] of report.rows) {
      const row = made(body, "tr", {});
      const button = made(made(row, "th", { scope: "row" }), "button", { type: "button" }, label);
      button.onclick = () => goTo(report, names);
      for (const cell of [rounded(exposed), kind, count, rounded(wire)]) made(row, "td", {}, cell);
    }
  }
  draw();
})();
