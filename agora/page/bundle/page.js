// The page of a run. All that peers have written goes into the page as text, never as markup.
"use strict";

const MAX_POINTS = 2000;
const MAX_HAPPENINGS = 200;
const MAX_TASKS = 400;
const FIGURES = 20; // rows of the table of figures
const PEERS_AT_A_TIME = 100;
// How a state of the run, of a stage or of an event looks; others look plain.
const LOOKS = {
  OK: "good",
  COMPLETED: "good",
  DEGRADED: "warn",
  WAITING: "warn",
  PAUSED: "warn",
  STALLED: "bad",
  UNREACHABLE: "bad",
  PeerBanned: "bad",
  OffenceRecorded: "bad",
  PeerGone: "warn",
  AmendmentDropped: "warn",
  AmendmentRefused: "warn",
  StageDiverged: "warn",
  StageFellBehind: "warn",
  MicrobatchDropped: "bad",
  StepTorn: "bad",
  TaskFailed: "bad",
  DiskTrouble: "bad",
  OwnerTold: "warn",
};

let latest = null; // the newest update
let points = []; // [unix, step, loss, held-out loss, tokens per second]
let happenings = []; // [unix, name, sentence]
let tasks = []; // [unix, task, metric, value]
let chosenStage = null;
let firstPeer = 0;
let asked = null; // aborts the last question for peers
let isDue = false;
let silence = null; // the timer that ends when an update is missing
const charts = {};

const node = (id) => document.getElementById(id);
const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const whole = (value) => (isNumber(value) ? grouped.format(value) : "-");
const fixed = (value, digits) => (isNumber(value) ? value.toFixed(digits) : "-");
const isToday = (time) => time.toDateString() === new Date().toDateString();
const clock = (unix) => {
  const time = new Date(unix * 1000);
  return isToday(time) ? time.toLocaleTimeString() : time.toLocaleString();
};
const listOf = (value) => (Array.isArray(value) ? value : []);

// --- writing into the page, only where something has changed

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function setClass(element, name) {
  if (element.className !== name) element.className = name;
}

function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

/** Gives `parent` `count` children, made by `create`, and returns them. */
function childrenOf(parent, count, create) {
  while (parent.childElementCount > count) parent.lastElementChild.remove();
  while (parent.childElementCount < count) parent.append(create());
  return parent.children;
}

function fillTable(body, rows) {
  const elements = childrenOf(body, rows.length, () => document.createElement("tr"));
  rows.forEach((cells, at) => {
    const made = childrenOf(elements[at], cells.length, () => document.createElement("td"));
    cells.forEach((text, column) => setText(made[column], String(text)));
  });
}

// --- the run

function showVerdict({ health, name, run_id: run, step }) {
  const { state, why } = health;
  setText(node("state"), String(state));
  setText(node("why"), `${why}.`);
  setText(node("do"), health.do ? `Do: ${health.do}.` : "");
  setClass(node("verdict"), LOOKS[state] ?? "");
  setText(node("announced"), `The run is ${state}`); // only its changes are read aloud
  setText(node("name"), String(name || "Agora"));
  setText(node("run-id"), run ? `Run ${run}` : "");
  document.title = `${state}: ${name || "Agora"}, step ${whole(step)}`;
}

function showTiles(status, work) {
  const [low, high] = listOf(status.loss_spread);
  const counts = (found) =>
    Object.entries(found ?? {})
      .map(([name, count]) => `${whole(count)} ${name}`)
      .join(", ");
  const isSeen = status.health.state !== "UNREACHABLE"; // else its figures are unknown, not 0
  const tiles = [
    ["Step", isSeen || status.step ? whole(status.step) : "-", ""],
    ["Loss", fixed(status.loss, 3), isNumber(low) && low !== high ? `${fixed(low, 3)} to ${fixed(high, 3)}` : ""],
    ["Held-out loss", fixed(work.heldout_loss_nats, 3), "of this machine's last evaluation"],
    ["Tokens/s", isSeen ? whole(status.tokens_per_second) : "-", "of the slowest stage"],
    ["Peers", isSeen ? whole(status.peer_count) : "-", [counts(status.states), counts(status.paths)].filter(Boolean).join("; ")],
  ];
  for (const [name, value] of Object.entries(status.tuning ?? {})) tiles.push([name, fixed(value, 3), ""]);
  const { samples, result } = status;
  if (samples) tiles.push(["Epoch", whole(samples.epoch), `${whole(samples.seen)} samples seen`]);
  if (result && result.state !== "none")
    tiles.push(["Result", String(result.state), String(result.folder || result.why || "")]);
  const boxes = childrenOf(node("tiles"), tiles.length, () => {
    const box = make("div");
    box.append(make("dt"), make("dd"));
    box.lastChild.append(make("span"), make("small"));
    return box;
  });
  tiles.forEach(([name, value, remark], at) => {
    setText(boxes[at].firstChild, name);
    setText(boxes[at].lastChild.firstChild, value);
    setText(boxes[at].lastChild.lastChild, remark);
  });
}

