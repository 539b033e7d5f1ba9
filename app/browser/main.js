// The main script of the page. One loop polls the server for the run that the page shows, and
// passes changes to the line over the run and to the open page. The script also updates the page's
// title, icon and address.
//
// Everything shown arrives as JSON and is set with textContent; nothing is ever parsed as markup.

import { Account } from "./common/account.js";
import { Connection, inTime } from "./common/connection.js";
import { send } from "./common/dom.js";
import { carryGradio } from "./common/gradio.js";
import { JobStrip } from "./common/jobs.js";
import { announce, NotifySwitch } from "./common/notify.js";
import { RunBar, showProgress } from "./common/runbar.js";
import { addressOf, readPlace } from "./frame/address.js";
import { Sidebar } from "./frame/sidebar.js";
import { Hardware } from "./hardware/hardware.js";
import { Timeline } from "./live/timeline.js";
import { RunPage } from "./run/run_page.js";
import { RunList } from "./runs/runs.js";
import { Talk } from "./talk/talk.js";
import { DataFiles } from "./train/data_files.js";
import {
    fill,
    leadToMachines,
    mountTrain,
    runsFound,
    serverAnswers,
    trainShown,
} from "./train/train.js";

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
const NOTHING_NEW = 999999999999999; // requests no part; as many digits as the server accepts

// ---------------------------------------------------------------- the page's state

const page = {
    place: readPlace(), // what the address says
    run: null,
    chosen: false, // whether the address or a person named the run
    server: null,
    seq: 0, // the number of the last answer about the run
    seen: 0, // the number of the last answer that was drawn
    axis: "step",
    active: undefined, // the active run, null for none, undefined before the first answer
    talkTo: null,
    bar: null,
    failures: 0, // in a row
    turn: 0, // counts polls of the server; only the newest one counts
    timer: 0,
    due: Infinity, // when the next poll was due
    delay: 500, // ms until the next poll
    reading: new AbortController(),
};
const places = { sidebar: null, bar: null, run: null, runs: null, talk: null, hardware: null };

// ---------------------------------------------------------------- which place is shown

// Shows a place. What `change` leaves out stays, except that another run is shown without a step.
function go(change) {
    const before = page.place;
    const isOther = "run" in change && change.run !== before.run;
    const place = { ...before, ...(isOther ? { step: null } : {}), ...change };
    if (place.page !== "run") Object.assign(place, { view: "overview", run: null, step: null });
    else if (!("run" in change) && before.page !== "run") place.run = page.run;
    const address = addressOf(place);
    if (address !== location.pathname + location.search) history.pushState(null, "", address);
    show(place);
    if (place.page === "runs") places.runs?.comparison.writeAddress();
}

// Follows Back and Forward.
window.addEventListener("popstate", () => {
    show(readPlace());
    places.runs?.comparison.followAddress();
});

function show(place) {
    const before = page.place;
    const isMoved = place.page !== before.page || place.view !== before.view;
    page.chosen = place.page === "run" && place.run !== null;
    page.place = null; // forgetting a run changes no address
    if (page.chosen && place.run !== page.run) takeRun(place.run);
    page.place = place;
    places.run?.setStep(place.step);
    draw();
    if (isMoved) {
        window.scrollTo(0, 0);
        if (place.page === "new") trainShown(true);
    }
    wake();
}

// Shows the page of the current place. All pages exist; the style sheet hides all others.
function draw() {
    const { place } = page;
    document.body.dataset.page = place.page;
    document.body.dataset.view = place.page === "run" ? place.view : "";
    places.sidebar?.mark({ ...place, run: page.run });
    places.bar?.mark({ ...place, run: page.run });
    places.run?.setView(place.view);
    places.talk?.setRun(runOfTalk());
}

// Forgets what was shown of the run before.
function takeRun(id) {
    Object.assign(page, { run: id, seq: 0, seen: 0 });
    places.run?.clear();
}

function openRun(id, view = "overview") {
    go({ page: "run", run: id, view });
}

// The run was deleted here.
function closeRun(id) {
    places.sidebar?.changed();
    if (page.run !== id) return;
    page.chosen = false;
    takeRun(null);
    places.bar?.clear();
    wake();
}

// Passes the meant run to Talk at the next poll.
function talkTo(id) {
    page.talkTo = id;
    openRun(id, "talk");
}

function setAxis(axis) {
    page.axis = axis;
    page.seen = 0;
    wake();
}

