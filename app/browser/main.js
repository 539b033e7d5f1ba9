// The main script of the page. One loop polls the server for the run that the page shows, and
// passes changes to the run bar and to the open tab. The script also updates the page's title, icon
// and address.
//
// Everything shown arrives as JSON and is set with textContent; nothing is ever parsed as markup.

import { Account } from "./common/account.js";
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
// The loop polls again after this many ms.
const AWAITING = 500; // a request to the run is pending
const FOLLOWING = 1000; // the run is active
const RESTING = 2000; // the run is not active, or there is none
const HIDDEN = 10000; // the page is hidden
const SLOWEST = 5000; // upper limit, while the server refuses
const RETRY = 1000; // the server does not answer
const LOST_PATIENCE = 2500; // ms to wait for an answer after an outage
const TICK = 1000; // ms between updates of the displayed age
const ASLEEP = 10000; // ms of delay of a timer that show that the machine slept
const LOOK = 20; // ms until a tab's button is searched for again
const NOTHING_NEW = 999999999999999; // requests no part; as many digits as the server accepts

// ---------------------------------------------------------------- the page's state

const page = {
    run: null,
    chosen: false, // whether the address or a person named the run
    server: null,
    seq: 0, // the number of the last answer about the run
    seen: 0, // the number of the last answer that was drawn
    axis: "step",
    step: null,
    active: undefined, // the active run, null for none, undefined before the first answer
    tab: null,
    talkTo: null,
    bar: null,
    failures: 0, // in a row
    turn: 0, // counts polls of the server; only the newest one counts
    timer: 0,
    due: Infinity, // when the next poll was due
    delay: 500, // ms until the next poll
    reading: new AbortController(),
};
const places = { bar: null, live: null, runs: null, talk: null, hardware: null };

function openRun(id, tab) {
    page.run = id;
    page.chosen = true;
    page.seq = 0;
    page.seen = 0;
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

// Passes the meant run to the Talk tab once that exists: Gradio creates a tab when it is first
// opened.
function talkTo(id) {
    page.talkTo = id;
    openRun(id, "talk");
}

function setAxis(axis) {
    page.axis = axis;
    page.seen = 0;
    wake();
}

// The step whose timeline is shown, null for the latest one. The address names a step only together
// with a run.
function setStep(step) {
    page.step = step;
    if (step !== null) page.chosen = true;
    writeAddress();
}

function goTo(tab) {
    document.getElementById(`rs-tab-${tab}-button`)?.click();
}

// Opens the tab that the address names, as soon as Gradio has created its button.
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
    if (tab === "train") trainShown(!first);
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
    page.turn += 1;
    const { turn } = page;
    clearTimeout(page.timer);
    const isLate = Date.now() - page.due > ASLEEP;
    if (isLate && !document.hidden) connection.wakeUp(); // the machine slept
    giveUpReading();
    followTab();
    try {
        await readAll(turn);
        if (turn !== page.turn) return;
        page.failures = 0;
        sayWhatHappened();
    } catch (error) {
        if (turn !== page.turn) return;
        page.failures += 1;
        takeError(error);
    }
    plan(pause());
}

// Aborts pending requests of an earlier poll, whose connection may be dead.
function giveUpReading() {
    page.reading.abort();
    page.reading = new AbortController();
    const { signal } = page.reading;
    page.signal = connection.isLost
        ? AbortSignal.any([signal, AbortSignal.timeout(LOST_PATIENCE)])
        : signal;
}

// Reads the run and the data of the open tab. `turn` is outdated once a newer poll has begun.
async function readAll(turn) {
    if (!page.run) await findRun(turn);
    if (page.run && turn === page.turn) await readRun(turn);
    if (turn !== page.turn) return;
    runsFound(Boolean(page.run));
    if (document.hidden) return;
    if (page.tab === "runs") await places.runs?.refresh();
    if (page.tab === "talk" && places.talk) {
        places.talk.refresh(page.chosen ? page.run : null, page.talkTo);
        page.talkTo = null;
    }
    if (page.tab === "hardware") places.hardware?.refresh();
}

function sayWhatHappened() {
    const told = connection.answered(page.server, page.run ? page.bar : null);
    const tone = page.bar?.state === "interrupted" ? "warn" : "good";
    if (told) places.bar?.tell(told, tone);
    else places.bar?.note("");
}

