"use strict";
// Plays a picture whose clock is SMIL's: round k is between the times k and k + 1, in rounds.
(() => {
  const find = (id) => document.getElementById(id);
  const data = JSON.parse(find("data").textContent);
  const delay = Number(location.hash.slice(1)) || 1900;  // #300: milliseconds a round takes
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const svg = find("stage").querySelector("svg");
  const list = document.querySelector("ol"), entries = [...list.querySelectorAll("[data-go]")];
  const last = entries.length - 1, clock = svg.querySelector("[dur]");
  const seconds = clock ? parseFloat(clock.getAttribute("dur")) / (last + 2) : 1;
  let now = 0, share = 1, frame = null, playing = false;

  // Show a moment of the round that is shown; at its end, what was sent is on its arrows again.
  function at(part) {
    share = part;
    svg.setCurrentTime((now + Math.min(Math.max(part, 0.001), 0.995)) * seconds);
    svg.querySelector(".parked")?.remove();
    if (part < 1 || (playing && !still.matches)) return;
    const sent = svg.querySelector(`[data-round="${now}"]`);
    if (!sent) return;
    const parked = document.createElementNS(svg.namespaceURI, "g");
    parked.setAttribute("class", "parked");
    for (const message of sent.querySelectorAll("[data-at]")) {
      const copy = message.cloneNode(true);
      for (const animated of copy.querySelectorAll("animate, animateMotion")) animated.remove();
      copy.removeAttribute("visibility");
      copy.setAttribute("transform", `translate(${message.dataset.at})`);
      parked.append(copy);
    }
    sent.parentNode.append(parked);
  }

  function mark() {
    entries.forEach((entry, i) => {
      if (i === now) entry.setAttribute("aria-current", "step");
      else entry.removeAttribute("aria-current");
    });
    const entry = entries[now], name = entry.querySelector("b").textContent;
    const heading = now ? `${name} of ${last}` : name, phase = entry.dataset.phase;
    find("heading").textContent = heading;
    find("phase").textContent = phase;
    const lines = [...entry.querySelectorAll("span")].map((span) => span.cloneNode(true));
    const start = now ? `Every rank ${entry.dataset.rank} sends ` : "What every rank holds.";
    find("said").className = lines.length > 1 ? "several" : "";
    find("said").replaceChildren(start, ...lines);
    find("round").value = now;
    find("round").setAttribute("aria-valuetext", phase ? `${heading}, ${phase}` : heading);
    svg.dataset.shown = now;
    // Only the list scrolls, not the page.
    const top = entry.offsetTop, bottom = top + entry.offsetHeight;
    if (top < list.scrollTop) list.scrollTop = top - 30;
    else if (bottom > list.scrollTop + list.clientHeight) list.scrollTop = bottom - list.clientHeight;
  }

  // Let the messages of this round travel, from a part of it on; then the next, if it plays.
  function travel(from) {
    const began = performance.now() - from * delay;
    const step = (time) => {
      const part = Math.max((time - began) / delay, 0);
      if (part < 1) {
        if (!still.matches) at(part);
        frame = requestAnimationFrame(step);
      } else if (playing && now < last) {
        now += 1;
        mark();
        if (still.matches) at(1);
        travel(0);
      } else {
        halt();
        at(1);
      }
    };
    frame = requestAnimationFrame(step);
  }

  function halt() {
    cancelAnimationFrame(frame);
    frame = null;
    playing = false;
    find("play").setAttribute("aria-pressed", "false");
    find("play").setAttribute("aria-label", "Play");
  }

  function go(number, moves) {
    halt();
    now = Math.min(Math.max(number, 0), last);
    mark();
    if (moves && now && !still.matches) travel(0);
    else at(1);
  }

  function play() {
    if (playing) { halt(); return; }
    const again = now === last && share >= 1;
    if (frame !== null) cancelAnimationFrame(frame);
    if (again) { now = 0; mark(); }
    playing = true;
    find("play").setAttribute("aria-pressed", "true");
    find("play").setAttribute("aria-label", "Pause");
    let from = again ? 0.5 : share;  // of the start, half
    if (from >= 1) { now += 1; mark(); from = 0; }
    at(still.matches ? 1 : from);
    travel(from);
  }

  const onward = () => go(now + 1, now < last);

  function follow(whom) {
    find("follow").value = whom;
    for (const part of svg.querySelectorAll("[data-of]")) {
      part.classList.toggle("aside", whom !== "" && !part.dataset.of.includes(` ${whom} `));
    }
  }

  const keys = {
    ArrowLeft: () => go(now - 1), ArrowRight: onward, Home: () => go(0), End: () => go(last),
    " ": play,
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    const on = event.target;
    if (on.closest("select")) return;  // it takes the key
    if (event.key === " " && on.closest("button")) return;  // it is pressed
    if (event.key !== " " && on.closest("pre")) return;  // it is scrolled
    event.preventDefault();
    keys[event.key]();
  });
  find("first").onclick = () => go(0);
  find("back").onclick = () => go(now - 1);
  find("on").onclick = onward;
  find("play").onclick = play;
  find("round").oninput = (event) => go(Number(event.target.value));
  find("follow").onchange = (event) => follow(event.target.value);
  find("larger").onclick = () => {
    const larger = find("larger").getAttribute("aria-pressed") !== "true";
    find("larger").setAttribute("aria-pressed", larger);
    find("stage").classList.toggle("large", larger);
    const picture = find("stage").parentNode;
    picture.scrollLeft = (picture.scrollWidth - picture.clientWidth) / 2;
  };
  find("stage").onclick = (event) => {
    const cell = event.target.closest("[data-follow]");
    if (cell) follow(find("follow").value === cell.dataset.follow ? "" : cell.dataset.follow);
  };

  svg.pauseAnimations();
  find("round").max = last;
  const named = [["", "all"], ...Array.from({ length: data.shards }, (_, i) => [i, i])];
  find("follow").replaceChildren(...named.map(([value, text]) => new Option(text, value)));
  entries.forEach((entry, i) => { entry.onclick = () => go(i, i === now + 1); });
  follow(data.follow ?? "");
  go(0);
})();