// The step whose timeline is shown, null for the latest one. It replaces the address, since Back
// should not go through the steps one by one. An address with a step names the run too.
function setStep(step) {
    if (page.place?.page !== "run" || page.place.step === step) return;
    const run = step === null ? page.place.run : page.run;
    page.place = { ...page.place, run, step };
    page.chosen = run !== null;
    history.replaceState(null, "", addressOf(page.place));
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

// Reads the run and the data of the page. `turn` is outdated once a newer poll has begun.
async function readAll(turn) {
    if (!page.run) await findRun(turn);
    if (page.run && turn === page.turn) await readRun(turn);
    if (turn !== page.turn) return;
    runsFound(Boolean(page.run));
    if (document.hidden) return;
    places.sidebar?.refresh();
    const { place } = page;
    if (place.page === "runs") await places.runs?.refresh();
    if (place.page === "hardware") places.hardware?.refresh();
    if (place.page === "talk" || place.view === "talk") readTalk();
}

function readTalk() {
    if (!places.talk) return;
    places.talk.refresh(runOfTalk(), page.talkTo);
    page.talkTo = null;
}

// The page Talk is of no run; the view Talk is of the run that is shown.
function runOfTalk() {
    return page.place.page === "run" ? page.run : null;
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
    if (error.status === 404 && page.chosen) {
        runsFound(true); // a person who has the address of a run needs no introduction
        places.run?.miss(error.message);
        places.bar?.miss(page.run);
        return;
    }
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
    page.delay = RESTING;
    page.run = home.run_id;
    if (page.run) {
        draw();
        return;
    }
    places.run?.showNone();
    places.bar?.clear();
}

async function readRun(turn) {
    const draws = page.place.page === "run" && places.run?.reads() && !document.hidden;
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
    take(answer, draws);
}

// The server's data on the run after answer number `since`.
async function askForRun(turn, since) {
    const asked = page.run;
    const address = `/api/live/${encodeURIComponent(asked)}?since=${since}&axis=${page.axis}`;
    try {
        return await send(address, undefined, page.signal);
    } catch (error) {
        // The run was deleted elsewhere: a page without a chosen run continues with another one.
        if (error.status === 404 && turn === page.turn && !page.chosen) closeRun(asked);
        throw error;
    }
}

function take(answer, draws) {
    page.bar = answer.bar;
    places.bar?.show(answer.bar, answer.active);
    places.sidebar?.follow(answer.bar);
    showProgress(answer.bar);
    announce(answer.bar);
    if (draws) {
        places.run.show(answer);
        page.seen = answer.seq;
    }
    if (page.place.page === "run") places.run?.showView(answer);
    if (answer.bar.pending) page.delay = AWAITING;
    else page.delay = answer.bar.tone === "busy" ? FOLLOWING : RESTING;
}

// Switches to the active run, at once.
function openActive(id) {
    takeRun(id);
    page.delay = 0;
    draw();
}

function setActive(active) {
    if (page.active !== undefined && page.active !== active) {
        places.bar?.activeChanged();
        places.sidebar?.changed();
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
    sidebar: (place) => {
        mountTrain(place);
        const wayIn = document.querySelector('meta[name="ramstream-login"]')?.content;
        if (wayIn) new Account(place.element, wayIn === "session");
        places.sidebar = new Sidebar(place.element, go);
        draw();
    },
    run_bar: (place) => {
        places.bar = new RunBar(place, {
            wake,
            go,
            open: () => openRun(page.active),
            opened: openRun,
        });
        const notify = place.element.querySelector('[data-part="notify"]');
        new NotifySwitch(notify, (text) => places.bar.tell(text, "warn"));
        draw();
        wake();
    },
    run: (place) => {
        const node = place.element.querySelector(".rs-timeline");
        const timeline = new Timeline(node, page.place.step, setStep);
        places.run = new RunPage(place.element, timeline, { go, setAxis, talkTo, wake });
        page.seen = 0;
        draw();
        wake();
    },
    hardware: (place) => {
        places.hardware = new Hardware(place.element, () => go({ page: "new" }), fill);
        leadToMachines((model) => {
            go({ page: "hardware" });
            places.hardware.offer(model);
        });
        wake();
    },
    jobs: (place) => {
        new JobStrip(place.element);
    },
    files: (place) => {
        new DataFiles(place);
    },
    talk: (place) => {
        places.talk = new Talk(place.element);
        wake();
    },
    runs: (place) => {
        const changed = () => places.sidebar?.changed();
        places.runs = new RunList(place.element, { openRun, closeRun, talkTo, changed });
        wake();
    },
    queued: (place) => {
        mountTrain(place);
        place.watch("value", () => places.sidebar?.changed());
    },
};

// Starts using a place that Gradio has created.
function mount(place) {
    const mountHere = mounts[place.name] ?? mountTrain;
    mountHere(place);
}

if (page.place.run) Object.assign(page, { run: page.place.run, chosen: true });
draw();
// Gradio may have created places before this script ran; from here on it passes them directly.
const waiting = window.ramstreamPlaces ?? [];
window.ramstreamPlaces = { push: mount };
for (const place of waiting) mount(place);

document.addEventListener("visibilitychange", () => {
    if (!document.hidden) wake();
});
for (const event of ["online", "pageshow"]) window.addEventListener(event, wake);
window.addEventListener("offline", () => connection.lose());
document.addEventListener("resume", () => {
    connection.wakeUp();
    wake();
});