function makeStage() {
  const item = make("li");
  const button = make("button");
  button.type = "button";
  button.append(
    make("span", "title"),
    make("span", "count"),
    make("span", "rate"),
    make("progress"),
    make("span", "why"),
  );
  button.addEventListener("click", () => choose(Number(button.dataset.stage)));
  item.append(button);
  return item;
}

function showStages(stages) {
  const rates = stages.map((stage) => stage.tokens_per_second || 0);
  const [least, most] = [Math.min(...rates), Math.max(...rates)];
  const items = childrenOf(node("stages"), stages.length, makeStage);
  stages.forEach((row, at) => {
    const button = items[at].firstChild;
    const [title, count, rate, bar, why] = button.children;
    const health = row.health ?? {};
    const about = row.replicas_known === row.replicas ? "" : "about ";
    const isSlowest = rates[at] === least && least < 0.9 * most;
    button.dataset.stage = row.stage;
    button.setAttribute("aria-pressed", String(chosenStage === row.stage));
    setClass(button, LOOKS[health.state] ?? "");
    setText(title, `Stage ${row.stage}${health.state ? `: ${health.state}` : ""}`);
    setText(
      count,
      `${about}${whole(row.replicas)} ${row.replicas === 1 ? "replica" : "replicas"}, step ${whole(row.step)}`,
    );
    setText(rate, `${whole(row.tokens_per_second)} tokens/s${isSlowest ? ", the slowest" : ""}`);
    bar.max = most || 1;
    bar.value = rates[at];
    bar.setAttribute("aria-label", `Tokens per second of stage ${row.stage}`);
    setText(why, whyOf(row, health));
  });
}

function whyOf(row, health) {
  const told = [];
  if (health.state && health.state !== "OK") told.push(health.why);
  if (row.waits_for && row.replicas) told.push(row.waits_for); // of an empty stage, its health says the same
  if (isNumber(row.share_counted)) told.push(`${(100 * row.share_counted).toFixed(1)} % of its tokens counted`);
  if (isNumber(row.staleness)) told.push(`gradients ${row.staleness.toFixed(2)} steps old`);
  return told.join("; ");
}

function showWork(work) {
  if (!isNumber(work.microbatches_started) || !work.microbatches_started) return;
  const { microbatches_started: started, microbatches_completed: done } = work;
  const lost = `${whole(work.microbatches_dropped)} dropped; ${whole(work.microbatches_rerouted)} calls sent again`;
  setText(
    node("work"),
    `This machine has started ${whole(started)} microbatches: ${whole(done)} answered, ${lost} elsewhere.`,
  );
}

function showRounds(rounds) {
  node("rounds-part").hidden = !rounds.length;
  node("no-rounds").hidden = rounds.length > 0;
  const sorted = [...rounds].sort(
    (one, other) => one.stage - other.stage || String(one.what).localeCompare(other.what),
  );
  const rows = sorted.map((round) => [
    round.stage,
    round.what === "slice" ? "fragment" : round.what,
    whole(round.round),
    `${fixed(round.contributors, 1)} of ${whole(round.members)}`,
    `${whole(round.failed_parts)} of ${whole(round.parts)}`,
    fixed(round.seconds, 2),
    `${short.format(round.bytes_out)}B`,
  ]);
  fillTable(node("rounds"), rows);
}

function showHappenings() {
  node("nothing-yet").hidden = happenings.length > 0;
  const items = childrenOf(node("happenings"), happenings.length, () => {
    const item = make("li");
    item.append(make("time"), make("span"));
    return item;
  });
  [...happenings].reverse().forEach(([unix, name, sentence], at) => {
    const [time, text] = items[at].children;
    setText(time, clock(unix));
    setClass(text, LOOKS[name] ?? "");
    setText(text, String(sentence));
  });
}

function showText({ text, why, step }) {
  setText(node("text"), String(text));
  node("text").hidden = !text;
  const problem = why ? `There is no ${text ? "newer " : ""}text: ${why}.` : "";
  setText(
    node("text-note"),
    problem || (text ? `Drawn at step ${whole(step)}; a new one comes after ten minutes.` : "No text yet."),
  );
}

