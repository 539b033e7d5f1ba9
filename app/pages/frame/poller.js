// One loop polls the server for the run that the page shows, and passes changes to the line over
// the run and to the open page. It also notices when the server does not answer.

import { send } from "../../shared/dom.js";
import { serverAnswers } from "../new/train.js";
import { Connection, inTime } from "./connection.js";
import { carryGradio } from "./gradio.js";
import { announce } from "./notify.js";
import { closeRun, draw, runOfChat, takeRun } from "./router.js";
import { showProgress } from "./runbar.js";
import { everyTime, plan, wake } from "./schedule.js";
import { page, places } from "./state.js";

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
        reportOutage();
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
    if (document.hidden) return;
    places.sidebar?.refresh();
    const { place } = page;
    if (place.page === "runs") await places.runs?.refresh();
    if (place.page === "hardware") places.hardware?.refresh();
    if (place.page === "chat" || place.view === "chat") readChat();
}

function readChat() {
    if (!places.chat) return;
    places.chat.refresh(runOfChat(), page.openChat);
    page.openChat = null;
}

function reportOutage() {
    const message = connection.answered(page.server, page.run ? page.bar : null);
    const tone = page.bar?.state === "interrupted" ? "warn" : "good";
    if (message) places.bar?.notify(message, tone);
    else places.bar?.note("");
}

function takeError(error) {
    if (error.unreachable) connection.lose();
    // A refusal is an answer too: the server is reachable.
    else if (error.status) connection.answered(page.server, null);
    else console.error(error);
    if (error.status === 404 && page.chosen) {
        places.run?.miss(error.message);
        places.bar?.miss(page.run);
        return;
    }
    if (connection.isLost) {
        showAge();
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
    const live = await send("/api/live", undefined, page.signal);
    if (turn !== page.turn) return;
    page.server = live.server_id;
    setActive(live.active);
    page.delay = RESTING;
    page.run = live.run_id;
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
    if (page.bar?.state !== answer.bar.state) places.chat?.outdated();
    page.bar = answer.bar;
    places.bar?.show(answer.bar, answer.other_active);
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
        places.chat?.activeChanged();
    }
    page.active = active;
}

export const connection = new Connection((isLost) => {
    serverAnswers(!isLost);
    if (!isLost) return;
    places.bar?.disable();
    showAge();
    wake();
});

carryGradio(connection);

const LOST = "Connection lost; trying again.";

function showAge() {
    const isDetached = page.bar?.badges?.some(({ label }) => label === "Detached");
    const then = isDetached ? "Your run goes on." : "Your run continues if the server is up.";
    const aside = `(${inTime(connection.age)} ago)`;
    places.bar?.note(`${LOST} ${then}`, { aside });
}

setInterval(() => {
    if (connection.isLost) showAge();
}, TICK);

everyTime(poll);
