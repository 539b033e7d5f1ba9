// Shows jobs, the long work of the server: their progress, the time left, and a button to cancel.
// The jobs themselves do not depend on any page.

import { el, isShown, send, setText } from "./dom.js";

const FOLLOW_WAIT = 400;
const POLL_WAIT = 5000;
const SHOWN_AFTER = 15000;
const strips = new Set();

// Draws one job into `root`, which is hidden while there is no job.
export class JobView {
    constructor(root) {
        this.root = root;
        this.title = el("strong");
        this.caption = el("span", { class: "rs-job-caption" });
        this.button = el("button", { type: "button", click: () => this.cancel() }, "Cancel");
        this.fill = el("i");
        this.bar = el(
            "div",
            { class: "rs-job-bar", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100 },
            this.fill,
        );
        this.over = el("p", { class: "rs-job-over", role: "status" });
        root.classList.add("rs-job");
        root.replaceChildren(
            el("div", { class: "rs-job-row" }, el("p", {}, this.title, this.caption), this.button),
            this.bar,
            this.over,
        );
        root.hidden = true;
    }

    // job: as the server describes it, or null.
    show(job) {
        this.job = job;
        this.root.hidden = !job;
        if (!job) {
            delete this.root.dataset.job;
            return;
        }
        const isWorking = job.state === "working";
        this.root.dataset.job = job.id;
        this.root.dataset.state = job.state;
        setText(this.title, job.title);
        const caption = job.cancelling
            ? ["Cancelling", job.amount]
            : [job.text, job.amount, job.left];
        setText(this.caption, isWorking ? caption.filter(Boolean).join(" · ") : "");
        this.button.hidden = !isWorking;
        this.button.disabled = job.cancelling;
        this.button.setAttribute("aria-label", `Cancel: ${job.title}`);
        this.bar.hidden = !isWorking;
        this.showShare(job, isWorking);
        this.over.classList.toggle("rs-error", job.state === "failed");
        setText(this.over, job.error || job.result);
    }

    // The progress of the job, if it is known.
    showShare(job, isWorking) {
        const isKnown = Boolean(job.total);
        const share = isKnown ? Math.min(1, job.done / job.total) : 0;
        this.root.classList.toggle("rs-job-unknown", isWorking && !isKnown);
        this.bar.setAttribute("aria-label", `Progress: ${job.title}`);
        this.bar.setAttribute("aria-valuetext", this.caption.textContent || "under way");
        if (isKnown) this.bar.setAttribute("aria-valuenow", Math.round(100 * share));
        else this.bar.removeAttribute("aria-valuenow");
        this.fill.style.width = isKnown ? `${100 * share}%` : "";
    }

    async cancel() {
        if (!this.job) return;
        this.button.disabled = true;
        try {
            this.show(await send(`/api/jobs/${this.job.id}/cancel`, {}));
        } catch (error) {
            setText(this.over, error.message);
            this.button.disabled = false;
        }
    }

    // Shows the job until it is over, and then returns it. If the server does not answer, the
    // request is repeated, though less often; so it is while the page is hidden.
    async follow(job) {
        let isLost = false;
        while (job.state === "working") {
            this.show(job);
            await pause(isLost || document.hidden ? POLL_WAIT : FOLLOW_WAIT);
            try {
                job = await send(`/api/jobs/${job.id}`);
                isLost = false;
            } catch (error) {
                if (!error.unreachable) throw error;
                isLost = true;
            }
        }
        this.show(job);
        return job;
    }
}

// Shows, over all pages, the running jobs that no visible page shows. A page that is opened later
// shows them too.
export class JobStrip {
    constructor(root) {
        this.list = root.querySelector(".rs-jobs");
        this.views = new Map();
        strips.add(this);
        document.addEventListener("visibilitychange", () => this.poll());
        this.poll();
    }

    async poll() {
        clearTimeout(this.timer);
        try {
            if (!document.hidden) {
                const { jobs } = await send("/api/jobs");
                for (const job of jobs) this.take(job);
            }
        } catch {
            // The run bar reports that the server does not answer.
        }
        clearTimeout(this.timer);
        this.timer = setTimeout(() => this.poll(), POLL_WAIT);
    }

    // Shows a job until it is over. If it has a result, that is shown for a while longer.
    async take(job) {
        if (this.views.has(job.id)) return;
        const node = el("li");
        const view = new JobView(node);
        this.views.set(job.id, view);
        this.list.append(node);
        const watched = setInterval(() => this.place(job.id, node), FOLLOW_WAIT);
        this.place(job.id, node);
        let over = null;
        try {
            over = await view.follow(job);
        } catch {
            // The server was restarted and does not know the job.
        }
        const wasSeenElsewhere = this.isElsewhere(job.id);
        clearInterval(watched);
        node.classList.remove("rs-job-elsewhere");
        this.end(job.id, node, wasSeenElsewhere ? null : over);
    }

    // over: the finished job, or null if there is nothing to report. A failure stays until it is
    // dismissed.
    end(id, node, over) {
        const leave = () => {
            node.remove();
            this.views.delete(id);
        };
        if (!over?.error && !over?.result) leave();
        else if (over.state === "failed")
            node.append(
                el("button", { type: "button", class: "rs-job-close", click: leave }, "Close"),
            );
        else setTimeout(leave, SHOWN_AFTER);
    }

    place(id, node) {
        node.classList.toggle("rs-job-elsewhere", this.isElsewhere(id));
    }

    // Whether a visible page shows this job in its own place.
    isElsewhere(id) {
        return [...document.querySelectorAll(`[data-job="${id}"]`)].some(
            (node) => !this.list.contains(node) && isShown(node),
        );
    }
}

// To be called when a job was just started, so that it is shown at once.
export function noticeJobs() {
    for (const strip of strips) strip.poll();
}

// Waits, but ends early when the page becomes visible or hidden: a person who comes back to the
// page sees the current progress at once.
function pause(milliseconds) {
    return new Promise((resolve) => {
        const end = () => {
            clearTimeout(timer);
            document.removeEventListener("visibilitychange", end);
            resolve();
        };
        const timer = setTimeout(end, milliseconds);
        document.addEventListener("visibilitychange", end);
    });
}
