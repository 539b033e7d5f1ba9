// The live page: one poll loop for the run that the page looks at, the run bar, the page's title,
// icon and address. Whatever is shown arrives as JSON and is set with textContent; nothing is ever
// parsed as markup.

import { Connection, inTime } from "./common/connection.js";
import { isShown, send } from "./common/dom.js";
import { carryGradio } from "./common/gradio.js";
import { JobStrip } from "./common/jobs.js";
import { announce, NotifySwitch } from "./common/notify.js";
import { RunBar, showProgress } from "./common/runbar.js";
import { Hardware } from "./hardware/hardware.js";
import { Live } from "./live/live.js";
import { Timeline } from "./live/timeline.js";
import { RunList } from "./runs/runs.js";
import { Talk } from "./talk/talk.js";
import { mountTrain, runsFound, serverAnswers, trainShown } from "./train/train.js";

const TABS = ["train", "live", "runs", "talk", "hardware"];
const SLOWEST = 5000;
const HIDDEN = 10000;
const RESTING = 2000;
const FOLLOWING = 1000;
const AWAITING = 500; // a run that goes on; one that has been asked for something
// While the server does not answer: a look takes LOST_PATIENCE at most, and the next comes RETRY
// later.
const LOST_PATIENCE = 2500;
const RETRY = 1000;
const TICK = 1000;
const ASLEEP = 10000;
const LOOK = 20;
const NOTHING_NEW = 999999999999999; // of as many digits as the server reads

// ---------------------------------------------------------------- the page's state

const page = {
    run: null,
    chosen: false,
    server: null,
    seq: 0,
    seen: 0,
    axis: "step",
    step: null,
    active: undefined,
    tab: null,
    talkTo: null,
    bar: null,
    failures: 0,
    turn: 0,
    timer: 0,
    due: Infinity,
    delay: 500,
    reading: new AbortController(),
};
const places = { bar: null, live: null, runs: null, talk: null, hardware: null };

function openRun(id, tab) {
    page.run = id;
    page.chosen = true;
    page.seq = page.seen = 0;
    places.live?.clear();
    if (tab) goTo(tab);
    writeAddress();
    wake();
}

function closeRun(id) {
    if (page.run !== id) return;
    Object.assign(page, { run: null, chosen: false, seq: 0, seen: 0 });
    places.live?.clear();
    places.bar?.clear();
    writeAddress();
    wake();
}

// The Talk tab takes over which run is meant once it is there: a tab that was never opened is not
// made yet.
function talkTo(id) {
    page.talkTo = id;
    openRun(id, "talk");
}

function setAxis(axis) {
    page.axis = axis;
    page.seen = 0;
    wake();
}

// The step whose timeline is looked at; null while it is the latest one. Only of the run that the
// address names.
function setStep(step) {
    page.step = step;
    if (step !== null) page.chosen = true;
    writeAddress();
}

function goTo(tab) {
    document.getElementById(`rs-tab-${tab}-button`)?.click();
}

// The tab that the address names, as soon as Gradio has made its button.
function openTab(tab) {
    if (document.getElementById(`rs-tab-${tab}-button`)) goTo(tab);
    else setTimeout(openTab, LOOK, tab);
}

function followTab() {
    const tab = TABS.find((name) => {
        const node = document.getElementById(`rs-tab-${name}`);
        return node && isShown(node);
    });
    if (!tab || tab === page.tab) return;
    const first = page.tab === null;
    page.tab = tab;
    if (tab === "train") trainShown();
    if (!first) writeAddress();
    wake();
}

function writeAddress() {
    const query = new URLSearchParams(location.search);
    if (page.chosen && page.run) query.set("run", page.run);
    else query.delete("run");
    if (page.step !== null && query.has("run")) query.set("step", page.step);
    else query.delete("step");
    if (page.tab) query.set("tab", page.tab);
    history.replaceState(null, "", `${location.pathname}?${query}`);
}

// ---------------------------------------------------------------- the poll loop

function wake() {
    plan(0);
}

function plan(wait) {
    clearTimeout(page.timer);
    page.due = Date.now() + wait;
    page.timer = setTimeout(poll, wait);
}

async function poll() {
    const turn = ++page.turn;
    clearTimeout(page.timer);
    if (Date.now() - page.due > ASLEEP && !document.hidden) connection.wakeUp(); // the machine slept
    page.reading.abort(); // what an earlier look still waits for was asked over a connection that may be gone
    page.reading = new AbortController();
    const patience = connection.isLost ? AbortSignal.timeout(LOST_PATIENCE) : null;
    page.signal = patience ? AbortSignal.any([page.reading.signal, patience]) : page.reading.signal;
    followTab();
    try {
        if (!page.run) await findRun(turn);
        if (page.run && turn === page.turn) await readRun(turn);
        if (turn !== page.turn) return;
        runsFound(Boolean(page.run));
        if (page.tab === "runs" && !document.hidden) await places.runs?.refresh();
        if (page.tab === "talk" && !document.hidden && places.talk) {
            places.talk.refresh(page.chosen ? page.run : null, page.talkTo);
            page.talkTo = null;
        }
        if (page.tab === "hardware" && !document.hidden) places.hardware?.refresh();
        page.failures = 0;
        const told = connection.answered(page.server, page.run ? page.bar : null);
        if (told) places.bar?.tell(told, page.bar?.state === "interrupted" ? "warn" : "good");
        else places.bar?.note("");
    } catch (error) {
        if (turn !== page.turn) return;
        page.failures += 1;
        if (error.unreachable) connection.lose();
        else if (error.status)
            connection.answered(page.server, null); // with a refusal, but it is there
        else console.error(error);
        if (error.status === 404) runsFound(true); // whoever has the address of a run knows what this is
        if (connection.isLost) sayHowOld();
        else
            places.bar?.note(error.status === 401 ? "You are logged out." : error.message, {
                loggedOut: error.status === 401,
            });
    }
    if (connection.isLost) plan(RETRY);
    else if (document.hidden) plan(HIDDEN);
    else plan(page.failures ? Math.min(SLOWEST, 500 * 2 ** page.failures) : page.delay);
}