function showJoin(join) {
  if (!join) return;
  setText(node("join-note"), join.note);
  setText(node("join-command"), join.command);
  node("join-part").hidden = false;
}

function showTasks() {
  node("tasks-part").hidden = !tasks.length;
  const newest = new Map(); // by task and metric: its row
  for (const [unix, task, metric, value] of [...tasks].sort((one, other) => one[0] - other[0])) {
    const key = `${task}\n${metric}`;
    newest.set(key, [task, metric, fixed(value, 4), newest.get(key)?.[3] ?? fixed(value, 4), clock(unix)]);
  }
  fillTable(node("tasks"), [...newest.values()]);
}

// --- peers

function choose(stage) {
  chosenStage = chosenStage === stage ? null : stage;
  firstPeer = 0;
  render();
}

function turn(by) {
  firstPeer = Math.max(0, firstPeer + by);
  render();
}

function holds({ span }, stage) {
  return stage === null || (listOf(span)[0] <= stage && stage <= listOf(span)[1]);
}

async function showPeers(status) {
  const isWhole = status.peers.length === status.peer_count;
  if (isWhole || (chosenStage === null && firstPeer === 0)) {
    const held = status.peers.filter((peer) => holds(peer, chosenStage));
    fillPeers(held, isWhole ? held.length : status.peer_count);
    return;
  }
  asked?.abort();
  asked = new AbortController();
  const stage = chosenStage === null ? "" : `&stage=${chosenStage}`;
  try {
    const answer = await fetch(`peers.json?start=${firstPeer}${stage}`, { signal: asked.signal });
    const { peers, total } = await answer.json();
    fillPeers(peers, total);
  } catch {
    // A newer question has taken its place, or the next update brings it again.
  }
}

function fillPeers(peers, total) {
  const of = chosenStage === null ? "of all stages" : `of stage ${chosenStage}`;
  const shown = peers.length < total ? `${whole(firstPeer + 1)} to ${whole(firstPeer + peers.length)} of ` : "";
  setText(node("peers-summary"), `${shown}${whole(total)} ${total === 1 ? "peer" : "peers"} ${of}`);
  node("all-stages").hidden = chosenStage === null;
  node("previous").hidden = firstPeer === 0;
  node("next").hidden = firstPeer + peers.length >= total;
  fillTable(node("peers"), peers.map(cellsOf));
}

function cellsOf(peer) {
  const span = [...new Set(listOf(peer.span))].join("-");
  return [
    `${peer.name} …${String(peer.peer).slice(-6)}${peer.path === "self" ? ` (${ownName()})` : ""}`,
    span,
    peer.state,
    whole(peer.step),
    whole(peer.tokens_per_second),
    isNumber(peer.tokens_counted) ? short.format(peer.tokens_counted) : "-",
    peer.device ? describeDevice(peer.device) : "-",
    peer.bandwidth ? `${fixed((8 * peer.bandwidth) / 1e6, 0)} Mbit/s` : "-",
    peer.path,
    `${fixed(peer.seen_seconds, 0)} s ago`,
    [peer.note, peer.waits_for && `waits: ${peer.waits_for}`].filter(Boolean).join("; ") || "-",
  ];
}

/** Only a daemon of this machine says something of it: else the status is that of the peer that was asked. */
function ownName() {
  return latest.status.machine ? "this machine" : "the peer that was asked";
}

function describeDevice(device) {
  const gib = (bytes) => fixed(bytes / 2 ** 30, 1);
  const mfu = isNumber(device.mfu) ? `, MFU ${(100 * device.mfu).toFixed(1)} %` : "";
  return `${device.name}, ${gib(device.memory_used)} of ${gib(device.memory_total)} GiB${mfu}`;
}

// --- charts

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function makeChart(id, names, digits) {
  const place = node(`${id}-chart`);
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  const lines = ["--accent", "--second"].slice(0, names.length);
  const series = lines.map((line) => ({ stroke: colour(line), width: 2, spanGaps: true, points: { show: false } }));
  const options = {
    width: place.clientWidth || 300,
    height: place.clientHeight || 240,
    legend: { show: false },
    cursor: { drag: { x: false, y: false } },
    scales: { y: { range: (_, low, high) => (low === null ? [0, 1] : padded(low, high)) } },
    axes: [axis, { ...axis, size: 60, values: (_, ticks) => ticks.map((tick) => short.format(tick)) }],
    series: [{}, ...series],
  };
  const legend = node(`${id}-legend`);
  legend.replaceChildren(...names.map((_, at) => make("span", at ? "second" : "first")));
  charts[id]?.plot.destroy();
  charts[id] = { plot: new uPlot(options, [[], ...names.map(() => [])], place), place, legend, names, digits };
}

