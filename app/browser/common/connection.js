// Whether the server answers: what the page says while it does not, and what happened once it does
// again.

const WORTH_TELLING = 3000;
const AGAIN = ["preparing", "running", "pausing", "paused", "stopping", "saving"];

const counted = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

export function inTime(milliseconds) {
    const seconds = Math.max(0, Math.round(milliseconds / 1000));
    if (seconds < 120) return `${seconds} s`;
    return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

export class Connection {
    // changed(isLost): it was lost, or is there again.
    constructor(changed) {
        Object.assign(this, {
            changed,
            isLost: false,
            slept: false,
            seen: null,
            last: Date.now(),
            waiting: [],
        });
    }

    get age() {
        return Date.now() - this.last;
    }

    // Resolves once the server answers: at once while nothing is known to be wrong.
    answering() {
        return this.isLost
            ? new Promise((resolve) => this.waiting.push(resolve))
            : Promise.resolve();
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

    // The server `server` answered with the run bar `bar`, null where there is no run. A sentence
    // if there is something to tell.
    answered(server, bar) {
        const told = this.isLost || this.slept ? this.whatHappened(server, bar) : "";
        const wasLost = this.isLost;
        Object.assign(this, {
            isLost: false,
            slept: false,
            last: Date.now(),
            seen: { server, run: bar?.run_id, step: bar?.settings?.done },
        });
        if (wasLost) {
            this.changed(false);
            for (const resolve of this.waiting.splice(0)) resolve();
        }
        return told;
    }

    whatHappened(server, bar) {
        const { seen, age } = this;
        const restarted = seen !== null && server !== seen.server;
        if (!restarted && age < WORTH_TELLING) return "";
        if (restarted)
            return `The server was started again after ${inTime(age)}.${this.whatTheRunDid(bar, " The run")}`;
        const then = this.isLost
            ? `Connected again after ${inTime(age)}`
            : `This page was asleep for ${inTime(age)}`;
        return `${then}${this.whatTheRunDid(bar, "; the run") || "."}`;
    }

    whatTheRunDid(bar, begin) {
        const done = bar?.settings?.done - this.seen?.step;
        if (!bar || bar.run_id !== this.seen?.run || !(done >= 0)) return "";
        if (bar.state === "interrupted")
            return `${begin.startsWith(";") ? "." : ""} ${bar.sentence}`;
        if (done) return `${begin} went on: ${counted(done, "more step")}.`;
        return AGAIN.includes(bar.state) ? `${begin} stands at the same step.` : "";
    }
}
