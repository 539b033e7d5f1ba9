// Tracks whether the server answers, and reports what happened meanwhile once it answers again.

const NOTABLE_OUTAGE = 3000; // shorter outages, in ms, are not reported
const GOING_ON = ["preparing", "running", "pausing", "paused", "stopping", "saving"];

const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

export function inTime(milliseconds) {
    const seconds = Math.max(0, Math.round(milliseconds / 1000));
    if (seconds < 120) return `${seconds} s`;
    return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

export class Connection {
    // changed(isLost) is called when the connection is lost, and when it is back.
    constructor(changed) {
        this.changed = changed;
        this.isLost = false;
        this.slept = false;
        this.seen = null; // the server, the run and its step according to the last answer
        this.last = Date.now(); // when the last answer came
        this.waiting = []; // the requests that wait for the server
    }

    get age() {
        return Date.now() - this.last;
    }

    // Resolves once the server answers, or at once if no problem is known.
    answering() {
        if (!this.isLost) return Promise.resolve();
        return new Promise((resolve) => this.waiting.push(resolve));
    }

    // A request did not reach the server, or its answer did not reach this page.
    lose() {
        if (this.isLost) return;
        this.isLost = true;
        this.changed(true);
    }

    // The machine or the page slept: what the screen shows is older than the page assumes.
    wakeUp() {
        this.slept = true;
    }

    // The server `server` answered with the run bar `bar`, which is null if there is no run.
    // Returns a sentence if there is something to report, else "".
    answered(server, bar) {
        const wasLost = this.isLost;
        const message = wasLost || this.slept ? this.whatHappened(server, bar) : "";
        this.isLost = false;
        this.slept = false;
        this.last = Date.now();
        this.seen = { server, run: bar?.run_id, step: bar?.settings?.done };
        if (wasLost) {
            this.changed(false);
            for (const resolve of this.waiting.splice(0)) resolve();
        }
        return message;
    }

    whatHappened(server, bar) {
        const { seen, age } = this;
        const isAnother = seen !== null && server !== seen.server;
        if (isAnother) {
            const run = this.whatTheRunDid(bar, " The run");
            return `The server was started again after ${inTime(age)}.${run}`;
        }
        if (age < NOTABLE_OUTAGE) return "";
        const then = this.isLost
            ? `Connected again after ${inTime(age)}`
            : `This page was asleep for ${inTime(age)}`;
        return `${then}${this.whatTheRunDid(bar, "; the run") || "."}`;
    }

    // Returns what the run did meanwhile, to follow the text `begin`, or "" if that is not known.
    whatTheRunDid(bar, begin) {
        const done = bar?.settings?.done - this.seen?.step;
        if (!bar || bar.run_id !== this.seen?.run || !(done >= 0)) return "";
        if (bar.state === "interrupted") {
            const stop = begin.startsWith(";") ? "." : ""; // the next sentence is complete
            return `${stop} ${bar.sentence}`;
        }
        if (done) return `${begin} went on: ${counted(done, "more step")}.`;
        return GOING_ON.includes(bar.state) ? `${begin} stands at the same step.` : "";
    }
}
