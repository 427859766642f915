(() => {
  const data = JSON.parse(find("data").textContent);
  const chosen = ["collective", "algorithm", "ranks", "machine"];
  let prices = null, turn = 0;

  // What Python packed: JSON, by gzip, in base 64.
  async function unpacked(text) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(plain).json();
  }

  // -- what is chosen --

  const value = (id) => find(id).value;
  const size = () => data.sizes[Number(value("bytes"))];
  const of = (collective) => data.collectives.find(([name]) => name === collective);
  const named = (name) => (name === "lax" ? data.builtIn : name);

  function fill(id, options, wanted) {
    find(id).replaceChildren(...options.map(([value, text]) => new Option(text, value)));
    const values = options.map(([value]) => value);
    find(id).value = values.includes(wanted) ? wanted : values[0];
  }

  // The algorithms of these ranks; the one that was chosen stays if it is among them.
  function fillAlgorithms(wanted) {
    const all = of(value("collective"))[2].map(({ name }) => name);
    const there = all.filter((name) => [value("collective"), name, value("ranks")].join("|") in data.pictures);
    fill("algorithm", there.map((name) => [name, name]), wanted);
  }

  function remember() {
    const all = chosen.map((id) => `${id}=${encodeURIComponent(value(id))}`);
    history.replaceState(null, "", `#${[...all, `bytes=${size()[1]}`].join("&")}`);
  }

  // -- words --

  function inWords(seconds) {
    for (const [unit, factor] of [["us", 1e6], ["ms", 1e3]]) {
      if (seconds * factor < 999.5) return `${Number((seconds * factor).toPrecision(3))} ${unit}`;
    }
    return `${Number(seconds.toPrecision(4))} s`;
  }

  const priced = () => prices[[value("collective"), value("ranks"), value("machine")].join("|")];

  // -- what is shown --

  async function showPicture() {
    const mine = ++turn;
    const [collective, algorithm, ranks] = chosen.map(value);
    const made = await unpacked(data.pictures[[collective, algorithm, ranks].join("|")]);
    if (mine !== turn) return;  // something else was chosen meanwhile
    const [, title, algorithms] = of(collective);
    const known = algorithms.find(({ name }) => name === algorithm);
    find("what").innerHTML = `${title} <i>by</i> ${algorithm} <i>on</i> ${ranks.replaceAll("x", " &times; ")} <i>ranks</i>`;
    find("summary").textContent = known.summary;
    find("explained").innerHTML = made.explained;
    find("counted").textContent = `${made.counted}.`;
    find("stage").innerHTML = made.picture;
    find("legend").innerHTML = made.legend;
    document.querySelector("ol").innerHTML = made.rounds;
    find("prose").innerHTML = known.prose;
    find("forms").textContent = known.forms;
    find("code").innerHTML = known.code;
    player.load(made.shards, null, asked.get("round"));
    asked.delete("round");
    document.body.dataset.shown = [collective, algorithm, ranks].join("|");
  }

  function showPrices() {
    const found = priced(), index = Number(value("bytes")), algorithm = value("algorithm");
    const rows = found ? Object.entries(found.seconds).map(([name, all]) => [name, all[index]]) : [];
    const least = Math.min(...rows.map(([, seconds]) => seconds));
    const machine = value("machine");
    find("bytes-said").textContent = size()[1];
    find("bytes").setAttribute("aria-valuetext", `${size()[1]} bytes`);
    const mine = rows.find(([name]) => name === algorithm);
    find("time").textContent = mine ? inWords(mine[1]) : "no price";
    find("of").textContent = mine ? `for ${size()[1]} on ${machine}, modelled` : `on ${machine}`;
    find("formula").textContent = found?.formulas[algorithm] ?? "";
    find("nothing").textContent = mine ? "" :
      `${machine} has no ${value("ranks")} ranks for this: choose a torus of fewer axes, or another machine.`;
    rows.sort(([, a], [, b]) => a - b);
    find("prices").querySelector("tbody").replaceChildren(...rows.map(([name, seconds]) => {
      const row = document.createElement("tr");
      const head = document.createElement("th");
      head.scope = "row";
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.innerHTML = `<svg class="ringcoll" viewBox="0 0 8 8"><rect width="8" height="8" rx="2" fill="${colour(name)}"/></svg>`;
      head.append(swatch);
      if (name === "lax") head.append(data.builtIn);
      else {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = name;
        button.onclick = () => { find("algorithm").value = name; changed(); };
        head.append(button);
      }
      if (name === algorithm) row.setAttribute("aria-current", "true");
      const cells = [inWords(seconds), seconds <= least * (1 + 1e-9) ? "fastest" : `${(seconds / least).toPrecision(3)} times`];
      row.dataset.name = name;
      row.append(head, ...cells.map((text) => {
        const cell = document.createElement("td");
        cell.textContent = text;
        return cell;
      }));
      return row;
    }));
    drawCurve(found, index, algorithm);
  }

  const order = ["lax", ...new Set(data.collectives.flatMap(([, , all]) => all.map(({ name }) => name)))];
  const colour = (name) => data.colours[order.indexOf(name) % data.colours.length];

  // -- the curve of all algorithms --

  const LEFT = 62, RIGHT = 548, TOP = 12, BOTTOM = 268;

  function drawn(tag, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function drawCurve(found, index, algorithm) {
    const curve = find("curve");
    curve.replaceChildren();
    find("ranges").textContent = "";
    if (!found) return;
    const all = Object.entries(found.seconds), flat = all.flatMap(([, times]) => times).filter((t) => t > 0);
    const low = Math.floor(Math.log10(Math.min(...flat))), high = Math.ceil(Math.log10(Math.max(...flat)));
    const sizes = data.sizes.map(([bytes]) => Math.log2(bytes));
    const x = (power) => LEFT + (RIGHT - LEFT) * (power - sizes[0]) / (sizes.at(-1) - sizes[0]);
    const y = (seconds) => BOTTOM - (BOTTOM - TOP) * (Math.log10(seconds) - low) / (high - low || 1);
    for (let power = low; power <= high; power += 1) {
      curve.append(drawn("line", { x1: LEFT, x2: RIGHT, y1: y(10 ** power), y2: y(10 ** power), class: "grid" }));
      curve.append(drawn("text", { x: LEFT - 6, y: y(10 ** power) + 4, "text-anchor": "end" }, inWords(10 ** power)));
    }
    data.sizes.forEach(([bytes, said], i) => {
      if (i % 4 === 0) curve.append(drawn("text", { x: x(Math.log2(bytes)), y: BOTTOM + 17, "text-anchor": "middle" }, said));
    });
    curve.append(drawn("line", { x1: x(sizes[index]), x2: x(sizes[index]), y1: TOP, y2: BOTTOM, class: "now" }));
    const lines = [...all].sort(([name]) => (name === algorithm ? 1 : -1));  // the chosen above the others
    for (const [name, times] of lines) {
      const points = times.map((t, i) => `${x(sizes[i]).toFixed(1)},${y(t).toFixed(1)}`).join(" ");
      const line = drawn("polyline", { points, stroke: colour(name), class: name === algorithm ? "mine" : "other" });
      line.append(drawn("title", {}, named(name)));
      curve.append(line);
    }
    // Below the axis, a bar of the fastest.
    found.fastest.forEach(([name, least], i) => {
      const start = x(Math.log2(least)), end = i + 1 < found.fastest.length ? x(Math.log2(found.fastest[i + 1][1])) : RIGHT;
      const bar = drawn("rect", { x: start, y: BOTTOM + 30, width: Math.max(end - start, 1), height: 12, fill: colour(name) });
      bar.append(drawn("title", {}, named(name)));
      curve.append(bar);
      if (i) curve.append(drawn("line", { x1: start, x2: start, y1: TOP, y2: BOTTOM + 42, class: "crossover" }));
    });
    const said = found.fastest.map(([name, , least], i) => (i ? `from ${least} on ${named(name)}` : named(name))).join(", ");
    find("ranges").textContent = `Fastest: ${said}.`;
    curve.setAttribute("aria-label", `Time against bytes, both logarithmic. Fastest: ${said}.`);
  }

  function changed() {
    remember();
    showPrices();
    return showPicture();
  }

  fill("collective", data.collectives.map(([name, title]) => [name, title]), asked.get("collective"));
  fill("ranks", data.shapes.map((name) => [name, name.replaceAll("x", " × ")]), asked.get("ranks") ?? "8");
  fill("machine", data.machines.map(([name, what]) => [name, `${name}: ${what}`]), asked.get("machine") ?? "v5e");
  find("bytes").max = data.sizes.length - 1;
  const wanted = data.sizes.findIndex(([, said]) => said === (asked.get("bytes") ?? "64M"));
  find("bytes").value = Math.max(wanted, 0);
  fillAlgorithms(asked.get("algorithm"));
  for (const id of ["collective", "ranks"]) {
    find(id).onchange = () => { fillAlgorithms(value("algorithm")); changed(); };
  }
  for (const id of ["algorithm", "machine"]) find(id).onchange = changed;
  find("bytes").oninput = () => { remember(); showPrices(); };
  unpacked(data.prices).then((all) => { prices = all; return changed(); });
})();
