// Knows whether the server answers, and says what happened once it answers again.

const WORTH_TELLING = 3000; // ms without the server below which nothing is said
const GOING_ON = ["preparing", "running", "pausing", "paused", "stopping", "saving"];

const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

export function inTime(milliseconds) {
    const seconds = Math.max(0, Math.round(milliseconds / 1000));
    if (seconds < 120) return `${seconds} s`;
    return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

export class Connection {
    // changed(isLost) is called when the connection was lost, and when it is there again.
    constructor(changed) {
        this.changed = changed;
        this.isLost = false;
        this.slept = false;
        this.seen = null; // the server, the run and its step in the last answer
        this.last = Date.now(); // when the last answer came
        this.waiting = []; // whoever waits for the server
    }

    get age() {
        return Date.now() - this.last;
    }

    // Resolves once the server answers: at once while nothing is known to be wrong.
    answering() {
        if (!this.isLost) return Promise.resolve();
        return new Promise((resolve) => this.waiting.push(resolve));
    }

    // A request did not reach the server, or its answer did not reach us.
    lose() {
        if (this.isLost) return;
        this.isLost = true;
        this.changed(true);
    }

    // The machine or the page slept: what is on the screen is older than the page knows.
    wakeUp() {
        this.slept = true;
    }

    // The server `server` answered with the run bar `bar`, null where there is no run. Returns a
    // sentence if there is something to tell, else "".
    answered(server, bar) {
        const wasLost = this.isLost;
        const told = wasLost || this.slept ? this.whatHappened(server, bar) : "";
        this.isLost = false;
        this.slept = false;
        this.last = Date.now();
        this.seen = { server, run: bar?.run_id, step: bar?.settings?.done };
        if (wasLost) {
            this.changed(false);
            for (const resolve of this.waiting.splice(0)) resolve();
        }
        return told;
    }

    whatHappened(server, bar) {
        const { seen, age } = this;
        const isAnother = seen !== null && server !== seen.server;
        if (isAnother) {
            const run = this.whatTheRunDid(bar, " The run");
            return `The server was started again after ${inTime(age)}.${run}`;
        }
        if (age < WORTH_TELLING) return "";
        const then = this.isLost
            ? `Connected again after ${inTime(age)}`
            : `This page was asleep for ${inTime(age)}`;
        return `${then}${this.whatTheRunDid(bar, "; the run") || "."}`;
    }

    // Returns what the run has done meanwhile in words after `begin`, "" where that is not known.
    whatTheRunDid(bar, begin) {
        const done = bar?.settings?.done - this.seen?.step;
        if (!bar || bar.run_id !== this.seen?.run || !(done >= 0)) return "";
        if (bar.state === "interrupted") {
            const stop = begin.startsWith(";") ? "." : ""; // a sentence of its own follows
            return `${stop} ${bar.sentence}`;
        }
        if (done) return `${begin} went on: ${counted(done, "more step")}.`;
        return GOING_ON.includes(bar.state) ? `${begin} stands at the same step.` : "";
    }
}