function padded(low, high) {
  const margin = 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
  return [low - margin, high + margin];
}

function makeCharts() {
  makeChart("loss", ["training", "held-out"], 3);
  makeChart("rate", ["tokens/s"], 0);
}

function drawChart(id, columns) {
  const { plot, place, legend, names, digits } = charts[id];
  const times = points.map(([unix]) => unix);
  const values = columns.map((column) => points.map((point) => point[column]));
  plot.setData([times, ...values]);
  const told = names.map((name, at) => {
    const known = values[at].filter(isNumber);
    const write = (value) => (digits ? fixed(value, digits) : whole(value));
    setText(legend.children[at], known.length ? `${name} ${write(known.at(-1))}` : `${name} unknown`);
    return known.length ? `${name} from ${write(known[0])} to ${write(known.at(-1))}` : `${name} unknown`;
  });
  place.setAttribute("aria-label", `Over time: ${told.join("; ")}`);
}

function showCharts() {
  drawChart("loss", [2, 3]);
  drawChart("rate", [4]);
  const newest = points.slice(-FIGURES).reverse();
  const rows = newest.map(([unix, step, loss, heldout, rate]) => [
    clock(unix),
    whole(step),
    fixed(loss, 3),
    fixed(heldout, 3),
    whole(rate),
  ]);
  fillTable(node("figures"), rows);
}

// --- updates

/** Of too many points every other one of the older half stays, so that the whole run is on the chart. */
function thinned(found) {
  const half = found.length >> 1;
  return found.length > MAX_POINTS ? found.filter((_, at) => at >= half || at % 2 === 0) : found;
}

function take(update) {
  if (update.is_first) [points, happenings, tasks] = [[], [], []];
  points = thinned([...points, ...update.points]);
  const all = [...happenings, ...update.happenings].sort(([one], [other]) => one - other);
  happenings = all.slice(-MAX_HAPPENINGS);
  tasks = [...tasks, ...update.tasks].slice(-MAX_TASKS);
  latest = update;
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(render); // not while the page is hidden
}

function render() {
  isDue = false;
  if (!latest) return;
  performance.mark("update-begins");
  const { status, work, rounds, text, join } = latest;
  showVerdict(status);
  showTiles(status, work);
  showStages(listOf(status.stages));
  showWork(work);
  showPeers(status);
  showRounds(rounds);
  showHappenings();
  showTasks();
  showText(text);
  showJoin(join);
  showCharts();
  performance.measure("update", "update-begins");
}

/** Says so when the next update does not come in time: a figure that stands still looks like one that is new. */
function expectUpdate(seconds) {
  clearTimeout(silence);
  const patience = 3 * seconds + 10;
  const text = `Nothing new has come for ${whole(patience)} s: what is shown is old. Its server's log may say why.`;
  silence = setTimeout(() => setText(node("connection"), text), 1000 * patience);
}

function follow() {
  const updates = new EventSource("updates");
  updates.addEventListener("message", (event) => {
    setText(node("connection"), "");
    const update = JSON.parse(event.data);
    expectUpdate(update.next_s);
    take(update);
  });
  updates.addEventListener("error", () => {
    setText(
      node("connection"),
      "The page's own server does not answer: what is shown is old. Is `swarm page` or the daemon still running?",
    );
    // A browser gives up after an answer that is no stream of events, as when too many pages are open.
    if (updates.readyState === EventSource.CLOSED) setTimeout(follow, 10_000);
  });
}

node("all-stages").addEventListener("click", () => choose(chosenStage));
node("previous").addEventListener("click", () => turn(-PEERS_AT_A_TIME));
node("next").addEventListener("click", () => turn(PEERS_AT_A_TIME));
node("copy").addEventListener("click", async () => {
  await navigator.clipboard.writeText(node("join-command").textContent);
  setText(node("copy"), "Copied");
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  makeCharts();
  render();
});
new ResizeObserver(() => {
  for (const { plot, place } of Object.values(charts)) {
    if (place.clientWidth) plot.setSize({ width: place.clientWidth, height: place.clientHeight });
  }
}).observe(node("loss-chart"));
makeCharts();
follow();