async function findRun(turn) {
    const home = await send("/api/live", undefined, page.signal);
    if (turn !== page.turn) return;
    page.server = home.server_id;
    setActive(home.active);
    page.run = home.run_id;
    page.delay = RESTING;
    if (!page.run) places.live?.clear();
}

async function readRun(turn) {
    const draws = places.live?.isShown() && !document.hidden;
    const since = draws ? page.seen : NOTHING_NEW;
    const asked = page.run;
    let answer;
    try {
        answer = await send(
            `/api/live/${encodeURIComponent(asked)}?since=${since}&axis=${page.axis}`,
            undefined,
            page.signal,
        );
    } catch (error) {
        // Deleted elsewhere: a page that was not told which run to show goes on with another one.
        if (error.status === 404 && turn === page.turn && (!page.chosen || page.seq))
            closeRun(asked);
        throw error;
    }
    if (turn !== page.turn) return;
    if (answer.server_id !== page.server || answer.seq < page.seq) {
        const known = page.server !== null && page.seen > 0;
        page.server = answer.server_id;
        page.seen = 0;
        page.seq = 0;
        if (known && draws) return readRun(turn);
    }
    page.seq = answer.seq;
    setActive(answer.active);
    if (!page.chosen && answer.active && answer.active !== page.run)
        return openActive(answer.active);
    page.bar = answer.bar;
    places.bar?.show(answer.bar, answer.active);
    showProgress(answer.bar);
    announce(answer.bar);
    if (draws) {
        places.live.show(answer);
        page.seen = answer.seq;
    }
    page.delay = answer.bar.pending ? AWAITING : answer.bar.tone === "busy" ? FOLLOWING : RESTING;
}

function openActive(id) {
    page.run = id;
    page.seq = page.seen = 0;
    page.delay = 0;
}

function setActive(active) {
    if (page.active !== undefined && page.active !== active) {
        places.bar?.activeChanged();
        places.hardware?.outdated();
    }
    page.active = active;
}

// ---------------------------------------------------------------- a server that does not answer

const connection = new Connection((isLost) => {
    serverAnswers(!isLost);
    if (!isLost) return;
    places.bar?.disable();
    sayHowOld();
    wake();
});
carryGradio(connection);

function sayHowOld() {
    places.bar?.note(
        "Reconnecting: the server does not answer. If only the connection is lost, the run goes on.",
        { aside: `What is shown is ${inTime(connection.age)} old.` },
    );
}

setInterval(() => {
    if (connection.isLost) sayHowOld();
}, TICK);

// ---------------------------------------------------------------- mounting

const mounts = {
    run_bar: (place) => {
        places.bar = new RunBar(place, {
            wake,
            open: () => openRun(page.active, "live"),
            opened: openRun,
        });
        new NotifySwitch(place.element.querySelector('[data-part="notify"]'));
        wake();
    },
    live: (place) => {
        const timeline = new Timeline(
            place.element.querySelector(".rs-timeline"),
            page.step,
            setStep,
        );
        places.live = new Live(place.element, setAxis, timeline);
        page.seen = 0;
        wake();
    },
    hardware: (place) => {
        places.hardware = new Hardware(place.element, () => goTo("train"));
        wake();
    },
    jobs: (place) => {
        new JobStrip(place.element);
    },
    talk: (place) => {
        places.talk = new Talk(place.element);
        wake();
    },
    runs: (place) => {
        places.runs = new RunList(place.element, { openRun, closeRun, talkTo });
        wake();
    },
};

function mount(place) {
    (mounts[place.name] ?? ((other) => mountTrain(other)))(place);
}

const query = new URLSearchParams(location.search);
if (query.get("run")) Object.assign(page, { run: query.get("run"), chosen: true });
if (page.run && /^\d{1,15}$/.test(query.get("step"))) page.step = Number(query.get("step"));
const asked = query.get("tab") ?? (query.has("compare") ? "runs" : null);
if (TABS.includes(asked)) openTab(asked);
const waiting = window.ramstreamPlaces ?? [];
window.ramstreamPlaces = { push: mount };
waiting.forEach(mount);

for (const event of ["click", "keyup"])
    document.addEventListener(event, () => setTimeout(followTab, 0));
document.addEventListener("visibilitychange", () => {
    if (!document.hidden) wake();
});
for (const event of ["online", "pageshow"]) window.addEventListener(event, wake);
window.addEventListener("offline", () => connection.lose());
document.addEventListener("resume", () => {
    connection.wakeUp();
    wake();
});