function takeError(error) {
    if (error.unreachable) connection.lose();
    // A refusal is an answer too: the server is reachable.
    else if (error.status) connection.answered(page.server, null);
    else console.error(error);
    // A person who has the address of a run needs no introduction.
    if (error.status === 404) runsFound(true);
    if (connection.isLost) {
        sayHowOld();
        return;
    }
    const loggedOut = error.status === 401;
    places.bar?.note(loggedOut ? "You are logged out." : error.message, { loggedOut });
}

// The current interval of the loop, in ms.
function pause() {
    if (connection.isLost) return RETRY;
    if (document.hidden) return HIDDEN;
    if (page.failures) return Math.min(SLOWEST, 500 * 2 ** page.failures);
    return page.delay;
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
    const answer = await askForRun(turn, draws ? page.seen : NOTHING_NEW);
    if (turn !== page.turn) return;
    if (answer.server_id !== page.server || answer.seq < page.seq) {
        // A new server numbers its answers from the start, so it is unknown which of them were
        // seen.
        const wasSeen = page.server !== null && page.seen > 0;
        page.server = answer.server_id;
        page.seen = 0;
        page.seq = 0;
        if (wasSeen && draws) {
            await readRun(turn);
            return;
        }
    }
    page.seq = answer.seq;
    setActive(answer.active);
    if (!page.chosen && answer.active && answer.active !== page.run) {
        openActive(answer.active);
        return;
    }
    show(answer, draws);
}

// The server's data on the run after answer number `since`.
async function askForRun(turn, since) {
    const asked = page.run;
    const address = `/api/live/${encodeURIComponent(asked)}?since=${since}&axis=${page.axis}`;
    try {
        return await send(address, undefined, page.signal);
    } catch (error) {
        // The run was deleted elsewhere: a page without a chosen run continues with another one.
        const goesOn = !page.chosen || page.seq;
        if (error.status === 404 && turn === page.turn && goesOn) closeRun(asked);
        throw error;
    }
}

function show(answer, draws) {
    page.bar = answer.bar;
    places.bar?.show(answer.bar, answer.active);
    showProgress(answer.bar);
    announce(answer.bar);
    if (draws) {
        places.live.show(answer);
        page.seen = answer.seq;
    }
    if (answer.bar.pending) page.delay = AWAITING;
    else page.delay = answer.bar.tone === "busy" ? FOLLOWING : RESTING;
}

// Switches to the active run, at once.
function openActive(id) {
    page.run = id;
    page.seq = 0;
    page.seen = 0;
    page.delay = 0;
}

function setActive(active) {
    if (page.active !== undefined && page.active !== active) {
        places.bar?.activeChanged();
        places.hardware?.outdated();
        places.talk?.activeChanged();
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

const RECONNECTING =
    "Reconnecting: the server does not answer. " +
    "If only the connection is lost, the run goes on.";

function sayHowOld() {
    const aside = `What is shown is ${inTime(connection.age)} old.`;
    places.bar?.note(RECONNECTING, { aside });
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
        const node = place.element.querySelector(".rs-timeline");
        const timeline = new Timeline(node, page.step, setStep);
        places.live = new Live(place.element, setAxis, timeline);
        page.seen = 0;
        wake();
    },
    hardware: (place) => {
        places.hardware = new Hardware(place.element, () => goTo("train"));
        wake();
    },
    header: (place) => {
        mountTrain(place);
        if (place.props.value?.has_login) new Account(place.element);
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

// Starts using a place that Gradio has created.
function mount(place) {
    const mountHere = mounts[place.name] ?? mountTrain;
    mountHere(place);
}

const query = new URLSearchParams(location.search);
if (query.get("run")) Object.assign(page, { run: query.get("run"), chosen: true });
if (page.run && /^\d{1,15}$/.test(query.get("step"))) page.step = Number(query.get("step"));
const asked = query.get("tab") ?? (query.has("compare") ? "runs" : null);
if (TABS.includes(asked)) openTab(asked);
// Gradio may have created places before this script ran; from here on it passes them directly.
const waiting = window.ramstreamPlaces ?? [];
window.ramstreamPlaces = { push: mount };
for (const place of waiting) mount(place);

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
